"""A household of rooms and containers: find things, treat them, put them where they belong (as ALFWorld in AgentBench).

    moesaic evaluate DIR --suite agents environments=house
    environment: {name: house, size: full}

What lies in a closed container is seen only when it is opened. One thing can be carried at a time. The episode ends
when the goal is reached. `small`: four rooms with twelve containers, three kinds of tasks (place, clean, two things).
`full`: five rooms with thirty containers, several things of a kind, and ALFWorld's six kinds of tasks: also heat, cool,
and look at a thing under a lamp.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from dataclasses import dataclass

from moesaic.worlds.text_actions import FORM, Finished, Invalid, Simulation, World

# A container's name with a mark if it can be closed; `drawer*4` are drawer 1 to drawer 4.
SMALL_ROOMS = {
    "kitchen": ("counter", "fridge*", "cupboard*"),
    "living room": ("sofa", "coffee table", "chest*"),
    "bedroom": ("bed", "desk", "wardrobe*"),
    "bathroom": ("shelf", "laundry basket", "cabinet*"),
}
FULL_ROOMS = {
    "kitchen": ("counter", "fridge*", "cupboard*6", "drawer*3", "stove"),
    "living room": ("sofa", "coffee table", "chest*", "sideboard*2"),
    "bedroom": ("bed", "desk", "wardrobe*", "night table*2"),
    "study": ("bookcase", "writing table", "safe*", "filing cabinet*2"),
    "bathroom": ("shelf", "laundry basket", "cabinet*2"),
}
THINGS = ("cup", "plate", "spoon", "towel", "candle", "pillow", "book", "lamp", "bottle", "bowl", "vase", "clock")
FOOD = ("apple", "potato", "egg", "bread", "tomato")
WASHABLE = ("cup", "plate", "spoon", "bowl", "bottle", "vase")
OF_A_KIND = 3  # of every kind of thing, in a house of full size

RULES = """You are in a house with these rooms: {rooms}. You can carry one thing at a time. {appliances}
Your actions:
go to ROOM
open CONTAINER
close CONTAINER
take THING from CONTAINER
put THING in CONTAINER
{treatments}
look
Names are those you are shown. {form}
For example: Action: go to kitchen
Your task: {task}
{seen}"""


@dataclass(frozen=True)
class Treatment:
    """What can be done with a thing that is carried, in one room."""

    done: str  # what the thing is then
    room: str
    where: str
    things: tuple[str, ...]


TREATMENTS = {
    "clean": Treatment("clean", "kitchen", "sink", WASHABLE),
    "heat": Treatment("hot", "kitchen", "stove", (*FOOD, "cup", "plate")),
    "cool": Treatment("cold", "kitchen", "fridge", (*FOOD, "cup", "bottle")),
    "examine": Treatment("examined", "study", "reading lamp", (*THINGS, *FOOD)),
}


@dataclass(frozen=True)
class Size:
    rooms: Mapping[str, tuple[str, ...]]
    things: tuple[str, ...]
    of_a_kind: int
    tasks: tuple[str, ...]
    treatments: tuple[str, ...]
    turns: int


SIZES = {
    "small": Size(SMALL_ROOMS, THINGS, 1, ("place", "clean", "two"), ("clean",), 30),
    "full": Size(
        FULL_ROOMS,
        (*THINGS, *FOOD),
        OF_A_KIND,
        ("place", "clean", "two", "heat", "cool", "examine"),
        tuple(TREATMENTS),
        70,
    ),
}


@dataclass(frozen=True)
class Goal:
    """A kind is reached by any thing of it, in a house with several."""

    kinds: tuple[str, ...]
    container: str
    treatment: str = ""

    def __str__(self) -> str:
        done = TREATMENTS[self.treatment].done + " " if self.treatment else ""
        if self.treatment == "examine":
            return f"examine a {self.kinds[0]} under the reading lamp."
        return f"put the {' and the '.join(done + kind for kind in self.kinds)} in the {self.container}."


class Household(Simulation):
    def __init__(self, draw: random.Random, number: int, size: Size = SIZES["small"]) -> None:
        self.size = size
        self.room_of: dict[str, str] = {}
        self.shut: set[str] = set()
        for room, containers in size.rooms.items():
            for name, closes in (entry for container in containers for entry in _numbered(container)):
                self.room_of[name] = room
                self.shut |= {name} if closes else set()
        self.closable = frozenset(self.shut)
        places = sorted(self.room_of)
        count = size.of_a_kind
        things = [f"{kind} {n + 1}" if count > 1 else kind for kind in size.things for n in range(count)]
        self.where: dict[str, str | None] = {thing: draw.choice(places) for thing in things}  # None: in the hand
        # What was done to a thing, among it what washable things are from the start.
        self.treated: dict[str, set[str]] = {thing: set() for thing in things}
        for thing in things:
            if kind_of(thing) in WASHABLE and draw.random() >= 0.5:
                self.treated[thing].add("clean")
        self.room = draw.choice(sorted(size.rooms))
        self.goal = self._goal(draw, size.tasks[number % len(size.tasks)], places)

    def _goal(self, draw: random.Random, kind: str, places: list[str]) -> Goal:
        treatment = kind if kind in TREATMENTS else ""
        possible = TREATMENTS[kind].things if treatment else self.size.things
        kinds = draw.sample(sorted(set(possible) & set(self.size.things)), 2 if kind == "two" else 1)
        meant = [thing for thing in self.where if kind_of(thing) in kinds]
        for thing in meant if treatment == "clean" else ():
            self.treated[thing].discard("clean")
        # In a container where none of them lies, and that is open or can be opened.
        container = draw.choice([name for name in places if name not in {self.where[thing] for thing in meant}])
        return Goal(tuple(kinds), container, treatment)

    def open(self) -> str:
        treatments = [TREATMENTS[name] for name in self.size.treatments]
        if self.size.treatments == ("clean",):
            appliances = "Things can be cleaned in the kitchen, where the sink is."
        else:
            appliances = " ".join(
                f"With the {t.where} in the {t.room} things can be made {t.done}." for t in treatments
            )
        return RULES.format(
            rooms=", ".join(self.size.rooms),
            appliances=appliances,
            treatments="\n".join(f"{name} THING" for name in self.size.treatments),
            form=FORM,
            task=self.goal,
            seen=self._look(),
        )

    def act(self, action: str) -> str | Finished:
        words = re.sub(r"\b(the|dirty|hot|cold)\b", " ", action.casefold().rstrip(". "))
        words = " ".join(words.split())
        seen = self._act(words)
        return Finished(1.0, f"{seen} The task is done.") if self._reached() else seen

    def _reached(self) -> bool:
        goal = self.goal

        def good(thing: str) -> bool:
            there = goal.treatment == "examine" or self.where[thing] == goal.container
            return there and (not goal.treatment or goal.treatment in self.treated[thing])

        return all(any(kind_of(thing) == kind and good(thing) for thing in self.where) for kind in goal.kinds)

    def _act(self, words: str) -> str:
        if words == "look":
            return self._look()
        if found := re.fullmatch(r"go to (.+)", words):
            if found[1] not in self.size.rooms:
                raise Invalid(f'There is no room "{found[1]}". Rooms: {", ".join(self.size.rooms)}.')
            self.room = found[1]
            return self._look()
        if found := re.fullmatch(r"(open|close) (.+)", words):
            return self._door(found[2], shut=found[1] == "close")
        if found := re.fullmatch(r"take (.+?) from (.+)", words):
            return self._take(found[1], found[2])
        if found := re.fullmatch(r"put (.+?) (?:in|on|into|onto) (.+)", words):
            return self._put(found[1], found[2])
        if found := re.fullmatch(rf"({'|'.join(self.size.treatments)}) (.+?)(?: (?:with|in|under) [\w ]+)?", words):
            return self._treat(found[1], found[2])
        actions = ", ".join(("go to", "open", "close", "take ... from", "put ... in", *self.size.treatments, "look"))
        raise Invalid(f"That is no action here. Actions: {actions}.")

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

    def _treat(self, how: str, thing: str) -> str:
        self._carrying(thing)
        treatment = TREATMENTS[how]
        if self.room != treatment.room:
            raise Invalid(f"There is no {treatment.where} here; it is in the {treatment.room}.")
        if kind_of(thing) not in treatment.things:
            verb = "washed" if how == "clean" else f"made {treatment.done}"
            raise Invalid(f"The {thing} cannot be {verb}.")
        self.treated[thing].add(how)
        self.treated[thing] -= {"heat": {"cool"}, "cool": {"heat"}}.get(how, set())
        return f"You {how} the {thing}."

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
        treated = self.treated[thing]
        state = "dirty " if kind_of(thing) in WASHABLE and "clean" not in treated else ""
        return state + "".join(f"{TREATMENTS[how].done} " for how in ("heat", "cool") if how in treated) + thing

    def _look(self) -> str:
        inside = " ".join(self._inside(name) for name, room in self.room_of.items() if room == self.room)
        held = self._held()
        return f"You are in the {self.room}. {inside} You carry {f'the {self._named(held)}' if held else 'nothing'}."

    def _inside(self, name: str) -> str:
        if name in self.shut:
            return f"The {name} is closed."
        things = [self._named(thing) for thing, place in self.where.items() if place == name]
        return f"In the {name}: {', '.join(things) or 'nothing'}."


def kind_of(thing: str) -> str:
    return thing.rstrip("0123456789 ")


def _numbered(container: str) -> list[tuple[str, bool]]:
    """`cupboard*6`: cupboard 1 to 6, which can be closed; `fridge*`: one that can; `sofa`: one that cannot."""
    name, mark, count = container.partition("*")
    return [(f"{name} {n + 1}", True) for n in range(int(count))] if count else [(name, bool(mark))]


@dataclass(frozen=True)
class House(World):
    turns: int = 0  # 0: as many as a house of this size needs
    size: str = "small"

    def __post_init__(self) -> None:
        if self.size not in SIZES:
            raise ValueError(f"size is one of {', '.join(SIZES)}")
        if not self.turns:
            object.__setattr__(self, "turns", SIZES[self.size].turns)
        super().__post_init__()

    def simulation(self, draw: random.Random, number: int) -> Simulation:
        return Household(draw, number, SIZES[self.size])
