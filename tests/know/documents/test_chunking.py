"""Chunks can be quoted: each is a piece of its document's text, none overlap, and all of the text is in one."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from moesaic.know.documents.chunking import TARGET, chunks_of
from moesaic.know.documents.document import Document, Raw, Unreadable
from moesaic.know.documents.formats import read_documents

PIECES = [
    "# One",
    "## Two",
    "Title\n=====",
    "A sentence.",
    "Dr. No said (so)! ",
    "\n\n",
    "\n",
    "- item",
    "   ",
    "“Why?” ",
]
PIECES += ["世界。", "你好！", "é", "\u00a0", "word " * 30, "x" * 150, "```\n# code\n```", "\t", "e.g. this. "]


@given(st.lists(st.sampled_from(PIECES) | st.text(max_size=20), max_size=40), st.integers(20, 200))
@settings(max_examples=60, deadline=None)
def test_chunks_are_the_text_and_nothing_is_lost(pieces: list[str], target: int) -> None:
    text = "".join(pieces)
    try:
        (document,) = read_documents(Raw(text.encode(), "a.md"))
    except Unreadable:
        document = Document("a.md", "a", text)
    chunks = chunks_of(document, target)
    end = 0
    for chunk in chunks:
        assert document.text[chunk.start : chunk.end] == chunk.text == chunk.text.strip() != ""
        assert document.text[end : chunk.start].strip() == ""
        assert len(chunk.text) <= target + target // 5
        end = chunk.end
    assert document.text[end:].strip() == ""
    assert len({chunk.id for chunk in chunks}) == len(chunks)


def test_a_long_paragraph_is_cut_between_sentences() -> None:
    sentences = [f"Sentence number {number} says what it says, as Mr. A. Smith wrote." for number in range(100)]
    chunks = chunks_of(Document("a", "a", " ".join(sentences)))
    assert len(chunks) > 5
    for chunk in chunks:
        assert len(chunk.text) <= TARGET
        assert chunk.text.startswith("Sentence") and chunk.text.endswith("wrote.")


def test_much_white_space_is_in_no_chunk() -> None:
    assert [chunk.text for chunk in chunks_of(Document("a", "a", "x" + " " * 5000 + "y"))] == ["x", "y"]


def test_paragraphs_stay_whole_where_they_can() -> None:
    paragraphs = [f"{number} " + "word " * 60 for number in range(10)]
    chunks = chunks_of(Document("a", "a", "\n\n".join(paragraphs)))
    starts = {chunk.text.split()[0] for chunk in chunks}
    assert starts == {"0", "3", "6", "9"}


def test_a_section_is_a_chunk_with_its_headings() -> None:
    (document,) = read_documents(Raw(b"# A\n\n## B\n\nbee\n\n### C\n\nsea\n\n## D\n\ndee\n", "a.md"))
    assert [(chunk.headings, chunk.text.split()[-1]) for chunk in chunks_of(document)] == [
        (("A", "B"), "bee"),
        (("A", "B", "C"), "sea"),
        (("A", "D"), "dee"),
    ]


def test_a_chunk_knows_the_page_it_begins_on() -> None:
    pages = ["First. " * 60, "Second. " * 100, "Third."]
    starts = [0, len(pages[0]) + 2, len(pages[0]) + len(pages[1]) + 4]
    document = Document("a.pdf", "a", "\n\n".join(pages), pages=tuple(starts))
    for chunk in chunks_of(document, 300):
        assert chunk.page == 1 + sum(chunk.start >= start for start in starts[1:])


def test_what_is_indexed_names_the_headings_that_the_text_does_not_hold() -> None:
    text = "# A\n\n" + "word " * 190 + "\n\n" + "more " * 190
    (document,) = read_documents(Raw(text.encode(), "a.md"))
    first, second = chunks_of(document)
    assert first.passage == first.text
    assert second.passage == "A\n" + second.text
