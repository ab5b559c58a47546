"""The page in a real browser: talking, stopping, trying again, probabilities, the engine's view, keys, themes."""

from __future__ import annotations

import re

import pytest
from playwright.sync_api import Browser, Page, expect

from tests.serve.web.conftest import Watched
from tests.serve.web.scripted_server import SAMPLE, ScriptedServer
from tests.serve.web.talking import answered, answers, ask, talk
from tests.waiting import PATIENCE


def test_an_answer_streams_into_the_page(page: Page, server: ScriptedServer) -> None:
    server.endless, server.answer = True, "It begins"
    ask(page, "Hi")
    expect(answers(page)).to_contain_text("It begins more more")  # long before it is over
    expect(page.locator(".mine > .body")).to_have_text("Hi")
    expect(page.locator("#send")).to_have_text("Stop")
    server.endless = False
    answered(page, 1)
    expect(page.locator(".facts")).to_contain_text(re.compile(r"\d+ tokens · [\d.]+ tokens/s · first token after"))
    asked = server.asked[0]
    assert asked["messages"] == [{"role": "user", "content": "Hi"}]
    assert asked["stream"] is True
    assert (asked["model"], asked["logprobs"], asked["top_logprobs"]) == ("scripted-moe-7b", True, 5)


@pytest.mark.parametrize("how", ["button", "Escape"])
def test_stopping_keeps_what_was_said_and_hangs_up(page: Page, server: ScriptedServer, how: str) -> None:
    server.endless = True
    ask(page, "Go on")
    expect(answers(page)).to_contain_text("more more")
    page.click("#send") if how == "button" else page.keyboard.press("Escape")
    answered(page)
    assert server.abandoned.wait(PATIENCE), "the server was not told"
    expect(page.locator(".facts")).to_contain_text("stopped")
    expect(page.locator(".error")).to_have_count(0)
    expect(answers(page)).to_contain_text("Hello there. more")


def test_enter_sends_and_shift_enter_begins_a_line(page: Page, server: ScriptedServer) -> None:
    page.focus("#prompt")
    page.keyboard.type("one")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("two")
    assert not server.asked
    page.keyboard.press("Enter")
    answered(page, 1)
    assert server.asked[0]["messages"][0]["content"] == "one\ntwo"


def test_typing_anywhere_writes_a_message(page: Page) -> None:
    page.keyboard.type("hello")
    expect(page.locator("#prompt")).to_have_value("hello")
    page.focus("#seed")
    page.keyboard.type("4")
    expect(page.locator("#prompt")).to_have_value("hello")


def test_settings_reach_the_server_and_are_remembered(page: Page, server: ScriptedServer) -> None:
    page.fill("[name=temperature]", "0.2")
    page.fill("[name=top_p]", "0.5")
    page.fill("[name=max_tokens]", "77")
    page.fill("[name=seed]", "5")
    page.fill("[name=system]", "Be brief.")
    page.uncheck("[name=logprobs]")
    page.reload()
    talk(page, "Hi")
    asked = server.asked[0]
    assert {name: asked[name] for name in ("temperature", "top_p", "max_tokens", "seed")} == {
        "temperature": 0.2,
        "top_p": 0.5,
        "max_tokens": 77,
        "seed": 5,
    }
    assert asked["messages"][0] == {"role": "system", "content": "Be brief."}
    assert "logprobs" not in asked
    page.click("text=Reset to defaults")
    talk(page, "Hi")
    assert "seed" not in server.asked[1] and server.asked[1]["temperature"] == 0.7


def test_the_model_recommends_and_the_person_decides(page: Page, server: ScriptedServer) -> None:
    server.sampling = {"temperature": 0.0, "top_k": 20}
    page.reload()
    expect(page.locator("[name=temperature]")).to_have_value("0")
    expect(page.locator("[name=top_p]")).to_have_value("0.95")
    talk(page, "Hi")
    assert server.asked[0]["temperature"] == 0 and server.asked[0]["top_p"] == 0.95
    page.fill("[name=temperature]", "0.4")
    page.reload()
    expect(page.locator("[name=temperature]")).to_have_value("0.4")
    page.click("text=Reset to defaults")
    expect(page.locator("[name=temperature]")).to_have_value("0")


def test_probabilities_show_on_hover_and_by_keyboard(page: Page, server: ScriptedServer) -> None:
    server.answer = "Paris **is** the capital."
    talk(page, "What is it?")
    expect(page.locator(".theirs .token")).to_have_text(["Paris", " ", "is", " the", " capital", "."])
    page.locator(".theirs .token", has_text="capital").hover()
    card = page.locator("#card")
    expect(card).to_be_visible()
    expect(card.locator("p code")).to_have_text("␣capital")
    expect(card.locator("p strong")).to_contain_text("%")
    expect(card.locator("li")).to_have_count(5)
    expect(card.locator("li.chosen")).to_contain_text("capital")
    page.mouse.move(5, 5)
    expect(card).to_be_hidden()
    answers(page).focus()
    for _ in range(3):
        page.keyboard.press("ArrowRight")
    expect(card.locator("p code")).to_have_text("is")
    expect(page.locator(".token:focus")).to_have_attribute("aria-describedby", "card")
    page.keyboard.press("Escape")
    expect(card).to_be_hidden()


