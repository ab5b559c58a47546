"""What fits the context: the meter, the ways on when it is full, and attached files."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from tests.serve.web.scripted_server import ScriptedServer, count_tokens
from tests.serve.web.talking import answered, answers, ask, said, talk


@pytest.fixture
def small(page: Page, server: ScriptedServer) -> Page:
    """The page, with a model of 100 tokens of context and a conversation that takes most of them."""
    server.context = 100
    server.answer = "word " * 10
    page.reload()
    expect(page.locator("#model")).to_have_text("scripted-moe-7b")
    for text in ("Alpha question", "Beta question", "Gamma question"):
        talk(page, text)
    return page


def test_the_meter_counts_and_warns(page: Page, server: ScriptedServer) -> None:
    server.context = 100
    page.reload()
    expect(page.locator("#context")).to_be_hidden()
    page.fill("#prompt", "one two three")
    expect(page.locator("#context")).to_contain_text("5 of 100 tokens")
    assert server.tokenized[-1]["messages"] == [{"role": "user", "content": "one two three"}]
    page.fill("#prompt", "word " * 60)
    expect(page.locator("#context")).to_have_attribute("data-state", "fits")
    page.fill("#prompt", "word " * 90)
    expect(page.locator("#context")).to_have_attribute("data-state", "near")
    expect(page.locator("#way-on")).to_contain_text("nearly full")
    page.fill("#prompt", "word " * 120)
    expect(page.locator("#context")).to_have_attribute("data-state", "over")
    expect(page.locator("#way-on")).to_contain_text("Shorten the message")
    page.press("#prompt", "Enter")
    expect(page.locator("#prompt")).to_have_value(re.compile("word"))  # kept, and not sent to fail
    assert not server.asked


def test_max_tokens_never_exceed_what_is_left(page: Page, server: ScriptedServer) -> None:
    server.context = 100
    page.reload()
    expect(page.locator("#model")).to_have_text("scripted-moe-7b")
    talk(page, "one two three")
    assert server.asked[0]["max_tokens"] == 95


def test_past_the_context_the_oldest_turns_can_be_left_out(small: Page, server: ScriptedServer) -> None:
    ask(small, "new " * 50)
    expect(small.locator("#way-on [role=alert]")).to_contain_text("longer than the model's context")
    small.click("text=Leave out the oldest turns")
    expect(small.locator("#way-on")).to_be_hidden()
    expect(small.locator(".cut")).to_contain_text("The messages above are not sent to the model.")
    small.press("#prompt", "Enter")
    answered(small, 4)
    asked = server.asked[-1]
    assert count_tokens(asked) <= 100
    assert "Alpha question" not in said(asked) and said(asked)[-1].startswith("new")
    expect(small.locator(".mine > .body").first).to_have_text("Alpha question")  # still there to read
    small.reload()
    expect(small.locator(".cut")).to_be_visible()
    small.click("text=Send all again")
    expect(small.locator(".cut")).to_have_count(0)


def test_past_the_context_the_oldest_turns_can_be_summarised(small: Page, server: ScriptedServer) -> None:
    ask(small, "new " * 50)
    server.answers = ["They spoke of Greek letters."]
    small.click("text=Summarise the oldest turns")
    expect(small.locator(".cut")).to_contain_text("A summary is sent instead")
    request = server.asked[-1]
    assert not request.get("stream") and "user: Alpha question" in said(request)[0]
    small.press("#prompt", "Enter")
    answered(small, 4)
    asked = server.asked[-1]
    assert asked["messages"][0]["role"] == "system"
    assert "They spoke of Greek letters." in said(asked)[0] and "Alpha question" not in said(asked)
    small.click(".cut summary")
    expect(small.locator(".cut .reasoning-text")).to_have_text("They spoke of Greek letters.")


def test_past_the_context_a_new_chat_can_begin_from_here(small: Page, server: ScriptedServer) -> None:
    ask(small, "new " * 50)
    small.click("text=New chat from here")
    expect(small.locator(".mine > .body")).to_have_text(["Gamma question"])
    expect(small.locator("#prompt")).to_have_value(re.compile("new"))
    small.press("#prompt", "Enter")
    answered(small, 2)
    assert len(said(server.asked[-1])) == 3
    expect(small.locator(".conversation")).to_have_count(2)


def test_files_are_attached_as_text(page: Page, server: ScriptedServer, tmp_path: Path) -> None:
    notes = tmp_path / "notes.md"
    notes.write_text("# Notes\n```\ncode <script>\n```\n")
    page.set_input_files("#attach-file", notes)
    chip = page.locator(".chip")
    expect(chip).to_contain_text("notes.md")
    expect(chip).to_contain_text(re.compile(r"\d+ tokens"))
    ask(page, "Summarise it")
    answered(page, 1)
    expect(chip).to_have_count(0)
    [content] = said(server.asked[0])
    assert content == "Attached file: notes.md\n````\n# Notes\n```\ncode <script>\n```\n\n````\n\nSummarise it"
    expect(page.locator(".mine > .body")).to_have_text("Summarise it")
    page.click(".attachment summary")
    expect(page.locator(".attachment pre")).to_contain_text("code <script>")
    page.reload()
    expect(page.locator(".attachment summary")).to_have_text("notes.md")


def test_what_is_no_text_or_too_long_is_refused_with_the_reason(
    page: Page, server: ScriptedServer, tmp_path: Path
) -> None:
    note = page.locator("#attachments .form-note")
    picture = tmp_path / "picture.png"
    picture.write_bytes(b"\x89PNG\r\n\x1a\n\x00\xff")
    page.set_input_files("#attach-file", picture)
    expect(note).to_contain_text("picture.png: not a text file")
    long = tmp_path / "long.txt"
    long.write_text("word " * 5000)
    page.set_input_files("#attach-file", long)
    expect(note).to_contain_text("the context of this model holds 4,096")
    huge = tmp_path / "huge.txt"
    huge.write_text("x" * 2_000_001)
    page.set_input_files("#attach-file", huge)
    expect(note).to_contain_text("at most 2 MB")
    expect(page.locator(".chip")).to_have_count(0)


def test_files_are_dropped_and_pasted(page: Page, server: ScriptedServer) -> None:
    give = """([kind, name, text]) => {
        const data = new DataTransfer();
        data.items.add(new File([text], name));
        const box = document.getElementById('prompt');
        const options = { bubbles: true, cancelable: true };
        if (kind === 'drop') box.dispatchEvent(new DragEvent('drop', { ...options, dataTransfer: data }));
        else box.dispatchEvent(new ClipboardEvent('paste', { ...options, clipboardData: data }));
    }"""
    page.evaluate(give, ["drop", "dropped.txt", "one"])
    expect(page.locator(".chip")).to_have_count(1)
    page.evaluate(give, ["paste", "pasted.txt", "two"])
    expect(page.locator(".chip-name")).to_have_text(["dropped.txt", "pasted.txt"])
    page.evaluate("text => navigator.clipboard.writeText(text)", "long text " * 1000)
    page.focus("#prompt")
    page.keyboard.press("Control+v")
    expect(page.locator(".chip-name").last).to_have_text("pasted text.txt")
    page.click("[aria-label='Remove dropped.txt']")
    expect(page.locator(".chip")).to_have_count(2)
    page.focus("#prompt")
    page.keyboard.press("Enter")
    answered(page, 1)
    [content] = said(server.asked[0])
    assert "pasted.txt" in content and "long text" in content and "dropped.txt" not in content
    expect(answers(page)).to_have_text("Hello there.")
