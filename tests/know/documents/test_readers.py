"""Documents of every format: their text, titles, headings and pages; and what is left out of hostile ones, and why."""

from __future__ import annotations

import io
import json
import os
import socket
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from moesaic.errors import UserError
from moesaic.know.build import build
from moesaic.know.documents import archives, formats, html, pdf
from moesaic.know.documents.bounded import Bounded
from moesaic.know.documents.document import Document, Raw, Unreadable
from moesaic.know.documents.formats import read_documents
from moesaic.know.documents.sources import files_below

PAGE = b"""<!DOCTYPE html [<!ENTITY a "aha"><!ENTITY b "&a;&a;&a;">]>
<html><head><title>On  Owls</title><meta http-equiv="refresh" content="0;url=http://127.0.0.1:9/">
<script src="http://127.0.0.1:9/x.js">steal()</script><style>p { color: red }</style></head>
<body><nav>Home About</nav><h1>Owls</h1><p>Owls hunt at night &amp; sleep by day.</p><h2>Ears</h2>
<p>Their <b>ears</b> are uneven. &b;</p><iframe src="file:///etc/passwd"></iframe><img src="http://127.0.0.1:9/p.png">
<ul><li>barn owl</li><li>snowy owl</li></ul></body></html>"""


def read(raw: bytes, source: str) -> list[Document]:
    return read_documents(Raw(raw, source))


def one(raw: bytes, source: str) -> Document:
    (document,) = read(raw, source)
    return document


def why(raw: bytes, source: str) -> str:
    with pytest.raises(Unreadable) as refused:
        read(raw, source)
    return str(refused.value)


def pdf_of(*pages: str) -> bytes:
    """A PDF as small as one can be, each page with one line of text."""
    objects = [b"<< /Type /Catalog /Pages 2 0 R >>", b""]
    for number, text in enumerate(pages):
        stream = f"BT /F1 12 Tf 72 720 Td ({text}) Tj ET".encode()
        font = b"<< /Font << /F1 << /Type /Font /Subtype /Type1 /BaseFont /Helvetica >> >> >>"
        place = b"%d 0 R" % (4 + 2 * number)
        objects.append(b"<< /Type /Page /Parent 2 0 R /Resources " + font + b" /Contents " + place + b" >>")
        objects.append(b"<< /Length %d >> stream\n" % len(stream) + stream + b"\nendstream")
    kids = b" ".join(b"%d 0 R" % (3 + 2 * number) for number in range(len(pages)))
    box = b"/MediaBox [0 0 600 800]"
    objects[1] = b"<< /Type /Pages " + box + b" /Count %d /Kids [" % len(pages) + kids + b"] >>"
    out, places = b"%PDF-1.4\n", []
    for number, content in enumerate(objects, 1):
        places.append(len(out))
        out += b"%d 0 obj " % number + content + b" endobj\n"
    table = b"".join(b"%010d 00000 n \n" % place for place in places)
    head = b"xref\n0 %d\n0000000000 65535 f \n" % (len(objects) + 1)
    return (
        out
        + head
        + table
        + b"trailer << /Size %d /Root 1 0 R >>\nstartxref\n%d\n%%%%EOF"
        % (
            len(objects) + 1,
            len(out),
        )
    )


def zipped(**members: bytes) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return file.getvalue()


def tarred(members: list[tuple[tarfile.TarInfo, bytes]], mode: str = "w:gz") -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode=mode) as archive:  # type: ignore[call-overload]
        for member, content in members:
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return file.getvalue()


def test_text_has_one_kind_of_line_end_and_no_control_characters() -> None:
    assert one(b"\xef\xbb\xbfa\r\nb\rc\x1b[31m", "x/notes.txt") == Document("x/notes.txt", "notes", "a\nb\nc [31m")
    assert one("é".encode("utf-16"), "notes.txt").text == "é"


@pytest.mark.parametrize(
    ("raw", "source", "reason"),
    [
        (b"caf\xe9", "a.txt", "is not UTF-8 text"),
        (b"\x7fELF\0\0", "tool", "is not text"),
        (b" \n", "a.md", "is empty"),
        (b"GIF89a", "a.gif", "there is no reader for .gif"),
        (b"%PDF-1.7 nothing", "a.pdf", "is not a PDF"),
        (b"PK nothing", "a.zip", "is not a zip archive"),
        (b"nothing", "a.tar.gz", "is not a tar archive"),
        (b"\x1f\x8bnothing", "a.tgz", "is not a tar archive"),
        (b"{", "a.json", "is not JSON"),
        (b"[" * 100_000, "a.json", "nested too deep"),
        (b"[1, {}]", "a.json", "holds no text"),
        (b"<html><script>x</script></html>", "a.html", "holds no text"),
    ],
)
def test_what_cannot_be_read_says_why(raw: bytes, source: str, reason: str) -> None:
    assert reason in why(raw, source)