def test_colour_by_probability_is_an_option(page: Page, server: ScriptedServer) -> None:
    server.answer = " ".join(["word"] * 30)
    talk(page, "Hi")
    colours = "[...new Set([...document.querySelectorAll('.token')].map(one => getComputedStyle(one).backgroundColor))]"
    assert page.evaluate(colours) == ["rgba(0, 0, 0, 0)"]
    page.check("[name=colour]")
    assert len(page.evaluate(colours)) >= 4


def test_tokens_with_half_characters_are_found_again(page: Page, server: ScriptedServer) -> None:
    server.answer = "naïve 世界 🙂 end"
    talk(page, "Hi")
    assert "".join(page.locator(".theirs .token").all_text_contents()) == server.answer


def test_reasoning_is_folded_away_from_the_answer(page: Page, server: ScriptedServer) -> None:
    server.reasoning = "Let me think."
    talk(page, "Hi")
    expect(answers(page)).to_have_text("Hello there.")
    expect(page.locator(".reasoning-text")).to_be_hidden()
    page.click(".reasoning summary")
    expect(page.locator(".reasoning-text")).to_have_text("Let me think.")
    talk(page, "Again")
    assert server.asked[-1]["messages"][1] == {"role": "assistant", "content": "Hello there."}


def test_the_live_view_moves(page: Page, server: ScriptedServer) -> None:
    expect(page.locator("#gauges")).to_be_hidden()  # folded, and nothing is asked
    page.click("#engine > summary")
    expect(page.locator("#engine-state")).to_have_text("idle")
    expect(page.locator("#experts-note")).to_have_text("6 layers of 32 experts, idle.")
    page.locator("#experts").scroll_into_view_if_needed()
    shades = "document.getElementById('experts').toDataURL()"
    at_rest = page.evaluate(shades)
    line = page.locator(".gauge .line").first
    before = line.get_attribute("d") or ""
    server.endless = True
    ask(page, "Work")
    expect(page.locator("#engine-state")).to_have_text("working")
    gauges = page.locator(".gauge dd")
    expect(gauges).to_have_text(["41.5", "120 ms", "1", "0", re.compile(r"^[1-9]\d* %$")])
    expect(page.locator("#experts-note")).to_contain_text(re.compile(r"[\d,]+ tokens routed .* × the mean"))
    assert page.evaluate(shades) != at_rest
    expect(line).not_to_have_attribute("d", before)
    page.hover("#experts", position={"x": 2, "y": 2})
    expect(page.locator("#experts-note")).to_contain_text(re.compile(r"^Layer 0, expert 0: [\d.]+ %"))
    page.keyboard.press("Escape")
    answered(page)
    expect(page.locator("#engine-state")).to_have_text("idle")
    page.mouse.move(5, 5)
    expect(page.locator("#experts-note")).to_contain_text("idle")  # once the last seconds are past


def test_a_dense_model_has_no_expert_panel(page: Page, server: ScriptedServer) -> None:
    server.counts = []
    page.click("#engine > summary")
    expect(page.locator("#engine-state")).to_have_text("idle")
    expect(page.locator("#experts-panel")).to_be_hidden()
    page.reload()
    expect(page.locator("#engine-state")).to_have_text("idle")  # it opens as it was left


def test_a_server_with_a_key_is_asked_once(browser: Browser, server: ScriptedServer, watched: Watched) -> None:
    server.key = "sesame"
    context = browser.new_context()
    page = context.new_page()
    watched.watch(page)
    page.goto(server.url)
    expect(page.locator("#key-dialog")).to_be_visible()
    page.fill("#key", "wrong")
    page.keyboard.press("Enter")
    expect(page.locator("#key-note")).to_contain_text("not accepted")
    page.fill("#key", "sesame")
    page.click("text=Continue")
    expect(page.locator("#key-dialog")).to_be_hidden()
    expect(page.locator("#model")).to_have_text("scripted-moe-7b")
    ask(page, "Open")
    expect(answers(page)).to_have_text("Hello there.")
    assert "sesame" not in page.evaluate("JSON.stringify(localStorage)")
    context.close()
    assert all("401" in error for error in watched.errors)


def test_errors_are_shown_in_words(page: Page, server: ScriptedServer, watched: Watched) -> None:
    server.error = (400, "max_tokens: must be at least 1")
    ask(page, "Hi")
    expect(page.locator(".error")).to_have_text("max_tokens: must be at least 1")
    server.error = None
    page.click("[aria-label=Regenerate]")
    expect(answers(page)).to_have_text("Hello there.")
    expect(page.locator(".error")).to_have_count(0)
    assert [error for error in watched.errors if "400" not in error] == []
    watched.errors.clear()


