"""How the facts of a multi-hop world are told and asked about: each relation in several phrasings, the plainest first.

In a sentence {s} is the subject and {o} the object; in a noun phrase and a question {s} is whoever is asked about.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Relation:
    subject: str  # kinds of things
    object: str  # a kind of thing, or date, year, number
    sentences: tuple[str, ...]
    nouns: tuple[str, ...]  # what stands for the object inside a longer question
    questions: tuple[str, ...]
    missing: float = 0.0  # the share of subjects that have no such fact


RELATIONS: dict[str, Relation] = {
    "born": Relation(
        "person",
        "date",
        ("{s} was born on {o}.", "The birth of {s} was on {o}.", "{s} came into the world on {o}.", "Born: {o} ({s})."),
        ("the date of birth of {s}",),
        ("When was {s} born?", "What is the date of birth of {s}?", "On what day did {s} come into the world?"),
    ),
    "birthplace": Relation(
        "person",
        "city",
        (
            "{s} was born in {o}.",
            "The birthplace of {s} is {o}.",
            "{o} is where {s} was born.",
            "{s} grew up in {o}, which is also where {s} was born.",
        ),
        ("the birthplace of {s}", "the city where {s} was born", "the city in which {s} came into the world"),
        ("Where was {s} born?", "What is the birthplace of {s}?", "In which city was {s} born?"),
        0.06,
    ),
    "employer": Relation(
        "person",
        "company",
        (
            "{s} works for {o}.",
            "The employer of {s} is {o}.",
            "{o} counts {s} among its staff.",
            "After some years abroad {s} took a post at {o}, and still holds it.",
        ),
        ("the employer of {s}", "the company that {s} works for", "the firm that pays {s}"),
        ("Who is the employer of {s}?", "Which company does {s} work for?", "Where does {s} have a post?"),
        0.15,
    ),
    "spouse": Relation(
        "person",
        "person",
        (
            "{s} is married to {o}.",
            "The spouse of {s} is {o}.",
            "{s} and {o} are married.",
            "{s} shares a home with {o}, to whom {s} is married.",
        ),
        ("the spouse of {s}", "the person married to {s}", "the one whom {s} married"),
        ("Who is the spouse of {s}?", "Who is married to {s}?", "Whom did {s} marry?"),
        0.4,
    ),
    "teacher": Relation(
        "person",
        "person",
        (
            "The teacher of {s} is {o}.",
            "{s} was taught by {o}.",
            "{o} was the one who taught {s}.",
            "{s} learned the trade from {o}, {s}'s teacher.",
        ),
        ("the teacher of {s}", "the person who taught {s}", "the one from whom {s} learned the trade"),
        ("Who is the teacher of {s}?", "Who taught {s}?", "From whom did {s} learn the trade?"),
        0.2,
    ),
    "country": Relation(
        "city",
        "country",
        (
            "{s} is a city in {o}.",
            "The country of {s} is {o}.",
            "{s} lies in {o}.",
            "On the map {s} is found within the borders of {o}.",
        ),
        ("the country of {s}", "the country in which {s} lies", "the country whose borders hold {s}"),
        ("What is the country of {s}?", "In which country does {s} lie?", "Within whose borders is {s} found?"),
    ),
    "population": Relation(
        "city",
        "number",
        (
            "{s} has a population of {o}.",
            "The population of {s} is {o}.",
            "{o} people live in {s}.",
            "At the last census {s} counted {o} inhabitants.",
        ),
        ("the population of {s}",),
        ("What is the population of {s}?", "How many people live in {s}?", "How many inhabitants did {s} count?"),
        0.08,
    ),
    "capital": Relation(
        "country",
        "city",
        (
            "The capital of {s} is {o}.",
            "{o} is the capital of {s}.",
            "{s} is governed from its capital, {o}.",
            "The parliament of {s} meets in {o}, the capital.",
        ),
        ("the capital of {s}", "the city from which {s} is governed", "the city where the parliament of {s} meets"),
        ("What is the capital of {s}?", "From which city is {s} governed?", "Where does the parliament of {s} meet?"),
    ),
    "headquarters": Relation(
        "company",
        "city",
        (
            "The headquarters of {s} is in {o}.",
            "{s} is based in {o}.",
            "{s} has its main office in {o}.",
            "{o} is home to the head office of {s}.",
        ),
        (
            "the headquarters city of {s}",
            "the city where {s} is based",
            "the city that is home to the head office of {s}",
        ),
        ("Where is the headquarters of {s}?", "In which city is {s} based?", "Where is the head office of {s}?"),
        0.06,
    ),
    "founder": Relation(
        "company",
        "person",
        (
            "The founder of {s} is {o}.",
            "{s} was founded by {o}.",
            "{o} started {s}.",
            "{s} owes its existence to {o}, who founded it.",
        ),
        ("the founder of {s}", "the person who founded {s}", "the one to whom {s} owes its existence"),
        ("Who is the founder of {s}?", "Who founded {s}?", "To whom does {s} owe its existence?"),
        0.06,
    ),
    "founded": Relation(
        "company",
        "year",
        (
            "{s} was founded in {o}.",
            "The year of the founding of {s} is {o}.",
            "{s} has been in business since {o}.",
            "{o} was the year in which {s} opened its doors.",
        ),
        ("the founding year of {s}",),
        ("When was {s} founded?", "In which year was {s} founded?", "Since when has {s} been in business?"),
    ),
    "employees": Relation(
        "company",
        "number",
        (
            "{s} has {o} employees.",
            "The number of employees of {s} is {o}.",
            "{o} people earn their living at {s}.",
            "Its payroll shows that {s} has a staff of {o}.",
        ),
        ("the number of employees of {s}",),
        (
            "How many employees does {s} have?",
            "What is the number of employees of {s}?",
            "How large is the staff of {s}?",
        ),
        0.08,
    ),
    "author": Relation(
        "work",
        "person",
        ("The author of {s} is {o}.", "{s} was written by {o}.", "{o} wrote {s}.", "{s} came from the pen of {o}."),
        ("the author of {s}", "the person who wrote {s}", "the one from whose pen {s} came"),
        ("Who is the author of {s}?", "Who wrote {s}?", "From whose pen did {s} come?"),
    ),
    "published": Relation(
        "work",
        "year",
        (
            "{s} was published in {o}.",
            "The year of publication of {s} is {o}.",
            "{s} appeared in {o}.",
            "Readers first held {s} in their hands in {o}.",
        ),
        ("the publication year of {s}",),
        ("When was {s} published?", "In which year did {s} appear?", "In which year did readers first hold {s}?"),
        0.08,
    ),
    "genre": Relation(
        "work",
        "genre",
        (
            "The genre of {s} is {o}.",
            "{s} is of the genre {o}.",
            "Critics count {s} as {o}.",
            "On the shelf {s} stands under {o}.",
        ),
        ("the genre of {s}",),
        ("What is the genre of {s}?", "Of which genre is {s}?", "Under what genre does {s} stand on the shelf?"),
        0.08,
    ),
}

GENRES = ("comedy", "tragedy", "satire", "romance", "travel writing", "history", "fable", "horror")

# What a document says first, and what a document that knows nothing to the point says.
OPENINGS: dict[str, tuple[str, ...]] = {
    "person": (
        "{s} is a person.",
        "{s} is known in several towns.",
        "Much has been said about {s}.",
        "Few knew {s} when young.",
    ),
    "city": (
        "{s} is a city.",
        "{s} has a river and two bridges.",
        "Travellers like {s}.",
        "The old walls of {s} still stand.",
    ),
    "country": (
        "{s} is a country.",
        "{s} has mountains in the north.",
        "The winters of {s} are long.",
        "{s} is proud of its roads.",
    ),
    "company": (
        "{s} is a company.",
        "{s} makes tools and paper.",
        "The goods of {s} are sold far away.",
        "{s} had hard years and good ones.",
    ),
    "work": (
        "{s} is a book.",
        "{s} has been printed many times.",
        "Opinions about {s} differ.",
        "{s} is read in schools.",
    ),
}
IDLE = (
    "The fair of {a} is held every second spring.",
    "A newspaper once compared {a} with {b}.",
    "It rained for nine days, and nobody spoke of {b}.",
    "A letter that mentions {a} was lost and found again.",
    "The bridge was painted green after a vote.",
    "Some say that {b} would have liked it.",
    "The museum keeps a portrait said to show {a}.",
    "No record tells what became of the second clock.",
)
