"""A database to ask and to change in SQL: SQLite in memory, with made-up tables (the database of AgentBench).

    moesaic evaluate DIR --suite agents environments=sql

A question is judged by its answer, a change by what the tables hold in the end; both are worked out in Python and not
by the database. A statement can read and change rows and nothing else: no other files, no pragmas, no new tables, only
functions that are known. It is interrupted after so many of the database's own instructions, on any machine the same.
"""

from __future__ import annotations

import random
import re
import sqlite3
from collections.abc import Callable
from dataclasses import dataclass, field

from moesaic.worlds.text_actions import FORM, Finished, Invalid, Simulation, World, same

INSTRUCTIONS = 400_000  # of SQLite's machine, for one statement; a join of all rows with all takes far fewer
LONGEST_VALUE = 4_000  # bytes; with the above it bounds what a statement can take of memory
SHOWN = 20  # rows
WIDEST = 80  # characters of a value that are shown

ALLOWED = {
    sqlite3.SQLITE_SELECT,
    sqlite3.SQLITE_READ,
    sqlite3.SQLITE_INSERT,
    sqlite3.SQLITE_UPDATE,
    sqlite3.SQLITE_DELETE,
    sqlite3.SQLITE_RECURSIVE,
}
# None that reads a clock or a file, draws random numbers, or makes large values of nothing.
FUNCTIONS = {
    *("abs", "avg", "cast", "coalesce", "count", "cume_dist", "dense_rank", "first_value", "glob"),
    *("group_concat", "iif", "ifnull", "instr", "lag", "last_value", "lead", "length", "like"),
    *("lower", "ltrim", "max", "min", "ntile", "nullif", "rank", "replace", "round"),
    *("row_number", "rtrim", "substr", "substring", "sum", "total", "trim", "typeof", "upper"),
}

CITIES = ("Aston", "Brim", "Colwick", "Dunmere", "Elford")
ITEMS = ("anvil", "bucket", "candle", "drill", "engine", "funnel")
NAMES = (
    *("Ada", "Ben", "Cleo", "Dan", "Eva", "Finn", "Gus", "Hana", "Ivo", "June", "Karl", "Lena", "Milo"),
    *("Nina", "Olaf", "Pia", "Quin", "Rosa", "Sven", "Tara", "Umar", "Vera", "Will", "Xena", "Yann", "Zoe"),
)

TABLES = """CREATE TABLE people (id INTEGER PRIMARY KEY, name TEXT, city TEXT, age INTEGER);
CREATE TABLE orders (id INTEGER PRIMARY KEY, person_id INTEGER, item TEXT, amount INTEGER);"""

RULES = """You have a SQLite database with two tables:
{tables}
orders.person_id is the id of a person. Your actions:
one SQL statement (SELECT, INSERT, UPDATE or DELETE), which is carried out and its rows shown
answer VALUE: give the final answer to a question
finish: say that a change is made
{form}
For example: Action: SELECT count(*) FROM people
{task}"""

Person = tuple[int, str, str, int]  # id, name, city, age
Order = tuple[int, int, str, int]  # id, person, item, amount


@dataclass
class Rows:
    people: list[Person]
    orders: list[Order]


@dataclass(frozen=True)
class Task:
    text: str
    answer: str | None = None  # of a question,
    after: Rows | None = field(default=None, repr=False)  # or what a change comes to


def make_rows(draw: random.Random) -> Rows:
    people = [(n, name, draw.choice(CITIES), draw.randint(18, 80)) for n, name in enumerate(NAMES, 1)]
    orders = [(n, draw.randint(1, len(people)), draw.choice(ITEMS), draw.randint(1, 99)) for n in range(1, 91)]
    return Rows(people, orders)


def _count(rows: Rows, draw: random.Random) -> Task:
    city, age = draw.choice(CITIES), draw.randint(30, 60)
    found = sum(person[2] == city and person[3] > age for person in rows.people)
    return Task(f"Question: how many people in {city} are older than {age}?", str(found))


def _sum_over_city(rows: Rows, draw: random.Random) -> Task:
    city = draw.choice(CITIES)
    there = {person[0] for person in rows.people if person[2] == city}
    found = sum(order[3] for order in rows.orders if order[1] in there)
    return Task(f"Question: what do the amounts of all orders of people in {city} add up to? (0 if none)", str(found))


def _largest(rows: Rows, draw: random.Random) -> Task:
    item = draw.choice(ITEMS)
    totals: dict[int, int] = {}
    for _, person, what, amount in rows.orders:
        if what == item:
            totals[person] = totals.get(person, 0) + amount
    # Of those who are equal the first by name, so that there is one answer.
    names = {person[0]: person[1] for person in rows.people}
    best = min(totals, key=lambda person: (-totals[person], names[person]))
    text = f"Question: who ordered the largest total amount of the item {item}? Among equals, the first by name."
    return Task(text, names[best])


