"""A household of rooms and containers: find things, clean them, put them where they belong (as ALFWorld in AgentBench).

    moesaic evaluate DIR --suite agents environments=house

What lies in a closed container is seen only when it is opened. One thing can be carried at a time. The episode ends
when the goal is reached.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass

from moesaic.worlds.text_actions import FORM, Finished, Invalid, Simulation, World

ROOMS = {  # containers that can be closed have a mark
    "kitchen": ("counter", "fridge*", "cupboard*"),
    "living room": ("sofa", "coffee table", "chest*"),
    "bedroom": ("bed", "desk", "wardrobe*"),
    "bathroom": ("shelf", "laundry basket", "cabinet*"),
}
THINGS = ("cup", "plate", "spoon", "towel", "candle", "pillow", "book", "lamp", "bottle", "bowl", "vase", "clock")
WASHABLE = ("cup", "plate", "spoon", "bowl", "bottle", "vase")
SINK = "kitchen"

RULES = """You are in a house with these rooms: {rooms}. You can carry one thing at a time. Things can be cleaned in \
the kitchen, where the sink is.
Your actions:
go to ROOM
open CONTAINER
close CONTAINER
take THING from CONTAINER
put THING in CONTAINER
clean THING
look
Names are those you are shown. {form}
For example: Action: go to kitchen
Your task: {task}
{seen}"""


@dataclass(frozen=True)
class Goal:
    things: tuple[str, ...]
    container: str
    clean: bool

    def __str__(self) -> str:
        state = "clean " if self.clean else ""
        return f"put the {' and the '.join(state + thing for thing in self.things)} in the {self.container}."


class Household(Simulation):
    def __init__(self, draw: random.Random, number: int) -> None:
        self.room_of = {name.rstrip("*"): room for room, names in ROOMS.items() for name in names}
        self.shut = {name[:-1] for names in ROOMS.values() for name in names if name.endswith("*")}
        self.closable = frozenset(self.shut)
        places = sorted(self.room_of)
        self.where: dict[str, str | None] = {thing: draw.choice(places) for thing in THINGS}  # None: in the hand
        self.dirty = {thing for thing in WASHABLE if draw.random() < 0.5}
        self.room = draw.choice(sorted(ROOMS))
        self.goal = self._goal(draw, ("place", "clean", "two")[number % 3], places)

    def _goal(self, draw: random.Random, kind: str, places: list[str]) -> Goal:
        things = draw.sample(WASHABLE if kind == "clean" else THINGS, 2 if kind == "two" else 1)
        if kind == "clean":
            self.dirty.add(things[0])
        container = draw.choice([name for name in places if name not in {self.where[thing] for thing in things}])
        return Goal(tuple(things), container, kind == "clean")

    def open(self) -> str:
        return RULES.format(rooms=", ".join(ROOMS), form=FORM, task=self.goal, seen=self._look())

    def act(self, action: str) -> str | Finished:
        words = re.sub(r"\b(the|dirty)\b", " ", action.casefold().rstrip(". "))
        words = " ".join(words.split())
        seen = self._act(words)
        done = all(self.where[thing] == self.goal.container for thing in self.goal.things)
        if done and not (self.goal.clean and self.dirty & set(self.goal.things)):
            return Finished(1.0, f"{seen} The task is done.")
        return seen

    def _act(self, words: str) -> str:
        if words == "look":
            return self._look()
        if found := re.fullmatch(r"go to (.+)", words):
            if found[1] not in ROOMS:
                raise Invalid(f'There is no room "{found[1]}". Rooms: {", ".join(ROOMS)}.')
            self.room = found[1]
            return self._look()
        if found := re.fullmatch(r"(open|close) (.+)", words):
            return self._door(found[2], shut=found[1] == "close")
        if found := re.fullmatch(r"take (.+?) from (.+)", words):
            return self._take(found[1], found[2])
        if found := re.fullmatch(r"put (.+?) (?:in|on|into|onto) (.+)", words):
            return self._put(found[1], found[2])
        if found := re.fullmatch(r"clean (.+?)(?: (?:with|in) sink)?", words):
            return self._clean(found[1])
        raise Invalid("That is no action here. Actions: go to, open, close, take ... from, put ... in, clean, look.")

    def _door(self, name: str, shut: bool) -> str:
        self._here(name)
        if name not in self.closable:
            raise Invalid(f"The {name} cannot be opened or closed.")
        if shut == (name in self.shut):
            raise Invalid(f"The {name} is {'closed' if shut else 'open'} already.")
        (self.shut.add if shut else self.shut.remove)(name)
        return f"You close the {name}." if shut else self._inside(name)

    def _take(self, thing: str, name: str) -> str:
        self._reach(name)
        if self.where.get(thing) != name:
            raise Invalid(f"There is no {thing} in the {name}.")
        if (held := self._held()) is not None:
            raise Invalid(f"You are carrying the {held}; put it down first.")
        self.where[thing] = None
        return f"You take the {self._named(thing)}."

    def _put(self, thing: str, name: str) -> str:
        self._reach(name)
        self._carrying(thing)
        self.where[thing] = name
        return f"You put the {self._named(thing)} in the {name}."

    def _clean(self, thing: str) -> str:
        self._carrying(thing)
        if self.room != SINK:
            raise Invalid(f"There is no sink here; it is in the {SINK}.")
        if thing not in WASHABLE:
            raise Invalid(f"The {thing} cannot be washed.")
        self.dirty.discard(thing)
        return f"You clean the {thing}."

    def _here(self, name: str) -> None:
        if self.room_of.get(name) != self.room:
            raise Invalid(f"There is no {name} in the {self.room}.")

    def _reach(self, name: str) -> None:
        self._here(name)
        if name in self.shut:
            raise Invalid(f"The {name} is closed.")

    def _carrying(self, thing: str) -> None:
        if thing not in self.where or self._held() != thing:
            raise Invalid(f"You are not carrying the {thing}.")

    def _held(self) -> str | None:
        return next((thing for thing, place in self.where.items() if place is None), None)

    def _named(self, thing: str) -> str:
        return f"dirty {thing}" if thing in self.dirty else thing

    def _look(self) -> str:
        inside = " ".join(self._inside(name) for name, room in self.room_of.items() if room == self.room)
        held = self._held()
        return f"You are in the {self.room}. {inside} You carry {f'the {self._named(held)}' if held else 'nothing'}."

    def _inside(self, name: str) -> str:
        if name in self.shut:
            return f"The {name} is closed."
        things = [self._named(thing) for thing, place in self.where.items() if place == name]
        return f"In the {name}: {', '.join(things) or 'nothing'}."


@dataclass(frozen=True)
class House(World):
    turns: int = 30

    def simulation(self, draw: random.Random, number: int) -> Simulation:
        return Household(draw, number)
