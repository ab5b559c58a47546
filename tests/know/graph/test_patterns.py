"""Entities and triples by patterns: what they find in plain sentences, and that no text stops them."""

from __future__ import annotations

import random

from moesaic.know.chunk import Chunk
from moesaic.know.graph.names import key, scan
from moesaic.know.graph.patterns import PatternExtractor
from moesaic.know.graph.triple import Extraction


def extracted(title: str, *texts: str) -> list[Extraction]:
    chunks = [Chunk(str(n), "d", "d", title, text, 0, len(text)) for n, text in enumerate(texts)]
    return PatternExtractor().extract(chunks)


def test_names_are_found_and_ordinary_words_are_not() -> None:
    [found] = extracted(
        "Ada Lovelace",
        "In London, Ada Lovelace met Charles Babbage from Trinity College. Engines ran. The engines counted.",
    )
    assert set(found.names) == {"London", "Ada Lovelace", "Charles Babbage", "Trinity College"}
    assert not {"In", "The", "Engines"} & set(found.names)


def test_what_something_is_and_where_it_is_from() -> None:
    [found] = extracted(
        "Forbidden Ground", "Forbidden Ground is a Hungarian film directed by Pál Gábor. It was released in May 1968."
    )
    assert ("Forbidden Ground", "is a", "Hungarian film") in found.triples
    assert ("Forbidden Ground", "directed by", "Pál Gábor") in found.triples
    assert ("Forbidden Ground", "released", "May 1968") in found.triples  # "It" is what the document is about


def test_a_role_between_two_names() -> None:
    [found] = extracted("", "Paris, the capital of France, lies on the Seine.")
    assert ("Paris", "capital of", "France") in found.triples


def test_a_surname_means_the_full_name_of_the_document() -> None:
    first, second = extracted("Physics", "Albert Einstein moved to Bern.", "There Einstein wrote. Bern paid him.")
    assert "Albert Einstein" in first.names
    assert second.names == {"Albert Einstein": 1, "Bern": 1}


def test_a_surname_of_two_people_means_neither() -> None:
    [found] = extracted("", "Marie Curie and Pierre Curie worked in Paris. Then Curie rested.")
    assert found.names["Curie"] == 1 and found.names["Marie Curie"] == 1


def test_acronyms_and_parentheses_are_other_names() -> None:
    [found] = extracted("Lilu (mythology)", "The American Institute of Physics (AIP) publishes it.")
    assert ("AIP", "also called", "American Institute of Physics") in found.triples
    assert ("Lilu (mythology)", "also called", "Lilu") in found.triples
    assert found.titles == ("Lilu (mythology)", "Lilu")


def test_quotes_dates_and_code() -> None:
    kinds = {
        m.text: m.kind for m in scan('He wrote "war and peace" on 3 May 1869 and called os.path.join(), not `x = 1`.')
    }
    assert kinds["war and peace"] == "quoted"
    assert kinds["3 May 1869"] == "date"
    assert kinds["os.path.join"] == "code" and kinds["x = 1"] == "code"


def test_scripts_without_capitals_give_what_they_can() -> None:
    [found] = extracted("鲁迅", "鲁迅写了《狂人日记》。《狂人日记》很有名，鲁迅也很有名。")
    assert {"狂人日记", "鲁迅"} <= set(found.names)
    [found] = extracted("", "أحمد ذهب إلى المدرسة ثم عاد")
    assert isinstance(found.names, dict)  # nothing is known, and nothing breaks


def test_one_key_for_spellings_of_a_name() -> None:
    assert key("The Beatles") == key("Beatles’s") == "beatles"
    assert key("Alû") == key("Alu")
    assert key("Person - centered therapy") == key("Person-centered Therapy")


def test_any_text_is_read() -> None:
    random_text = random.Random(0)
    letters = "aA. \"“”«`'\n(),-–0149éÉßЯя中《》́\u200b\x00"
    for _ in range(200):
        text = "".join(random_text.choices(letters, k=80))
        [found] = extracted(text[:9], text)
        assert all(name.strip() for name in found.names)
