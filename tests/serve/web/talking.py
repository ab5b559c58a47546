"""What most tests of the page do: ask, wait for the answer, look at it."""

from __future__ import annotations

import re
from typing import Any

from playwright.sync_api import Locator, Page, expect


def ask(page: Page, text: str) -> None:
    page.fill("#prompt", text)
    page.press("#prompt", "Enter")


def answered(page: Page, count: int | None = None) -> None:
    """No response is being written, and if told so, there are so many."""
    if count is not None:
        expect(page.locator(".theirs")).to_have_count(count)
    expect(page.locator(".theirs .facts").last).not_to_be_empty()
    expect(page.locator("body")).not_to_have_class(re.compile("answering"))


def talk(page: Page, text: str) -> None:
    """Ask, and wait for the answer."""
    before = page.locator(".theirs").count()
    ask(page, text)
    answered(page, before + 1)


def answers(page: Page) -> Locator:
    return page.locator(".theirs > .body")


def said(request: dict[str, Any]) -> list[str]:
    return [turn["content"] for turn in request["messages"]]
