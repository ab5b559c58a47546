"""The page with the real server and engine behind it, and a very small mixture model."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect

import moesaic
from moesaic.serve.api.keys import Keys
from tests.serve.api.running import Running, running
from tests.serve.made import talking_model
from tests.serve.web.conftest import Watched, opened


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return talking_model(tmp_path_factory.mktemp("model") / "talker", context=4096)


@pytest.fixture
def served(directory: Path) -> Iterator[Running]:
    with running(moesaic.Engine(moesaic.load(directory)), name="talker") as server:
        yield server


@pytest.fixture
def real(browser: Browser, served: Running, watched: Watched) -> Iterator[Page]:
    with opened(browser, served.url, watched) as page:
        yield page


def test_talk_stop_and_try_again(real: Page, served: Running) -> None:
    expect(real.locator("#model")).to_have_text("talker")
    expect(real.locator("#experts-note")).to_have_text("3 layers of 6 experts, idle.")
    real.fill("[name=temperature]", "0")
    real.fill("#prompt", "The number 3")
    served.hold.until(40)
    real.press("#prompt", "Enter")
    body = real.locator(".theirs > .body")
    real.wait_for_function("() => document.querySelectorAll('.theirs .token').length > 20")
    expect(real.locator("#engine-state")).to_have_text("working")
    expect(real.locator("#experts-note")).to_contain_text(re.compile(r"[\d,]+ tokens routed"))
    expect(real.locator(".gauge dd").nth(2)).to_have_text("1")
    real.keyboard.press("Escape")
    expect(real.locator(".facts")).to_contain_text("stopped")
    served.until(lambda: served.service.loop.open == 0)
    served.hold.release()
    served.until(lambda: served.idle)  # the engine has dropped it too
    expect(real.locator("#engine-state")).to_have_text("idle")
    first = body.text_content()
    real.fill("[name=max_tokens]", "12")
    real.click("[aria-label=Regenerate]")
    expect(real.locator(".facts")).to_contain_text("12 tokens")
    answer = body.text_content() or ""
    assert answer and (first or "").startswith(answer[:5])  # the likeliest tokens, both times
    real.locator(".theirs .token").first.hover()
    expect(real.locator("#card li")).to_have_count(5)
    expect(real.locator("#card li").first).to_have_class("chosen")


def test_the_words_are_the_engine_s(real: Page, served: Running) -> None:
    real.fill("[name=temperature]", "0")
    real.fill("[name=max_tokens]", "30")
    real.fill("#prompt", "The number 5")
    real.press("#prompt", "Enter")
    expect(real.locator(".facts")).to_contain_text("30 tokens")
    content = real.evaluate("document.querySelector('.theirs').view.message.content")
    asked = [{"role": "user", "content": "The number 5"}]
    said = served.client().chat.completions.create(model="talker", messages=asked, temperature=0, max_tokens=30)  # type: ignore[arg-type]
    assert content == said.choices[0].message.content


def test_an_error_of_the_server_is_shown(real: Page, watched: Watched) -> None:
    real.fill("[name=max_tokens]", "12")
    real.fill("#prompt", "number " * 5000)
    real.press("#prompt", "Enter")
    expect(real.locator(".error")).to_contain_text("4096")
    assert all("400" in error for error in watched.errors)
    watched.errors.clear()


def test_the_server_s_key(browser: Browser, directory: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PAGE_TEST_KEY", "sesame")
        keys = Keys.read(None, "PAGE_TEST_KEY")
    with running(moesaic.Engine(moesaic.load(directory)), name="talker", keys=keys) as server:
        context = browser.new_context()
        page = context.new_page()
        page.goto(server.url)
        page.fill("#key", "sesame")
        page.keyboard.press("Enter")
        expect(page.locator("#model")).to_have_text("talker")
        expect(page.locator("#engine-state")).to_have_text("idle")
        context.close()
