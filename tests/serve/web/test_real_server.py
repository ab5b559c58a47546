"""The page with the real server and engine behind it, and a very small mixture model."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect

import moesaic
from moesaic.errors import UserError
from moesaic.serve.api.keys import Keys
from moesaic.serve.api.web_page import origins
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
    real.click("#engine > summary")
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


def test_what_is_longer_than_the_context_is_not_sent(real: Page, served: Running) -> None:
    real.fill("#prompt", "number " * 5000)
    real.press("#prompt", "Enter")
    expect(real.locator("#way-on")).to_contain_text("of 4,096 tokens")
    expect(real.locator("#prompt")).not_to_be_empty()
    assert served.engine.counts.generated_tokens == 0


def test_an_error_of_the_server_is_shown(real: Page, watched: Watched) -> None:
    real.evaluate("localStorage.setItem('moesaic.settings', JSON.stringify({ top_p: 7 }))")
    real.reload()
    real.fill("#prompt", "Hi")
    real.press("#prompt", "Enter")
    expect(real.locator(".error")).to_contain_text("top_p")
    assert all("400" in error for error in watched.errors)
    watched.errors.clear()


def test_the_policy_names_mcp_origins(directory: Path) -> None:
    engine = moesaic.Engine(moesaic.load(directory))
    with running(engine, name="talker", mcp_origins=("http://127.0.0.1:9000",)) as server, server.http() as client:
        page = client.get("/")
        assert "connect-src 'self' http://127.0.0.1:9000;" in page.headers["content-security-policy"]
        assert client.get("/page.json").json() == {"mcp_origins": ["http://127.0.0.1:9000"], "know": []}
        font = client.get("/vendor/katex/fonts/KaTeX_Main-Regular.woff2")
        assert (font.status_code, font.headers["content-type"]) == (200, "font/woff2")


@pytest.mark.parametrize("origin", ["ftp://a", "http://a/path", "http://a; script-src *", "a.org", "https://u:p@a.org"])
def test_what_is_no_origin_never_gets_into_the_policy(origin: str) -> None:
    with pytest.raises(UserError, match="--mcp"):
        origins([origin])
    assert origins(["https://a.org:8443/", "http://[::1]:9000"]) == ("https://a.org:8443", "http://[::1]:9000")


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
        page.click("#engine > summary")
        expect(page.locator("#engine-state")).to_have_text("idle")
        context.close()
