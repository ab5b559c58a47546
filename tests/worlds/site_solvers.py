"""Visitors of sites that do what they are asked, by the names of what they see on a page."""

from __future__ import annotations

import re
from collections.abc import Generator

from tests.worlds.matching import matched

Moves = Generator[str, str, str]


def numbered(kind: str, label: str, seen: str) -> int:
    return int(matched(rf"\[(\d+)\] {kind}:? {re.escape(label)}(?:$|\n|:)", seen)[0])


def click(kind: str, label: str, seen: str) -> Moves:
    return (yield f"click {numbered(kind, label, seen)}")


def shop(opening: str) -> Generator[str, str, None]:
    kind, first, second, colour, size, limit = matched(
        r"buy a ([\w ]+) that is ([\w-]+) and ([\w-]+), in colour (\w+) and size ([\w ]+), for at most ([\d.]+)\.",
        opening,
    )
    seen = opening[opening.index("Page:") :]
    yield f"type {numbered('textbox', 'Search', seen)} {kind} {first} {second}"
    seen = yield from click("button", "Search", seen)
    tried: set[str] = set()
    while True:
        offers = re.findall(r"\[(\d+)\] link: (.+)\n([\d.]+)(?=\n|$)", seen)
        offer = next(
            (
                o
                for o in offers
                if o[1].endswith(kind) and float(o[2]) <= float(limit) and f"{o[1]} {o[2]}" not in tried
            ),
            None,
        )
        if offer is None:
            seen = yield from click("link", "Next page", seen)
            continue
        tried.add(f"{offer[1]} {offer[2]}")
        item = yield f"click {offer[0]}"
        features = yield from click("link", "Features", item)
        good = {first, second} <= set(features.splitlines())
        item = yield "back"
        colours, sizes = matched(r"choice colour: \w+ \(of ([^)]*)\)\n\[\d+\] choice size: [\w ]+ \(of ([^)]*)\)", item)
        if good and colour in colours.split(", ") and size in sizes.split(", "):
            yield f"choose {numbered('choice', 'colour', item)} {colour}"
            seen = yield f"choose {numbered('choice', 'size', item)} {size}"
            yield from click("button", "Buy now", seen)
        seen = yield "back"


def browse(opening: str) -> Generator[str, str, None]:
    task = matched(r"Your task: (.+)", opening)[0]
    seen = opening[opening.index("Page:") :]
    if task.startswith("book"):
        yield from _book(task, seen)
    elif task.startswith("reserve"):
        yield from _reserve(task, seen)
    elif task.startswith("in the account"):
        yield from _settings(task, seen)
    else:
        yield from _lookup(task, seen)


def _book(task: str, seen: str) -> Moves:
    start, end, day, which, name, seat, bicycle = matched(
        r"from (\w+) to (\w+) on (\w+) that ([\w ]+), for ([\w ]+), seat: (\w+), (with\w*) a bicycle", task
    )
    seen = yield from click("link", "Trains", seen)
    for label, value in (("From", start), ("To", end), ("Day", day)):
        seen = yield f"choose {numbered('choice', label, seen)} {value}"
    seen = yield from click("button", "Find trains", seen)
    rows = re.findall(r"leaves ([\d:]+), arrives ([\d:]+), (\d) changes, ([\d.]+)\n\[(\d+)\] link: Select", seen)
    if "without changes" in which:
        rows = [row for row in rows if row[2] == "0"]

    def arrival(row: tuple[str, ...]) -> int:
        leaves, arrives = (int(time[:2]) * 60 + int(time[3:]) for time in row[:2])
        return arrives + (1440 if arrives < leaves else 0)

    best = min(rows, key=arrival if "first" in which else lambda row: float(row[3]))
    seen = yield f"click {best[4]}"
    yield f"type {numbered('textbox', 'Name', seen)} {name}"
    seen = yield f"choose {numbered('choice', 'Seat', seen)} {seat}"
    if bicycle == "with":
        seen = yield f"click {numbered('checkbox', 'Bicycle', seen)}"
    yield from click("button", "Book", seen)
    return (yield "finish")


def _reserve(task: str, seen: str) -> Moves:
    subject, branch, card = matched(r"on (\w+) that is available at (\w+), there, with card number (\d+)", task)
    seen = yield from click("link", "Library", seen)
    listed = yield from click("link", subject, seen)
    years: dict[int, tuple[bool, str]] = {}
    for second in (False, True):
        if second and "link: More" not in listed:
            break
        if second:
            listed = yield from click("link", "More", listed)
        for number, title in re.findall(r"\[(\d+)\] link: (.+\d)", listed):
            book = yield f"click {number}"
            if branch in matched(r"Available at: (.*)", book)[0]:
                years[int(matched(r"Published in (\d+)", book)[0])] = (second, title)
            yield "back"
    second, title = years[min(years)]
    if "link: More" not in listed and not second:
        listed = yield "back"
    book = yield from click("link", title, listed)
    yield f"choose {numbered('choice', 'Branch', book)} {branch}"
    book = yield f"type {numbered('textbox', 'Card number', book)} {card}"
    yield from click("button", "Reserve", book)
    return (yield "finish")


def _settings(task: str, seen: str) -> Moves:
    city, visible, letter = matched(r"city to (\w+) and visible to (\w+), and turn the letters on (\w+) ", task)
    seen = yield from click("link", "Account", seen)
    for part, act in (("profile", f"type {{}} {city}"), ("display", f"choose {{}} {visible}"), ("letters", "click {}")):
        seen = yield from click("link", part, seen)
        kind, label = {"profile": ("textbox", "city"), "display": ("choice", "visible")}.get(part, ("checkbox", letter))
        seen = yield act.format(numbered(kind, label, seen))
        seen = yield from click("button", "Save", seen)
    return (yield "finish")


def _lookup(task: str, seen: str) -> Moves:
    fact, name = matched(r"what is the (\w+) of the manager of ([\w ]+)\?", task)
    seen = yield from click("link", "People", seen)
    yield f"type {numbered('textbox', 'Name', seen)} {name}"
    seen = yield from click("button", "Search", seen)
    seen = yield from click("link", name, seen)
    (manager,) = matched(r"Manager:\n\[\d+\] link: (.+)", seen)
    seen = yield from click("link", manager, seen)
    return (yield f"answer {matched(rf'{fact.title()}: (.+)', seen)[0]}")
