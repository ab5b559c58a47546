"""What a pattern finds in what is shown; what is not there is a failed test."""

from __future__ import annotations

import re


def matched(pattern: str, text: str) -> tuple[str, ...]:
    found = re.search(pattern, text)
    assert found is not None, (pattern, text)
    return found.groups()
