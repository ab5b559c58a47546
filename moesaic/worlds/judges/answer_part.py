"""Where in what a model said its answer stands: behind its thoughts, in a tag, in a box, or in the last line."""

from __future__ import annotations

import re
from typing import Literal

from moesaic.worlds.judges import Answer

Part = Literal["all", "after_thought", "tag", "boxed", "last_line"]


def part_of(text: str, part: Part, tag: str = "answer") -> str:
    """Empty where the part is missing. All but "all" look only behind the thoughts."""
    if part == "all":
        return text.strip()
    text = after_thought(text)
    if part == "tag":
        found = re.findall(rf"<{re.escape(tag)}>(.*?)</{re.escape(tag)}>", text, re.DOTALL)
        return found[-1].strip() if found else ""
    if part == "boxed":
        return last_box(text) or ""
    if part == "last_line":
        return text.splitlines()[-1].strip() if text else ""
    return text


def after_thought(text: str) -> str:
    """What follows the last closed thought; nothing if a thought was never closed."""
    said = text.rpartition("</think>")[2]
    return "" if "<think>" in said else said.strip()


def truths(answer: Answer) -> list[str]:
    """Every form in which the answer is right."""
    known = [answer.truth] if answer.truth is not None else []
    known += [str(other) for other in answer.facts.get("answers", ())]
    if not known:
        raise ValueError("the right answer is not known")
    return known


def last_box(text: str) -> str | None:
    """What stands in the last \\boxed{...}, braces inside it included; None without one."""
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    start += len("\\boxed{")
    depth = 1
    for place in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[place], 0)
        if depth == 0:
            return text[start:place].strip()
    return None
