"""Conversations kept in the browser: list, search, rename, delete with undo, export, import, and two tabs at once."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, Page, expect

from tests.serve.web.conftest import Watched, opened
from tests.serve.web.scripted_server import ScriptedServer
from tests.serve.web.talking import answered, answers, ask, said, talk


def titles(page: Page) -> Any:
    return page.locator(".conversation .open")


def have(page: Page, *questions: str) -> None:
    """Conversations, each with one question, the last one open."""
    for question in questions:
        page.click("#new-chat")
        expect(page.locator(".message")).to_have_count(0)
        talk(page, question)


def test_a_new_chat_keeps_the_old_one_and_a_reload_shows_it(page: Page, server: ScriptedServer) -> None:
    have(page, "Remember me")
    page.reload()
    expect(page.locator(".mine > .body")).to_have_text("Remember me")
    expect(answers(page)).to_have_text("Hello there.")
    expect(page.locator(".theirs .token")).not_to_have_count(0)
    talk(page, "And now?")
    assert said(server.asked[-1]) == ["Remember me", "Hello there.", "And now?"]
    page.click("#new-chat")
    expect(page.locator("#welcome")).to_be_visible()
    expect(page.locator(".message")).to_have_count(0)
    talk(page, "Another")
    expect(titles(page)).to_have_text(["Another", "Remember me"])
    titles(page).nth(1).click()
    expect(page.locator(".mine > .body")).to_have_text(["Remember me", "And now?"])
    expect(titles(page).nth(1)).to_have_attribute("aria-current", "true")


def test_search_finds_words_of_titles_and_messages(page: Page, server: ScriptedServer) -> None:
    server.answers = ["Use a whisk.", "Paris it is."]
    have(page, "How to beat eggs", "A capital")
    page.keyboard.press("Control+k")
    expect(page.locator("#search")).to_be_focused()
    page.keyboard.type("whisk eggs")
    expect(titles(page)).to_have_text(["How to beat eggs"])
    expect(page.locator(".list-note")).to_have_text("1 found")
    page.fill("#search", "PARIS")
    expect(titles(page)).to_have_text(["A capital"])
    page.fill("#search", "nowhere")
    expect(titles(page)).to_have_count(0)
    page.fill("#search", "")
    expect(titles(page)).to_have_count(2)


def test_rename(page: Page) -> None:
    have(page, "First words")
    page.locator(".conversation").hover()
    page.click("[aria-label='Rename First words']")
    page.fill("dialog[open] input", "A better <b>name</b>")
    page.keyboard.press("Enter")
    expect(titles(page)).to_have_text("A better <b>name</b>")
    talk(page, "More")
    page.reload()
    expect(titles(page)).to_have_text("A better <b>name</b>")


def test_delete_and_undo(page: Page) -> None:
    have(page, "Keep me", "Delete me")
    page.locator(".conversation").first.hover()
    page.click("[aria-label='Delete Delete me']")
    expect(titles(page)).to_have_text(["Keep me"])
    expect(page.locator("#welcome")).to_be_visible()
    page.click("#toast >> text=Undo")
    expect(titles(page)).to_have_text(["Delete me", "Keep me"])
    expect(page.locator(".mine > .body")).to_have_text("Delete me")
    expect(page.locator(".theirs .token")).not_to_have_count(0)
    page.locator(".conversation").first.hover()
    page.click("[aria-label='Delete Delete me']")
    expect(titles(page)).to_have_count(1)
    page.reload()
    expect(titles(page)).to_have_text(["Keep me"])


def test_export_and_import(page: Page, server: ScriptedServer, tmp_path: Path) -> None:
    page.fill("#system", "Be kind.")
    server.answers = ["One.", "Two."]
    have(page, "Question")
    page.click("[aria-label=Regenerate]")
    expect(answers(page)).to_have_text("Two.")
    answered(page)
    with page.expect_download() as loading:
        page.click("#export-all")
    file = tmp_path / "all.json"
    loading.value.save_as(file)
    content = json.loads(file.read_text())
    [conversation] = content["conversations"]
    assert content["format"] == "moesaic-conversations"
    assert (conversation["title"], conversation["system"]) == ("Question", "Be kind.")
    assert sorted(one["content"] for one in conversation["messages"]) == ["One.", "Question", "Two."]
    page.locator(".conversation").hover()
    page.click("[aria-label='Delete Question']")
    expect(titles(page)).to_have_count(0)
    page.set_input_files("#import-file", file)
    expect(titles(page)).to_have_text(["Question"])
    expect(answers(page)).to_have_text("Two.")
    expect(page.locator(".theirs .place")).to_have_text("2/2")
    expect(page.locator("#system")).to_have_value("Be kind.")
    page.set_input_files("#import-file", file)  # as another one, not over the first
    expect(titles(page)).to_have_text(["Question", "Question"])


def test_import_takes_a_list_of_messages_and_refuses_the_rest(page: Page, tmp_path: Path) -> None:
    plain = tmp_path / "plain.json"
    turns = [("system", "Be brief."), ("user", "<img src=x>"), ("assistant", "Fine.")]
    plain.write_text(json.dumps([{"role": role, "content": content} for role, content in turns]))
    page.set_input_files("#import-file", plain)
    expect(page.locator(".mine > .body")).to_have_text("<img src=x>")
    expect(page.locator("#system")).to_have_value("Be brief.")
    for text, reason in (("{", "not JSON"), ("{}", "no conversations"), ('[{"role": "wizard"}]', "no role")):
        bad = tmp_path / "bad.json"
        bad.write_text(text)
        page.set_input_files("#import-file", bad)
        expect(page.locator("#toast")).to_contain_text(reason)
    expect(titles(page)).to_have_count(1)


def test_two_tabs_never_overwrite_each_other(page: Page, server: ScriptedServer, watched: Watched) -> None:
    have(page, "Shared")
    other = page.context.new_page()
    watched.watch(other)
    other.goto(server.url)
    expect(titles(other)).to_have_text(["Shared"])
    titles(other).click()
    expect(answers(other)).to_have_text("Hello there.")
    # Both go on with it at the same time.
    server.endless = True
    ask(page, "From the first")
    expect(answers(page).last).to_contain_text("more")
    ask(other, "From the second")
    expect(answers(other).last).to_contain_text("more")
    server.endless = False
    answered(page, 2)
    answered(other, 2)
    for tab in (page, other):
        tab.reload()
        expect(tab.locator(".mine .place")).to_have_text(re.compile("^[12]/2$"))  # the one that was written last
        other_way = "Next" if tab.locator(".mine .place").text_content() == "1/2" else "Previous"
        seen = [tab.locator(".mine > .body").last.text_content()]
        tab.click(f".mine [aria-label='{other_way} version']")
        expect(tab.locator(".mine > .body").last).not_to_have_text(seen[0] or "")
        seen.append(tab.locator(".mine > .body").last.text_content())
        assert sorted(filter(None, seen)) == ["From the first", "From the second"]
        expect(answers(tab).last).to_contain_text("Hello there. more")
    # A conversation that one tab begins is in the other's list, and one that it renames has the new name there.
    have(other, "Begun elsewhere")
    expect(titles(page)).to_have_text(["Begun elsewhere", "Shared"])
    page.locator(".conversation").nth(0).hover()
    page.click("[aria-label='Rename Begun elsewhere']")
    page.fill("dialog[open] input", "Renamed")
    page.keyboard.press("Enter")
    expect(titles(other)).to_have_text(["Renamed", "Shared"])
    # One that is deleted elsewhere is not written again.
    server.endless = True
    ask(other, "Still there?")
    expect(answers(other).last).to_contain_text("more")
    page.locator(".conversation").nth(0).hover()
    page.click("[aria-label='Delete Renamed']")
    expect(other.locator("#toast")).to_contain_text("deleted in another tab")
    server.endless = False
    expect(titles(page)).to_have_text(["Shared"])
    expect(titles(other)).to_have_text(["Shared"])


def test_an_answer_goes_on_while_another_conversation_is_shown(page: Page, server: ScriptedServer) -> None:
    have(page, "Here")
    server.endless = True
    page.click("#new-chat")
    ask(page, "There")
    expect(answers(page)).to_contain_text("more")
    titles(page).nth(1).click()
    expect(page.locator(".mine > .body")).to_have_text("Here")
    expect(page.locator("#send")).to_have_text("Send")
    expect(page.locator(".busy")).to_have_count(1)
    server.endless = False
    expect(page.locator("#toast")).to_contain_text("“There” has its answer.")
    page.click("#toast >> text=Show")
    expect(answers(page)).to_contain_text("Hello there. more")


def test_the_conversation_of_earlier_versions_is_taken_over(page: Page, server: ScriptedServer) -> None:
    turns = [{"role": "user", "content": "Old question"}, {"role": "assistant", "content": "Old answer"}]
    page.evaluate("turns => localStorage.setItem('moesaic.conversation', JSON.stringify(turns))", turns)
    page.reload()
    titles(page).click()
    expect(answers(page)).to_have_text("Old answer")
    page.reload()
    expect(titles(page)).to_have_count(1)


def test_without_storage_the_page_works_and_says_so(browser: Browser, server: ScriptedServer, watched: Watched) -> None:
    with opened(browser, "about:blank", watched) as page:
        page.add_init_script("Object.defineProperty(window, 'indexedDB', { get() { throw new Error('forbidden') } })")
        page.goto(server.url)
        expect(page.locator("#toast")).to_contain_text("keeps no data")
        talk(page, "One")
        talk(page, "Two")
        assert said(server.asked[-1]) == ["One", "Hello there.", "Two"]
        expect(titles(page)).to_have_text(["One"])


def test_with_full_storage_the_page_works_and_says_so(page: Page, server: ScriptedServer) -> None:
    have(page, "Before")
    full = "IDBObjectStore.prototype.put = () => { throw new DOMException('full', 'QuotaExceededError') }"
    page.evaluate(f"() => {{ {full} }}")
    talk(page, "After")
    expect(page.locator("#toast")).to_contain_text("could not be stored in the browser (QuotaExceededError)")
    assert said(server.asked[-1]) == ["Before", "Hello there.", "After"]


def test_settings_of_one_tab_hold_in_the_other(page: Page, server: ScriptedServer, watched: Watched) -> None:
    other = page.context.new_page()
    watched.watch(other)
    other.goto(server.url)
    other.fill("#temperature", "0.25")
    expect(page.locator("#temperature")).to_have_value("0.25")
    page.fill("#seed", "3")
    expect(other.locator("#seed")).to_have_value("3")
    talk(other, "Hi")
    assert (server.asked[0]["temperature"], server.asked[0]["seed"]) == (0.25, 3)