def _without(rows: Rows, draw: random.Random) -> Task:
    item = draw.choice(ITEMS)
    buyers = {order[1] for order in rows.orders if order[2] == item}
    return Task(
        f"Question: how many people have never ordered the item {item}?",
        str(sum(person[0] not in buyers for person in rows.people)),
    )


def _update(rows: Rows, draw: random.Random) -> Task:
    city, more = draw.choice(CITIES), draw.randint(2, 9)
    there = {person[0] for person in rows.people if person[2] == city}
    orders = [(n, who, item, amount + more * (who in there)) for n, who, item, amount in rows.orders]
    text = f"Change: raise the amount of every order of people in {city} by {more}."
    return Task(text, after=Rows(rows.people, orders))


def _insert(rows: Rows, draw: random.Random) -> Task:
    number, age = 100 + draw.randint(1, 99), draw.randint(18, 80)
    name, city = draw.choice(("Abel", "Bora", "Cyra")), draw.choice(CITIES)
    text = f"Change: add a person with the id {number}, named {name}, of age {age}, who lives in {city}."
    return Task(text, after=Rows([*rows.people, (number, name, city, age)], rows.orders))


def _delete(rows: Rows, draw: random.Random) -> Task:
    item, least = draw.choice(ITEMS), draw.randint(20, 60)
    kept = [order for order in rows.orders if not (order[2] == item and order[3] < least)]
    text = f"Change: delete all orders of the item {item} with an amount below {least}."
    return Task(text, after=Rows(rows.people, kept))


KINDS: tuple[Callable[[Rows, random.Random], Task], ...] = (
    _count,
    _sum_over_city,
    _largest,
    _without,
    _update,
    _insert,
    _delete,
)


class Session(Simulation):
    def __init__(self, draw: random.Random, number: int) -> None:
        rows = make_rows(draw)
        self.task = KINDS[number % len(KINDS)](rows, draw)
        # Turns of a rollout may be taken on different threads, one after the other.
        self.database = sqlite3.connect(":memory:", isolation_level=None, cached_statements=0, check_same_thread=False)
        self.database.executescript(TABLES)
        self.database.executemany("INSERT INTO people VALUES (?, ?, ?, ?)", rows.people)
        self.database.executemany("INSERT INTO orders VALUES (?, ?, ?, ?)", rows.orders)
        self.database.execute("PRAGMA max_page_count = 1000")
        self.database.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, LONGEST_VALUE)
        self.database.setlimit(sqlite3.SQLITE_LIMIT_LIKE_PATTERN_LENGTH, 100)
        self.database.setlimit(sqlite3.SQLITE_LIMIT_ATTACHED, 0)
        self.database.set_authorizer(_authorize)

    def open(self) -> str:
        return RULES.format(tables=TABLES, form=FORM, task=self.task.text)

    def close(self) -> None:
        self.database.close()

    def act(self, action: str) -> str | Finished:
        if found := re.fullmatch(r"answer\b:?(.*)", action, re.I):
            return Finished(float(self.task.answer is not None and same(found[1], self.task.answer)))
        if re.fullmatch(r"finish\.?", action, re.I):
            return Finished(float(self.task.after is not None and self._rows() == self.task.after))
        left = [INSTRUCTIONS // 1000]

        def one_more() -> int:
            left[0] -= 1
            return left[0] < 0

        self.database.set_progress_handler(one_more, 1000)
        try:
            cursor = self.database.execute(action)
            rows = cursor.fetchmany(SHOWN + 1)
            changed = cursor.rowcount
            cursor.close()
        except (sqlite3.Error, sqlite3.Warning, ValueError, OverflowError, MemoryError) as error:
            told = "it took too long" if left[0] < 0 else str(error)[:200]
            raise Invalid(f"The database refuses: {told}.") from None
        finally:
            self.database.set_progress_handler(None, 0)
        if cursor.description is None:
            return f"{max(changed, 0)} rows changed."
        lines = [" | ".join(_shown(value) for value in row) for row in rows[:SHOWN]]
        more = ["..."] if len(rows) > SHOWN else []
        return "\n".join([" | ".join(str(column[0])[:WIDEST] for column in cursor.description), *lines, *more])

    def _rows(self) -> Rows:
        people = self.database.execute("SELECT id, name, city, age FROM people ORDER BY id").fetchall()
        orders = self.database.execute("SELECT id, person_id, item, amount FROM orders ORDER BY id").fetchall()
        return Rows(people, orders)


def _authorize(kind: int, first: str | None, second: str | None, *_: str | None) -> int:
    fine = kind in ALLOWED or (kind == sqlite3.SQLITE_FUNCTION and (second or "").casefold() in FUNCTIONS)
    return sqlite3.SQLITE_OK if fine else sqlite3.SQLITE_DENY


def _shown(value: object) -> str:
    return ("NULL" if value is None else str(value))[:WIDEST]


@dataclass(frozen=True)
class Database(World):
    turns: int = 8

    def simulation(self, draw: random.Random, number: int) -> Simulation:
        return Session(draw, number)
