"""Players that solve every environment, acting on nothing but what they are shown: each world can be solved.

A solver is a generator: it is given the opening, yields actions, and is sent what is seen after each.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator

from moesaic.data.tasks.multihop_texts import RELATIONS
from moesaic.worlds.environments.cards import HABITS
from tests.worlds.matching import matched
from tests.worlds.puzzle_solvers import kernel, lateral, repair
from tests.worlds.site_solvers import browse, shop

Solver = Callable[[str], Generator[str, str, None]]


def shell(opening: str) -> Generator[str, str, None]:
    task = opening.splitlines()[-1]
    if "how many files" in task:
        ending, word = matched(r"ends in \.(\w+) and contain the word (\w+)", task)
        said = yield f"grep -rlw --include='*.{ending}' {word} . | wc -l"
        yield f"answer {said.strip()}"
    elif "begins with the word code" in task:
        said = yield "grep -rh '^code ' ."
        yield f"answer {said.split()[1]}"
    elif "sales.csv" in task:
        (region,) = matched(r"region (\w+)\?", task)
        said = yield f"awk -F, '$1 == \"{region}\" {{ sum += $3 }} END {{ print sum }}' data/sales.csv"
        yield f"answer {said.strip()}"
    elif "most lines" in task:
        said = yield "wc -l logs/* | sort -n | tail -2 | head -1"
        yield f"answer {said.split('/')[1].strip()}"
    else:
        if "execute" in task:
            yield "chmod u+x tools/*.sh"
        elif "trash" in task:
            yield "mkdir trash"  # two commands: what the first one did must still be there
            yield "mv box/*.tmp trash/"
        else:
            assert "sorted.txt" in task
            yield "sort -u words.txt > sorted.txt"
        yield "finish"


def sql(opening: str) -> Generator[str, str, None]:
    task = opening.splitlines()[-1]
    joined = "orders JOIN people ON people.id = orders.person_id"
    if task.startswith("Question"):
        if "are older than" in task:
            city, age = matched(r"people in (\w+) are older than (\d+)", task)
            said = yield f"SELECT count(*) FROM people WHERE city = '{city}' AND age > {age}"
        elif "add up to" in task:
            (city,) = matched(r"of people in (\w+) add", task)
            said = yield f"SELECT coalesce(sum(amount), 0) FROM {joined} WHERE city = '{city}'"
        elif "largest" in task:
            (item,) = matched(r"item (\w+)\?", task)
            said = yield (
                f"SELECT name FROM {joined} WHERE item = '{item}' GROUP BY people.id "
                "ORDER BY sum(amount) DESC, name LIMIT 1"
            )
        else:
            (item,) = matched(r"never ordered the item (\w+)", task)
            buyers = f"SELECT person_id FROM orders WHERE item = '{item}'"
            said = yield f"SELECT count(*) FROM people WHERE id NOT IN ({buyers})"
        yield f"answer {said.splitlines()[1]}"
        return
    if "raise" in task:
        city, more = matched(r"people in (\w+) by (\d+)", task)
        there = f"SELECT id FROM people WHERE city = '{city}'"
        yield f"UPDATE orders SET amount = amount + {more} WHERE person_id IN ({there})"
    elif "add a person" in task:
        number, name, age, city = matched(r"id (\d+), named (\w+), of age (\d+), who lives in (\w+)", task)
        yield f"INSERT INTO people (id, name, city, age) VALUES ({number}, '{name}', '{city}', {age})"
    else:
        item, least = matched(r"item (\w+) with an amount below (\d+)", task)
        yield f"DELETE FROM orders WHERE item = '{item}' AND amount < {least}"
    yield "finish"


def graph(opening: str) -> Generator[str, str, None]:
    question = opening.splitlines()[-1]

    def found(seen: str) -> str:
        return matched(r"^(#\d+):", seen)[0]

    if "In which country" in question:
        (person,) = matched(r"that (\w+) lives in", question)
        city = found((yield f"get_neighbors({person}, lives_in)"))
        yield f"answer({found((yield f'get_neighbors({city}, located_in)'))})"
    elif "manager" in question:
        (person,) = matched(r"manager of (\w+)", question)
        manager = found((yield f"get_neighbors({person}, manager)"))
        company = found((yield f"get_neighbors({manager}, works_for)"))
        seat = yield f"get_neighbors({company}, based_in)"
        yield f"answer({seat.partition(': ')[2]})"  # by name
    elif "Who lives in" in question:
        city, company = matched(r"lives in (\w+) and works for (\w+)\?", question)
        residents = found((yield f"get_neighbors({city}, has_resident)"))
        employed = found((yield f"get_neighbors({company}, employs)"))
        yield f"answer({found((yield f'intersection({residents}, {employed})'))})"
    else:
        if "instrument" in question:
            city, instrument = matched(r"live in (\w+) play the instrument (\w+)", question)
            one = found((yield f"get_neighbors({city}, has_resident)"))
            other = found((yield f"get_neighbors({instrument}, played_by)"))
        else:
            company, country = matched(r"work for (\w+) live in a city of (\w+)", question)
            cities = found((yield f"get_neighbors({country}, has_city)"))
            one = found((yield f"get_neighbors({cities}, has_resident)"))
            other = found((yield f"get_neighbors({company}, employs)"))
        both = found((yield f"intersection({one}, {other})"))
        yield f"answer({(yield f'count({both})')})"


def cards(opening: str) -> Generator[str, str, None]:
    """One above what the opponent will play, or the lowest where that cannot be; habits that do not fit are struck."""
    habits = [habit for name, habit in HABITS.items() if name in opening]
    seen = opening
    while True:
        prize, mine, theirs = matched(
            r"the prize is (\d+)\. Your hand: ([\d, ]+)\. Your opponent's hand: ([\d, ]+)", seen
        )
        hand, other = ([int(card) for card in cards.split(",")] for cards in (mine, theirs))
        expected = habits[0](other, int(prize))
        seen = yield f"play {expected + 1 if expected + 1 in hand else min(hand)}"
        played = int(matched(r"your opponent plays (\d+)", seen)[0])
        habits = [habit for habit in habits if habit(other, int(prize)) == played]


def house(opening: str) -> Generator[str, str, None]:
    """Look everywhere first, then carry."""
    rooms = matched(r"with these rooms: ([^.]+)\.", opening)[0].split(", ")
    if "Your task: examine" in opening:
        things, target = ["examined " + matched(r"examine a (\w+) under", opening)[0]], ""
    else:
        task = matched(r"Your task: put the (.+) in the ([\w ]+)\.", opening)
        things, target = task[0].split(" and the "), task[1]
    room_of: dict[str, str] = {}
    where: dict[str, str] = {}

    def note(room: str, seen: str) -> list[str]:
        """Learn from what is seen; the containers that are still closed."""
        for container, inside in re.findall(r"In the ([\w ]+): ([^.]*)\.", seen):
            room_of[container] = room
            where.update({thing.removeprefix("dirty "): container for thing in inside.split(", ")})
        return re.findall(r"The ([\w ]+) is closed", seen)

    here = matched(r"You are in the ([\w ]+)\.", opening)[0]
    seen = opening.splitlines()[-1]
    for room in [here, *(room for room in rooms if room != here)]:
        if room != here:
            seen = yield f"go to {room}"
            here = room
        for container in note(room, seen):
            note(room, (yield f"open {container}"))
    for named in things:
        state, _, kind = named.rpartition(" ")
        thing = next(thing for thing in where if thing.rstrip("0123456789 ") == kind)
        if here != room_of[where[thing]]:
            here = room_of[where[thing]]
            yield f"go to {here}"
        yield f"take {thing} from {where[thing]}"
        if state:
            verb, room = {"examined": ("examine", "study")}.get(
                state, ({"clean": "clean", "hot": "heat", "cold": "cool"}.get(state, ""), "kitchen")
            )
            if here != room:
                here = room
                yield f"go to {room}"
            yield f"{verb} {thing}"
        if here != room_of[target]:
            here = room_of[target]
            yield f"go to {here}"
        yield f"put {thing} in {target}"


def multihop(opening: str) -> Generator[str, str, None]:
    """Takes a question apart from its last relation to its first, then looks every one up in turn."""
    about = opening.splitlines()[-1].removeprefix("Question: ")
    relations: list[str] = []
    while found := _asked(about, first=not relations):
        relation, about = found
        relations.insert(0, relation)
    for relation in relations:
        pattern = _pattern(RELATIONS[relation].sentences[0], s=re.escape(about), o="(.+?)")
        while not re.search(pattern, said := (yield f"search {about}")):
            pass  # somebody else took that turn
        (about,) = matched(pattern, said)
    while True:
        yield f"answer {about}"


def _asked(text: str, first: bool) -> tuple[str, str] | None:
    for name, relation in RELATIONS.items():
        form = (relation.questions if first else relation.nouns)[0]
        if found := re.fullmatch(_pattern(form, s="(.+)"), text, re.I):
            return name, found[1]
    return None


def _pattern(form: str, **values: str) -> str:
    return re.escape(form).replace(r"\{s\}", values["s"]).replace(r"\{o\}", values.get("o", ""))


SOLVERS: dict[str, Solver] = {
    "shell": shell, "sql": sql, "graph": graph, "cards": cards, "house": house, "multihop": multihop,
    "shop": shop, "browse": browse, "lateral": lateral, "repair": repair, "kernel": kernel,
}  # fmt: skip
BEGINNINGS = {
    "You have a shell": "shell",
    "You have a SQLite": "sql",
    "You are asked about a graph": "graph",
    "A game of cards": "cards",
    "You are in a house": "house",
    "Find the answer": "multihop",
    "You are a customer": "shop",
    "You are at the site of a town": "browse",
    "A riddle": "lateral",
    "You repair a Python program": "repair",
    "Write a Triton kernel": "kernel",
}


def next_action(messages: list[dict[str, str]]) -> str:
    """What the solver of a conversation does next, found by playing its part so far again."""
    opening = messages[0]["content"]
    name = next(name for beginning, name in BEGINNINGS.items() if opening.startswith(beginning))
    playing = SOLVERS[name](opening)
    action = next(playing)
    for message in messages[2::2]:
        action = playing.send(message["content"])
    return action