def test_copying_gives_the_source(page: Page, server: ScriptedServer) -> None:
    server.answer = "Use **this**:\n\n```python\nx = 1\n\ty = 2\n```\n"
    talk(page, "Hi")
    page.click(".theirs [aria-label=Copy]")
    expect(page.locator(".theirs [aria-label=Copied]")).to_be_visible()
    assert page.evaluate("navigator.clipboard.readText()") == server.answer
    page.click(".copy-code")
    expect(page.locator(".copy-code")).to_have_text("Copied")
    assert page.evaluate("navigator.clipboard.readText()") == "x = 1\n\ty = 2"


def test_light_and_dark(browser: Browser, server: ScriptedServer) -> None:
    background = "getComputedStyle(document.body).backgroundColor"
    seen = {}
    for scheme in ("light", "dark"):
        context = browser.new_context(color_scheme=scheme)
        page = context.new_page()
        page.goto(server.url)
        seen[scheme] = page.evaluate(background)
        page.click("#theme")
        seen[f"{scheme} switched"] = page.evaluate(background)
        page.reload()
        assert page.evaluate(background) == seen[f"{scheme} switched"]
        context.close()
    assert seen["light"] == seen["dark switched"] != seen["dark"] == seen["light switched"]


@pytest.mark.parametrize("width", [360, 820])
def test_narrow_screens(browser: Browser, server: ScriptedServer, width: int) -> None:
    server.answer = SAMPLE + "\n" + "averylongword" * 40
    context = browser.new_context(viewport={"width": width, "height": 740})
    page = context.new_page()
    page.goto(server.url)
    talk(page, "Hi " + "x" * 200)
    assert page.evaluate("document.documentElement.scrollWidth") == width
    assert page.evaluate(
        "document.getElementById('scroll').scrollWidth <= document.getElementById('scroll').clientWidth"
    )
    for panel, toggle, inside in (
        ("#side", "#side-toggle", "#temperature"),
        ("#library", "#library-toggle", "#search"),
    ):
        expect(page.locator(panel)).not_to_be_in_viewport()
        page.click(toggle)
        expect(page.locator(inside)).to_be_in_viewport()
        assert page.evaluate("document.documentElement.scrollWidth") == width
        page.locator(inside).press("Escape")
        expect(page.locator(panel)).not_to_be_in_viewport()
        expect(page.locator(toggle)).to_be_focused()
    context.close()


def test_keyboard_and_screen_reader(page: Page, server: ScriptedServer) -> None:
    page.keyboard.press("Tab")
    expect(page.locator(".skip")).to_be_focused()
    expect(page.locator(".skip")).to_be_in_viewport()
    page.keyboard.press("Enter")
    expect(page.locator("#prompt")).to_be_focused()
    server.answer = "One sentence. Another one! And the rest"
    page.keyboard.type("Hi")
    page.keyboard.press("Enter")
    answered(page, 1)
    said = page.locator("#announcer p").all_text_contents()
    assert " ".join(said) == server.answer
    assert all(re.search(r"[.!?]$", line) for line in said[:-1])
    named = "one.getAttribute('aria-label') || one.getAttribute('aria-labelledby') || one.labels?.length"
    every = "[...document.querySelectorAll('button, input, select, textarea, meter, [role=img]')]"
    nameless = f"{every}.filter(one => !({named} || one.textContent.trim())).map(one => one.outerHTML)"
    assert page.evaluate(nameless) == []
    page.focus("#new-chat")
    page.keyboard.press("Tab")
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"


def test_a_reader_who_scrolls_up_stays_there(page: Page, server: ScriptedServer) -> None:
    server.answer = "\n\n".join(f"Line {number}." for number in range(60))
    talk(page, "Hi")
    expect(page.locator("text=Line 59.").first).to_be_in_viewport()
    server.endless = True
    ask(page, "More")
    expect(answers(page).last).to_contain_text("Line 59. more")
    page.locator("#scroll").hover()
    page.mouse.wheel(0, -2000)
    expect(page.locator("#latest")).to_be_visible()
    where = page.evaluate("document.getElementById('scroll').scrollTop")
    written = server.written
    page.wait_for_function(
        "count => document.querySelectorAll('.theirs:last-child .token').length > count", arg=written
    )
    assert page.evaluate("document.getElementById('scroll').scrollTop") == where
    page.click("#latest")
    expect(page.locator("#latest")).to_be_hidden()
    page.keyboard.press("Escape")
    answered(page)


def test_nothing_but_the_server_is_asked(page: Page, server: ScriptedServer, watched: Watched) -> None:
    server.answer = SAMPLE + "\n![a picture](https://example.org/a.png) <img src='https://example.org/b.png'>"
    talk(page, "Hi")
    expect(page.locator(".theirs a[href='https://example.org/a.png']")).to_have_text("Picture: a picture")
    assert watched.hosts == {"127.0.0.1"}
    paths = {request.url.removeprefix(server.url).split("?")[0] for request in watched.requests}
    assert {"/", "/main.js", "/v1/models", "/tokenize", "/v1/chat/completions"} <= paths
    assert "/live/stream" not in paths  # folded away
