"""Model and adapter, sampling settings, saved system prompts, and the keys of the page."""

from __future__ import annotations

import re

from playwright.sync_api import Page, expect

from tests.serve.web.scripted_server import NAME, ScriptedServer
from tests.serve.web.talking import said, talk


def test_adapters_are_chosen_and_remembered(page: Page, server: ScriptedServer) -> None:
    expect(page.locator("#model")).to_have_text(NAME)
    expect(page.locator("#models")).to_be_hidden()
    server.adapters = ["legal", "medical"]
    page.reload()
    expect(page.locator("#models optgroup option")).to_have_text(["legal", "medical"])
    expect(page.locator("#models optgroup")).to_have_attribute("label", f"Adapters of {NAME}")
    page.select_option("#models", "legal")
    talk(page, "Hi")
    assert server.asked[0]["model"] == "legal"
    page.click("#new-chat")
    page.select_option("#models", "medical")
    talk(page, "Ho")
    assert server.asked[1]["model"] == "medical"
    page.locator(".conversation .open").nth(1).click()  # a conversation remembers its own
    expect(page.locator("#models")).to_have_value("legal")
    page.reload()
    expect(page.locator("#models")).to_have_value("legal")


def test_all_sampling_settings_have_an_explanation_and_reach_the_server(page: Page, server: ScriptedServer) -> None:
    expect(page.locator("#top_k")).to_be_hidden()
    page.click("text=More sampling settings")
    wanted = {"min_p": 0.05, "top_k": 40, "repetition_penalty": 1.1, "presence_penalty": -0.5, "min_tokens": 2}
    for name, value in wanted.items():
        page.fill(f"#{name}", str(value))
    page.fill("#stop", "END\nSTOP")
    expect(page.locator(".more-count")).to_have_text("6 set")
    unexplained = """[...document.querySelectorAll('.fields :is(input, textarea)')].filter(
        (one) => !document.getElementById(one.getAttribute('aria-describedby'))?.textContent).length"""
    assert page.evaluate(unexplained) == 0
    page.reload()
    talk(page, "Hi")
    asked = server.asked[0]
    assert {name: asked[name] for name in wanted} == wanted and asked["stop"] == ["END", "STOP"]
    assert "frequency_penalty" not in asked  # what is not set is left to the server
    page.fill("#top_k", "")
    page.fill("#min_p", "7")  # not a probability: the last that was one holds
    talk(page, "Hi")
    assert "top_k" not in server.asked[1] and server.asked[1]["min_p"] == 0.05
    page.click("text=Reset to defaults")
    talk(page, "Hi")
    assert not set(wanted) & set(server.asked[2])


def test_settings_this_server_does_not_take_are_not_shown(page: Page, server: ScriptedServer) -> None:
    page.click("text=More sampling settings")
    expect(page.locator("#top_k")).to_be_visible()
    schema = "fetch('/openapi.json').then((answer) => answer.json())"
    known = page.evaluate(
        f"{schema}.then((all) => Object.keys(all.components.schemas.ChatCompletionRequest.properties))"
    )
    for name in ("dry_multiplier", "xtc_probability", "mirostat", "typical_p", "top_n_sigma"):
        expect(page.locator(f"#{name}")).to_be_visible(visible=name in known)


def test_fields_the_server_did_not_use_are_named(page: Page, server: ScriptedServer) -> None:
    server.ignored = "top_k"
    talk(page, "Hi")
    expect(page.locator(".theirs .extras")).to_have_text("The server did not use: top_k")


def test_system_prompts_are_saved_and_belong_to_a_conversation(page: Page, server: ScriptedServer) -> None:
    expect(page.locator("#prompts")).to_be_disabled()
    page.fill("#system", "Answer like a pirate.")
    page.click(".save-prompt")
    page.fill("dialog[open] input", "Pirate")
    page.keyboard.press("Enter")
    expect(page.locator("#prompts")).to_have_value("Pirate")
    talk(page, "Hi")
    assert said(server.asked[0])[0] == "Answer like a pirate."
    page.click("#new-chat")
    page.fill("#system", "Be brief.")
    expect(page.locator("#prompts")).to_have_value("")
    talk(page, "Hi")
    assert said(server.asked[1])[0] == "Be brief."
    page.locator(".conversation .open").nth(1).click()
    expect(page.locator("#system")).to_have_value("Answer like a pirate.")
    page.click("#new-chat")
    page.reload()
    page.select_option("#prompts", "Pirate")
    expect(page.locator("#system")).to_have_value("Answer like a pirate.")
    page.click(".delete-prompt")
    expect(page.locator("#prompts")).to_be_disabled()
    page.click("#toast >> text=Undo")
    expect(page.locator("#prompts option")).to_have_text(["Saved prompts", "Pirate"])


def test_shortcuts(page: Page, server: ScriptedServer) -> None:
    page.keyboard.press("?")
    dialog = page.locator("#keys-dialog")
    expect(dialog).to_be_visible()
    expect(dialog).to_contain_text("search conversations")
    page.keyboard.press("Escape")
    expect(dialog).to_be_hidden()
    page.fill("#prompt", "Why")
    page.press("#prompt", "?")
    expect(page.locator("#prompt")).to_have_value("Why?")  # while writing it is a letter
    expect(dialog).to_be_hidden()
    talk(page, "Why?")
    page.keyboard.press("Alt+ArrowUp")
    expect(page.locator(".theirs")).to_be_focused()
    page.keyboard.press("Alt+ArrowUp")
    expect(page.locator(".mine")).to_be_focused()
    page.keyboard.press("Alt+ArrowDown")
    page.keyboard.press("Alt+ArrowDown")
    expect(page.locator("#prompt")).to_be_focused()
    page.keyboard.press("Control+Shift+E")
    expect(page.locator("#side")).to_be_hidden()
    page.keyboard.press("Control+Shift+L")
    expect(page.locator("#library")).to_be_hidden()
    page.keyboard.press("Control+K")
    expect(page.locator("#search")).to_be_focused()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Control+Shift+O")
    expect(page.locator("#welcome")).to_be_visible()
    page.keyboard.press("Control+K")
    page.keyboard.press("Tab")
    expect(page.locator(".conversation .open")).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.locator(".mine > .body")).to_have_text("Why?")


def test_everything_is_reachable_by_tab(page: Page, server: ScriptedServer) -> None:
    talk(page, "Hi")
    page.evaluate("document.activeElement.blur()")
    seen: set[str] = set()
    for _ in range(60):
        page.keyboard.press("Tab")
        now = page.evaluate(
            "(one => one.id || one.getAttribute('aria-label') || one.className)(document.activeElement)"
        )
        seen.add(now)
        if (
            "side-toggle" in seen
            and "seed" in seen
            and re.search("engine", page.evaluate("document.activeElement.parentElement.id"))
        ):
            break
    assert {
        "library-toggle",
        "new-chat",
        "search",
        "import",
        "scroll",
        "Edit",
        "Copy",
        "Regenerate",
        "Continue",
    } <= seen
    assert {"Regenerate side by side", "Delete", "attach", "prompt", "send", "system", "temperature", "seed"} <= seen