def test_markdown_keeps_its_headings() -> None:
    text = "Title\n=====\n\nText.\n\n```\n# not one\n```\n\n## Part # \nMore\n\n| a |\n---\n"
    document = one(text.encode(), "a.md")
    assert document.text == text
    assert [(heading.level, heading.title) for heading in document.headings] == [(1, "Title"), (2, "Part")]
    assert document.title == "Title"


def test_rst_levels_are_in_the_order_of_their_marks() -> None:
    text = "=====\nGuide\n=====\n\nIntro\n-----\nText.\n\nMore\n~~~~\n\nEnd\n---\n"
    headings = one(text.encode(), "a.rst").headings
    assert [(h.level, h.title) for h in headings] == [(1, "Guide"), (2, "Intro"), (3, "More"), (2, "End")]
    assert [text[h.start : h.end].split("\n")[0] for h in headings] == ["=====", "Intro", "More", "End"]


def test_html_gives_its_text_and_runs_and_fetches_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("something was fetched")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    (document,) = html.read(Raw(PAGE, "owls.html"))
    assert document == one(PAGE, "owls.html")  # which another process reads
    assert document.title == "On Owls"
    assert [(heading.level, heading.title) for heading in document.headings] == [(1, "Owls"), (2, "Ears")]
    for expected in ("Owls hunt at night & sleep by day.", "ears", "barn owl", "snowy owl"):
        assert expected in document.text
    for hidden in ("steal", "color", "Home", "aha", "passwd", "127.0.0.1"):
        assert hidden not in document.text


@pytest.mark.parametrize(
    ("page", "text"),
    [(b"<p>tiny</p>", "tiny"), (b"<ul><li>one<li>two</ul><!-- hidden -->", "one two"), (b"just words", "just words")],
)
def test_a_piece_of_a_page_is_read(page: bytes, text: str) -> None:
    assert one(page, "a.html").text == text


def test_html_nested_without_end_or_too_large_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert why(b"<div>" * 50_000 + b"x", "deep.html")
    monkeypatch.setattr(html, "MAX_BYTES", 100)
    with pytest.raises(Unreadable, match="too large"):
        html.read(Raw(PAGE, "a.html"))


@pytest.mark.parametrize(("library", "source"), [("trafilatura", "a.html"), ("pypdf", "a.pdf")])
def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch, library: str, source: str) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(UserError, match=r"pip install 'moesaic\[know\]'"):
        read(b"x", source)


def test_pdf_pages_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    document = one(pdf_of("First page.", "Second page."), "a/report.pdf")
    assert (document.title, document.text) == ("report", "First page.\n\nSecond page.")
    assert [document.text[start:][:6] for start in document.pages] == ["First ", "Second"]
    monkeypatch.setattr(pdf, "MAX_PAGES", 1)
    with pytest.raises(Unreadable, match="has 2 pages"):
        pdf.read(Raw(pdf_of("a", "b"), "a.pdf"))


