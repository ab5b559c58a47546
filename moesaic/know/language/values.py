"""What stands in a graph: names of things, numbers and dates. The text of a fact's object says which it is.

A number is written one way only, so that two values are equal where they are written alike.
"""

from __future__ import annotations

import datetime
import re
from decimal import Decimal

Number = int | Decimal
Value = str | int | Decimal | datetime.date  # a str is the name of a thing

# As many digits as RDF stores compute with; longer ones are identifiers, not numbers.
NUMBER = re.compile(r"-?(?:0|[1-9][0-9]{0,14})(?:\.[0-9]{1,9})?")
DATE = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}")


def typed(text: str) -> Value:
    """`1957-03-14` is a date, `12` and `2.50` are numbers; all else is a name, and what no calendar has too."""
    if NUMBER.fullmatch(text):
        return number(Decimal(text))
    if DATE.fullmatch(text):
        try:
            return datetime.date.fromisoformat(text)
        except ValueError:
            return text
    return text


def number(value: Decimal) -> Number:
    """The one form of a number: whole ones are int."""
    return int(value) if value == value.to_integral_value() else value.normalize()


def written(value: Value) -> str:
    if isinstance(value, datetime.date):
        return value.isoformat()
    return format(value, "f") if isinstance(value, Decimal) else str(value)


def is_number(value: Value) -> bool:
    return isinstance(value, int | Decimal)


def is_date(value: Value) -> bool:
    return isinstance(value, datetime.date)


def order(value: Value) -> tuple[int, Number | datetime.date | str]:
    """What mixed values are sorted by, to show them."""
    return (0 if is_number(value) else 1 if is_date(value) else 2, value)
