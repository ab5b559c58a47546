"""A site of many pages with forms, in a browser: book, reserve, change settings, look something up (as Mind2Web).

    moesaic evaluate DIR --suite agents environments=browse
    environment: {name: browse, browser: chromium}

A change is right when the site holds exactly what was asked for in the end: nothing else booked, reserved or changed.
"""

from __future__ import annotations

import copy
import random
import re
from dataclasses import dataclass

from moesaic.worlds.browser.surfing import SiteWorld, Surfing
from moesaic.worlds.browser.town import BRANCHES, DAYS, LETTERS, SEATS, SUBJECTS, TOWNS, VISIBLE, Town, Train
from moesaic.worlds.browser.window import Request, Response
from moesaic.worlds.text_actions import Finished, Simulation, same

ABOUT = "You are at the site of a town."
OWN = "finish (when a change is made)\nanswer VALUE (when you know the answer to a question)"


class Browsing(Surfing):
    about, own_actions = ABOUT, OWN

    def __init__(self, draw: random.Random, number: int, browser: str) -> None:
        self.browser = browser
        self.town = Town(draw)
        self.wanted = copy.deepcopy(self.town.state)
        self.answer: str | None = None
        self.task = (self._train, self._reserve, self._settings, self._lookup)[number % 4](draw)

    def finish(self, action: str) -> Finished | None:
        if found := re.fullmatch(r"answer\b:?(.*)", action, re.I):
            return Finished(float(self.answer is not None and same(found[1], self.answer)))
        if re.fullmatch(r"finish\.?", action, re.I):
            return Finished(float(self.answer is None and self.town.state == self.wanted))
        return None

    def respond(self, request: Request) -> Response:
        return self.town.respond(request)

    def _train(self, draw: random.Random) -> str:
        start, end = draw.sample(TOWNS, 2)
        day, seat, bicycle = draw.choice(DAYS), draw.choice(SEATS), draw.choice(("on", "off"))
        name = f"{draw.choice(('Pat', 'Sam', 'Toni', 'Uli'))} {draw.randrange(10, 100)}"
        found = self.town.trains(start, end, day)
        which, best = self._best(draw, found)
        booked = {"from": start, "to": end, "day": day, "train": str(best.number), "name": name, "seat": seat}
        self.wanted.booked.append(booked | {"bicycle": bicycle})
        text = f"book the train from {start} to {end} on {day} that {which}, for {name}"
        return f"{text}, seat: {seat}, {'with' if bicycle == 'on' else 'without'} a bicycle."

    @staticmethod
    def _best(draw: random.Random, found: list[Train]) -> tuple[str, Train]:
        ways = {
            "is cheapest": min(found, key=lambda train: train.price),
            "arrives first": min(found, key=lambda train: train.arrives),
            "is cheapest of those without changes": min(
                (train for train in found if not train.changes), key=lambda train: train.price
            ),
        }
        which = draw.choice(sorted(ways))
        return which, ways[which]

    def _reserve(self, draw: random.Random) -> str:
        there = {
            (subject, branch): [book for book in self.town.books if book.subject == subject and branch in book.branches]
            for subject in SUBJECTS
            for branch in BRANCHES
        }
        (subject, branch), books = draw.choice([entry for entry in there.items() if entry[1]])
        card = str(draw.randrange(1000, 10_000))
        oldest = min(books, key=lambda book: book.year)
        self.wanted.reserved.append({"book": str(oldest.number), "branch": branch, "card": card})
        return f"reserve the oldest book on {subject} that is available at {branch}, there, with card number {card}."

    def _settings(self, draw: random.Random) -> str:
        settings = self.wanted.settings
        city = draw.choice([town for town in TOWNS if town != settings["city"]])
        visible = draw.choice([choice for choice in VISIBLE if choice != settings["visible"]])
        letter = draw.choice(LETTERS)
        state = "off" if settings[letter] == "on" else "on"
        settings |= {"city": city, "visible": visible, letter: state}
        return f"in the account, set city to {city} and visible to {visible}, and turn the letters on {letter} {state}."

    def _lookup(self, draw: random.Random) -> str:
        people = self.town.people
        person = draw.choice([person for person in people if person.manager is not None])
        assert person.manager is not None
        manager = people[person.manager]
        fact = draw.choice(("extension", "room"))
        self.answer = str(getattr(manager, fact))
        return f"Question: what is the {fact} of the manager of {person.name}?"


@dataclass(frozen=True)
class Browse(SiteWorld):
    turns: int = 30

    def simulation(self, draw: random.Random, number: int) -> Simulation:
        return Browsing(draw, number, self.browser)