def test_a_pdf_that_takes_for_ever_costs_no_more_than_its_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nine thousand times the same page, which takes a while: less than 100 kB, and an hour to read."""
    endless = pdf_of("a) Tj (" * 3_000).replace(
        b"/Count 1 /Kids [3 0 R]", b"/Count 9000 /Kids [" + b"3 0 R " * 9000 + b"]"
    )
    assert len(endless) < 100_000
    monkeypatch.setitem(formats.READERS, ".pdf", Bounded("pdf", "pypdf", seconds=0.5))
    folder = tmp_path / "texts"
    folder.mkdir()
    for name, content in (("a.pdf", endless), ("b.pdf", pdf_of("A page.")), ("c.html", PAGE)):
        (folder / name).write_bytes(content)
    built = build([folder], tmp_path / "kb")
    assert (built.added, built.documents) == (2, 2)
    (skipped,) = built.skipped
    assert skipped.source.endswith("a.pdf") and "takes more than" in skipped.why and "seconds to read" in skipped.why


def test_what_fills_the_memory_of_the_reader_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    large = b"<html><body>" + b"<p>word <b>word</b></p>" * 100_000 + b"</body></html>"
    monkeypatch.setitem(formats.READERS, ".html", Bounded("html", "trafilatura", memory=160 * 2**20))
    assert why(large, "large.html")
    monkeypatch.undo()
    assert one(PAGE, "a.html").title == "On Owls"  # the next is read, by this process or a new one


def test_records_are_documents_of_their_own() -> None:
    lines = [{"title": "Paris", "text": "On the Seine."}, {"id": 7, "contents": "No title."}, {"title": "none"}]
    raw = Raw("\n".join([*map(json.dumps, lines), "not json", '"\\ud800"']).encode(), "facts.jsonl")
    assert [(d.source, d.title, d.text) for d in read_documents(raw)] == [
        ("facts.jsonl#1", "Paris", "On the Seine."),
        ("facts.jsonl#7", "facts", "No title."),
    ]
    assert [str(skipped) for skipped in raw.skipped] == [
        "facts.jsonl line 4: is not JSON",
        "facts.jsonl record 3: has no text",
        "facts.jsonl record 5: has no text",
    ]
    assert one(b'{"title": "T", "text": "half \\ud800 a character"}', "a.json").text == "half ? a character"


def test_archives_are_read_and_tricks_in_names_refused() -> None:
    raw = Raw(
        zipped(**{"docs/a.md": b"# A\n\ntext", "../evil.txt": b"x", "/etc/evil.txt": b"x", "C:\\evil.txt": b"x",
                  "..\\evil.txt": b"x", ".hidden/b.txt": b"x", "inner.zip": zipped(a=b"b"), "e.png": b"x"}),
        "all.zip",
    )  # fmt: skip
    assert [document.source for document in read_documents(raw)] == ["all.zip/docs/a.md"]
    reasons = [skipped.why for skipped in raw.skipped]
    assert reasons.count("leads out of the archive") == 4
    assert "is an archive in an archive" in reasons
    assert "there is no reader for .png" in reasons


@pytest.mark.parametrize("mode", ["w", "w:gz", "w:bz2", "w:xz"])
def test_links_and_devices_in_archives_are_refused(mode: str) -> None:
    members = [(tarfile.TarInfo("docs/a.txt"), b"hello"), (tarfile.TarInfo("../up.txt"), b"x")]
    for kind in (tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.FIFOTYPE):
        member = tarfile.TarInfo(f"kind{kind.decode()}.txt")
        member.type, member.linkname = kind, "/etc/passwd"
        members.append((member, b""))
    raw = Raw(tarred(members, mode), "all.tar.gz")
    assert [document.text for document in read_documents(raw)] == ["hello"]
    reasons = [skipped.why for skipped in raw.skipped]
    assert reasons == ["leads out of the archive"] + ["is a link or a device"] * 4


def test_a_link_in_a_zip_is_refused() -> None:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        link = zipfile.ZipInfo("link.txt")
        link.external_attr = 0o120777 << 16
        archive.writestr(link, "/etc/passwd")
    assert "no document" in why(file.getvalue(), "a.zip")


def test_bombs_are_refused_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archives, "MAX_MEMBER", 10_000)
    monkeypatch.setattr(archives, "MAX_UNPACKED", 15_000)
    small, large = b"a " * 4_000, b"a " * 8_000
    assert "unpacks to too much" in why(zipped(**{"a.txt": b"fine", "b.txt": large}), "a.zip")
    assert "unpacks to too much" in why(zipped(**{"a.txt": small, "b.txt": small}), "a.zip")
    bomb = tarred([(tarfile.TarInfo("a.txt"), b"fine"), (tarfile.TarInfo("../b"), large), (tarfile.TarInfo("c"), b"")])
    assert "unpacks to more" in why(bomb, "a.tgz")  # in a member that is not even read
    monkeypatch.setattr(archives, "MAX_MEMBERS", 2)
    assert "has 3 members" in why(zipped(a=b"", b=b"", c=b""), "a.zip")
    three = tarred([(tarfile.TarInfo(name), b"") for name in "abc"])
    assert "more than 2 members" in why(three, "a.tgz")


def test_a_size_that_an_archive_lies_about_is_no_help(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archives, "MAX_MEMBER", 10_000)
    raw = zipped(**{"a.txt": b"a " * 100_000})
    lied = raw.replace((200_000).to_bytes(4, "little"), (20).to_bytes(4, "little"))
    assert lied != raw
    document = Raw(lied, "a.zip")
    with pytest.raises(Unreadable):
        read_documents(document)


def test_only_regular_files_below_the_folder_are_indexed(tmp_path: Path) -> None:
    docs = tmp_path / "docs"
    (docs / ".git").mkdir(parents=True)
    (docs / ".git" / "a.txt").write_text("x")
    (docs / "a.txt").write_text("text")
    (tmp_path / "secret.txt").write_text("secret")
    (docs / "out.txt").symlink_to(tmp_path / "secret.txt")
    (docs / "up").symlink_to(tmp_path)
    (docs / "same.txt").symlink_to(docs / "a.txt")
    (docs / "loop").symlink_to(docs)
    os.mkfifo(docs / "pipe.txt")
    files, skipped = files_below([docs, docs / "a.txt"])
    assert [file.source for file in files] == ["docs/a.txt"]
    assert sorted(map(str, skipped)) == [
        "docs/out.txt: is a link that leads out of the folder",
        "docs/pipe.txt: is not a regular file",
        "docs/up: is a link that leads out of the folder",
    ]
    with pytest.raises(UserError, match="no such file"):
        files_below([tmp_path / "missing"])


def test_what_is_left_out_is_reported_and_the_rest_is_built(tmp_path: Path) -> None:
    docs = tmp_path / "docs"
    docs.mkdir()
    (docs / "good.txt").write_text("good")
    (docs / "bad.txt").write_bytes(b"\xff")
    (docs / "half.zip").write_bytes(zipped(**{"in.md": b"# In\n\ninside", "../x.txt": b"x"}))
    built = build([docs], tmp_path / "kb")
    assert (built.added, built.documents) == (2, 2)
    assert [skipped.source for skipped in built.skipped] == ["docs/bad.txt", "docs/half.zip/../x.txt"]
