"""The site of a town: trains, a library, an account with settings, and a directory of people; all drawn from a seed."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from moesaic.worlds.browser.window import Request, Response, Site, checkbox, choice, form, link, page, textbox

TOWNS = ("Arden", "Brook", "Calder", "Dunmore", "Eastry", "Fairoak", "Gorsey", "Hythe")
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday")
SEATS = ("window", "aisle", "any")
SUBJECTS = ("astronomy", "botany", "chess", "geology", "music", "sailing")
BRANCHES = ("Harbour", "Market", "Northgate")
FIRST = ("Ada", "Ben", "Cora", "Dan", "Eva", "Finn", "Gwen", "Hugo", "Ida", "Jon", "Kim", "Lea")
LAST = ("Abbot", "Baker", "Carter", "Dyer", "Fisher", "Mason", "Potter", "Tyler")
OFFICES = ("Archives", "Bridges", "Forestry", "Harbour", "Parks", "Waterworks")
LANGUAGES = ("English", "French", "German", "Welsh")
VISIBLE = ("everybody", "members", "nobody")
LETTERS = ("events", "offers", "roadworks", "weather")
PER_PAGE = 5


@dataclass(frozen=True)
class Train:
    number: int
    leaves: int  # minutes after midnight
    arrives: int
    changes: int
    price: int  # cents


@dataclass(frozen=True)
class Book:
    number: int
    title: str
    subject: str
    year: int
    branches: tuple[str, ...]


@dataclass(frozen=True)
class Person:
    number: int
    name: str
    office: str
    room: str
    extension: int
    manager: int | None


@dataclass
class State:
    """What can be changed on the site."""

    booked: list[dict[str, str]] = field(default_factory=list)
    reserved: list[dict[str, str]] = field(default_factory=list)
    settings: dict[str, str] = field(default_factory=dict)


class Town(Site):
    def __init__(self, draw: random.Random) -> None:
        self.state = State()
        self.books = [self._book(draw, number) for number in range(36)]
        self.people = self._people(draw)
        self.timetable = draw.randrange(1 << 30)
        self.state.settings = {
            "city": draw.choice(TOWNS),
            "phone": str(draw.randrange(10_000, 99_999)),
            "language": draw.choice(LANGUAGES),
            "visible": draw.choice(VISIBLE),
            **{letter: draw.choice(("on", "off")) for letter in LETTERS},
        }

    def _book(self, draw: random.Random, number: int) -> Book:
        subject = SUBJECTS[number % len(SUBJECTS)]
        title = (
            f"{draw.choice(('The Joy of', 'Notes on', 'A Primer of', 'Lectures on'))} {subject.title()} {number + 1}"
        )
        # No two are of the same year, so that there is always one oldest.
        branches = tuple(branch for branch in BRANCHES if draw.random() < 0.6)
        return Book(number, title, subject, 1900 + 36 * draw.randrange(3) + number, branches)

    def _people(self, draw: random.Random) -> list[Person]:
        names = draw.sample([f"{first} {last}" for first in FIRST for last in LAST], 24)
        extensions = draw.sample(range(1000, 10_000), len(names))
        found = []
        for number, name in enumerate(names):
            head = number % len(OFFICES)  # the first of every office
            manager = None if number == head else head
            room = f"{draw.choice('ABC')}{draw.randrange(100, 400)}"
            found.append(Person(number, name, OFFICES[head], room, extensions[number], manager))
        return found

    def trains(self, start: str, end: str, day: str) -> list[Train]:
        draw = random.Random(f"{self.timetable} {start} {end} {day}")
        leaves, prices = sorted(draw.sample(range(300, 1300, 5), 5)), draw.sample(range(400, 6000, 10), 5)
        durations = draw.sample(range(30, 300), 5)
        changes = [0, *(draw.randrange(3) for _ in range(4))]
        draw.shuffle(changes)
        rows = zip(leaves, durations, changes, prices, strict=True)
        return [Train(number, at, at + lasts, change, price) for number, (at, lasts, change, price) in enumerate(rows)]

    def respond(self, request: Request) -> Response:
        parts = request.path.strip("/").split("/")
        sections = {"trains": self._trains, "library": self._library, "account": self._account, "people": self._office}
        if parts[0] in sections:
            return sections[parts[0]](parts[1:], request)
        names = ("Trains", "Library", "Account", "People")
        return page("Town portal", "".join(f"<p>{link(f'/{name.casefold()}', name)}</p>" for name in names))

    def _trains(self, parts: list[str], request: Request) -> Response:
        asked = {name: request.fields.get(name, "") for name in ("from", "to", "day", "train")}
        known = asked["from"] in TOWNS and asked["to"] in TOWNS and asked["day"] in DAYS
        if known and asked["from"] != asked["to"] and parts:
            found = self.trains(asked["from"], asked["to"], asked["day"])
            query = f"from={asked['from']}&to={asked['to']}&day={asked['day']}"
            if parts == ["find"]:
                return page(f"{asked['from']} to {asked['to']}, {asked['day']}", "".join(_row(t, query) for t in found))
            if asked["train"] in map(str, range(len(found))):
                if parts == ["book"] and request.sent:
                    return self._book_train(request)
                return self._passenger(asked, found[int(asked["train"])])
        problem = "<p>Two different towns, please.</p>" if parts else ""
        places = (
            choice("from", "From", list(TOWNS)) + choice("to", "To", list(TOWNS)) + choice("day", "Day", list(DAYS))
        )
        return page("Trains", problem + form("/trains/find", places, "Find trains", send=False) + link("/", "Home"))

    def _passenger(self, asked: dict[str, str], train: Train) -> Response:
        hidden = "".join(f'<input type="hidden" name="{name}" value="{value}">' for name, value in asked.items())
        fields = textbox("name", "Name") + choice("seat", "Seat", list(SEATS)) + checkbox("bicycle", "Bicycle")
        text = f"<p>{asked['from']} to {asked['to']}, {asked['day']}, leaves {clock(train.leaves)}</p>"
        return page("Passenger", text + form("/trains/book", hidden + fields, "Book"))

    def _book_train(self, request: Request) -> Response:
        names = ("from", "to", "day", "train", "name", "seat")
        booked = {name: request.fields.get(name, "").strip() for name in names}
        if not booked["name"]:
            return page("Passenger", f"<p>A name is missing.</p>{link('/trains', 'Begin again')}")
        booked["bicycle"] = "on" if "bicycle" in request.fields else "off"
        self.state.booked.append(booked)
        return page("Booked", f"<p>Your booking is made.</p>{link('/', 'Home')}")

    def _library(self, parts: list[str], request: Request) -> Response:
        if len(parts) == 2 and parts[0] == "book" and parts[1] in map(str, range(len(self.books))):
            return self._shelf(self.books[int(parts[1])], request)
        if len(parts) == 1 and parts[0] in SUBJECTS:
            books = [book for book in self.books if book.subject == parts[0]]
            first = PER_PAGE if request.fields.get("page") == "2" else 0
            lines = "".join(
                f"<p>{link(f'/library/book/{book.number}', book.title)}</p>" for book in books[first : first + PER_PAGE]
            )
            more = "" if first or len(books) <= PER_PAGE else link(f"/library/{parts[0]}?page=2", "More")
            return page(f"Library: {parts[0]}", lines + more)
        return page("Library", "".join(f"<p>{link(f'/library/{subject}', subject)}</p>" for subject in SUBJECTS))

    def _shelf(self, book: Book, request: Request) -> Response:
        if request.sent:
            card, branch = request.fields.get("card", "").strip(), request.fields.get("branch", "")
            if branch not in book.branches or not card.isdecimal():
                return page(
                    book.title, f"<p>That cannot be reserved.</p>{link(f'/library/book/{book.number}', 'Back')}"
                )
            self.state.reserved.append({"book": str(book.number), "branch": branch, "card": card})
            return page("Reserved", f"<p>{book.title} waits for you at {branch}.</p>{link('/', 'Home')}")
        text = f"<p>Published in {book.year}</p><p>Available at: {', '.join(book.branches) or 'no branch'}</p>"
        if not book.branches:
            return page(book.title, text)
        fields = choice("branch", "Branch", list(book.branches)) + textbox("card", "Card number")
        return page(book.title, text + form(f"/library/book/{book.number}", fields, "Reserve"))

    def _account(self, parts: list[str], request: Request) -> Response:
        now = self.state.settings
        allowed = {"language": LANGUAGES, "visible": VISIBLE}
        pages = {"profile": ("city", "phone"), "display": ("language", "visible"), "letters": LETTERS}
        if len(parts) == 1 and parts[0] in pages:
            if request.sent:
                for name in pages[parts[0]]:
                    value = request.fields.get(name, "off" if parts[0] == "letters" else "").strip()[:100]
                    if value and value in allowed.get(name, (value,)):
                        now[name] = value
                return Response(location="/account")
            shown = [
                checkbox(name, name, now[name] == "on")
                if name in LETTERS
                else choice(name, name, list(allowed[name]), now[name])
                if name in allowed
                else textbox(name, name, now[name])
                for name in pages[parts[0]]
            ]
            return page(f"Account: {parts[0]}", form(f"/account/{parts[0]}", "".join(shown), "Save"))
        return page(
            "Account", "".join(f"<p>{link(f'/account/{name}', name)}</p>" for name in pages) + link("/", "Home")
        )

    def _office(self, parts: list[str], request: Request) -> Response:
        if parts and parts[0] in map(str, range(len(self.people))):
            person = self.people[int(parts[0])]
            above = (
                "nobody"
                if person.manager is None
                else link(f"/people/{person.manager}", self.people[person.manager].name)
            )
            text = f"<p>Office: {person.office}</p><p>Room: {person.room}</p><p>Extension: {person.extension}</p>"
            return page(person.name, f"{text}<p>Manager: {above}</p>")
        search = form("/people", textbox("name", "Name"), "Search", send=False)
        wanted = request.fields.get("name", "").casefold().strip()
        found = [person for person in self.people if wanted and wanted in person.name.casefold()][:PER_PAGE]
        lines = "".join(f"<p>{link(f'/people/{person.number}', person.name)}</p>" for person in found)
        return page("People", lines + search + link("/", "Home"))


def _row(train: Train, query: str) -> str:
    times = f"leaves {clock(train.leaves)}, arrives {clock(train.arrives)}"
    text = f"{times}, {train.changes} changes, {train.price // 100}.{train.price % 100:02d}"
    return f"<p>{text} {link(f'/trains/passenger?{query}&train={train.number}', 'Select')}</p>"


def clock(minutes: int) -> str:
    return f"{minutes // 60 % 24:02d}:{minutes % 60:02d}"
