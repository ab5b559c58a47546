"""What texts mean to the solver: values in the forms people write them in, and relations in other words."""

from __future__ import annotations

import datetime
import re

from moesaic.know.language.values import Value, typed

MONTHS = (
    "January", "February", "March", "April", "May", "June", "July", "August", "September", "October", "November",
    "December",
)  # fmt: skip
_MONTH = "|".join(MONTHS)
DATES = (
    re.compile(rf"(?P<day>\d{{1,2}}) (?P<month>{_MONTH}),? (?P<year>\d{{4}})", re.I),
    re.compile(rf"(?P<month>{_MONTH}) (?P<day>\d{{1,2}}),? (?P<year>\d{{4}})", re.I),
)
GROUPED = re.compile(r"\d{1,3}(,\d{3})+(\.\d+)?")
# Words that say nothing of which relation is meant.
_EMPTY = "the a an of in at on for to by is was are were as with its his her their"
EMPTY = frozenset(_EMPTY.split())


def understood(text: str) -> Value:
    """`14 March 1957` is a date and `12,400` a number; else what `typed` makes of it."""
    text = text.strip()
    for form in DATES:
        if match := form.fullmatch(text):
            months = [month.lower() for month in MONTHS]
            try:
                return datetime.date(int(match["year"]), months.index(match["month"].lower()) + 1, int(match["day"]))
            except ValueError:
                return text
    return typed(text.replace(",", "")) if GROUPED.fullmatch(text) else typed(text)


def same_relation(asked: str, known: str) -> bool:
    """The same words, but for endings and those that say nothing."""
    return bool(words(asked)) and words(asked) == words(known)


def words(relation: str) -> frozenset[str]:
    found = [word for word in re.findall(r"\w+", relation.lower().replace("_", " ")) if word not in EMPTY]
    return frozenset(re.sub(r"(ing|ed|es|s)$", "", word) if len(word) > 4 else word for word in found)
