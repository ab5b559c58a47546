"""Versions of a conversation: edit, regenerate, side by side, continue, delete a message."""

from __future__ import annotations

from playwright.sync_api import Page, expect

from tests.serve.web.scripted_server import ScriptedServer
from tests.serve.web.talking import answered, answers, said, talk


def edit(page: Page, place: int, text: str) -> None:
    page.locator(".mine").nth(place).hover()
    page.locator(".mine").nth(place).locator("[aria-label=Edit]").click()
    page.locator(".edit textarea").fill(text)
    page.keyboard.press("Enter")


def test_an_edited_message_is_a_branch_beside_the_old_one(page: Page, server: ScriptedServer) -> None:
    server.answers = ["One.", "Two.", "Three."]
    talk(page, "First")
    talk(page, "Second")
    edit(page, 0, "Changed")
    expect(answers(page)).to_have_text(["Three."])
    answered(page)
    assert said(server.asked[-1]) == ["Changed"]
    expect(page.locator(".mine .place")).to_have_text("2/2")
    page.click("[aria-label='Previous version']")
    expect(page.locator(".mine > .body")).to_have_text(["First", "Second"])
    expect(answers(page)).to_have_text(["One.", "Two."])
    page.reload()
    expect(answers(page)).to_have_text(["One.", "Two."])
    talk(page, "Third")
    assert said(server.asked[-1])[::2] == ["First", "Second", "Third"]
    page.click("[aria-label='Next version']")
    expect(answers(page)).to_have_text(["Three."])


def test_regenerate_asks_again_without_the_old_answer(page: Page, server: ScriptedServer) -> None:
    talk(page, "One")
    server.answer = "Another answer."
    page.click("[aria-label=Regenerate]")
    expect(answers(page)).to_have_text("Another answer.")
    answered(page)
    assert server.asked[1]["messages"] == server.asked[0]["messages"] == [{"role": "user", "content": "One"}]
    expect(page.locator(".theirs .place")).to_have_text("2/2")
    page.locator(".theirs").focus()
    page.keyboard.press("Alt+ArrowLeft")
    expect(answers(page)).to_have_text("Hello there.")
    page.keyboard.press("Alt+ArrowRight")
    expect(answers(page)).to_have_text("Another answer.")


def test_answers_side_by_side(page: Page, server: ScriptedServer) -> None:
    server.answers = ["The first.", "The second.", "The third."]
    talk(page, "One")
    page.click("[aria-label='Regenerate side by side']")
    expect(page.locator(".compare .column")).to_have_count(2)
    expect(answers(page)).to_have_text(["The first.", "The second."])
    answered(page)
    left, right = (page.locator(".column").nth(place).bounding_box() for place in (0, 1))
    assert left and right and left["y"] == right["y"] and left["x"] + left["width"] <= right["x"]
    page.locator(".column").nth(1).locator("[aria-label='Regenerate side by side']").click()
    expect(answers(page)).to_have_text(["The first.", "The second.", "The third."])
    answered(page)
    page.locator(".column").nth(0).locator("text=Use this answer").click()
    expect(page.locator(".compare")).to_have_count(0)
    expect(answers(page)).to_have_text(["The first."])
    talk(page, "Two")
    assert said(server.asked[-1]) == ["One", "The first.", "Two"]


def test_an_answer_can_be_continued(page: Page, server: ScriptedServer) -> None:
    server.answer = "It begins"
    talk(page, "Go")
    server.answer = " and goes on."
    page.click("[aria-label=Continue]")
    expect(answers(page)).to_have_text("It begins and goes on.")
    answered(page)
    asked = server.asked[-1]
    assert asked["messages"][-1] == {"role": "assistant", "content": "It begins"}
    assert asked["continue_final_message"] is True and asked["add_generation_prompt"] is False
    assert "".join(page.locator(".theirs .token").all_text_contents()) == "It begins and goes on."
    page.reload()
    expect(answers(page)).to_have_text("It begins and goes on.")


def test_an_edited_answer_is_kept_and_continued(page: Page, server: ScriptedServer) -> None:
    talk(page, "Go")
    page.click(".theirs [aria-label=Edit]")
    page.locator(".edit textarea").fill("My own words")
    page.keyboard.press("Enter")
    expect(answers(page)).to_have_text("My own words")
    assert len(server.asked) == 1
    server.answer = ", and the model's."
    page.click("[aria-label=Continue]")
    expect(answers(page)).to_have_text("My own words, and the model's.")
    answered(page)
    assert server.asked[-1]["messages"][-1]["content"] == "My own words"
    expect(page.locator(".theirs .token").first).to_have_text(",")  # only the model's have probabilities
    page.click("[aria-label='Previous version']")
    expect(answers(page)).to_have_text("Hello there.")


def test_a_deleted_message_is_gone_and_the_rest_stays(page: Page, server: ScriptedServer) -> None:
    server.answers = ["One.", "Two."]
    talk(page, "First")
    talk(page, "Second")
    page.locator(".theirs").first.locator("[aria-label=Delete]").click()
    expect(answers(page)).to_have_text(["Two."])
    expect(page.locator(".mine > .body")).to_have_text(["First", "Second"])
    page.click("#toast >> text=Undo")
    expect(answers(page)).to_have_text(["One.", "Two."])
    page.locator(".mine").first.hover()
    page.locator(".mine").first.locator("[aria-label=Delete]").click()
    expect(page.locator(".mine > .body")).to_have_text(["Second"])
    page.reload()
    expect(page.locator(".mine > .body")).to_have_text(["Second"])
    expect(answers(page)).to_have_text(["One.", "Two."])
    stored = """async () => {
        const { openDatabase } = await import('/store/database.js');
        return (await (await openDatabase()).all('messages')).map((one) => one.content);
    }"""
    assert "First" not in page.evaluate(stored)
    talk(page, "Third")
    assert said(server.asked[-1]) == ["One.", "Second", "Two.", "Third"]


def test_where_a_version_is_deleted_the_other_is_shown(page: Page, server: ScriptedServer) -> None:
    server.answers = ["One.", "Two."]
    talk(page, "First")
    page.click("[aria-label=Regenerate]")
    expect(answers(page)).to_have_text(["Two."])
    answered(page)
    page.click(".theirs [aria-label=Delete]")
    expect(answers(page)).to_have_text(["One."])
    expect(page.locator(".theirs .versions")).to_be_hidden()
    page.click("#toast >> text=Undo")
    expect(answers(page)).to_have_text(["Two."])


def test_arrow_up_edits_the_last_message(page: Page, server: ScriptedServer) -> None:
    talk(page, "Tpyo")
    page.focus("#prompt")
    page.keyboard.press("ArrowUp")
    expect(page.locator(".edit textarea")).to_be_focused()
    page.keyboard.press("Escape")
    expect(page.locator(".edit")).to_have_count(0)
    expect(page.locator(".mine > .body")).to_have_text("Tpyo")
