"""Citations of an answer that was streamed: told whether they hold, and found where the model named none."""

from __future__ import annotations

from moesaic.know.answer.served import checked_citations
from moesaic.serve.api.knowledge import Passage

RIVER = "The Danube rises in the Black Forest. It ends in the Black Sea after 2850 kilometres."
CITY = "Vienna lies on the Danube. Graz lies on the Mur."
PASSAGES = [
    Passage("a", "rivers.md", "Danube", RIVER, 50, 50 + len(RIVER)),
    Passage("b", "cities.md", "Cities", CITY, 0, len(CITY)),
]


def test_true_citations_hold_and_false_ones_do_not() -> None:
    answer = "The Danube ends in the Black Sea [1]. The Danube ends in the Baltic Sea [1]. Vienna lies on the Mur. [2]"
    true, false, other = checked_citations(answer, PASSAGES)
    assert [true.supported, false.supported, other.supported] == [True, False, False]
    assert answer[true.start : true.end] == "[1]"
    assert RIVER[true.quote_start - 50 : true.quote_end - 50] == true.quote
    assert "Black Sea" in true.quote


def test_a_sentence_without_a_mark_gets_the_passage_that_says_it() -> None:
    answer = "Graz lies on the Mur. Graz has a famous opera house from 1899."
    (found,) = checked_citations(answer, PASSAGES)
    assert (found.number, found.quote, found.supported) == (2, "Graz lies on the Mur.", True)
    assert found.start == found.end == len("Graz lies on the Mur.")


def test_numbers_of_no_passage_are_no_citations_and_loops_end() -> None:
    assert checked_citations("Nothing of this is true anywhere [7].", PASSAGES) == []
    assert len(checked_citations("Vienna lies on the Danube [2]. " * 2000, PASSAGES)) <= 264
    assert checked_citations("", PASSAGES) == []
