"""How questions about several things of a multi-hop world are asked: the plainest phrasing first."""

from __future__ import annotations

# Two things compared: by which relation, the word for the extreme in programs, and questions about {a} and {b}.
COMPARISONS: dict[str, tuple[tuple[str, str, tuple[str, ...]], ...]] = {
    "person": (
        ("born", "earliest", ("Who is older, {a} or {b}?", "Of {a} and {b}, who was born first?")),
        ("born", "latest", ("Who is younger, {a} or {b}?", "Of {a} and {b}, who was born later?")),
    ),
    "city": (
        ("population", "largest", ("Which city is larger, {a} or {b}?", "Do more people live in {a} or in {b}?")),
        ("population", "smallest", ("Which city is smaller, {a} or {b}?", "Do fewer people live in {a} or in {b}?")),
    ),
    "company": (
        (
            "employees",
            "largest",
            ("Which company has more employees, {a} or {b}?", "Is the staff larger at {a} or at {b}?"),
        ),
        (
            "founded",
            "smallest",
            ("Which company was founded first, {a} or {b}?", "Of {a} and {b}, which is the older firm?"),
        ),
    ),
    "work": (
        (
            "published",
            "smallest",
            ("Which was published first, {a} or {b}?", "Of {a} and {b}, which appeared earlier?"),
        ),
        ("published", "largest", ("Which was published last, {a} or {b}?", "Of {a} and {b}, which appeared later?")),
    ),
}

# Years between two facts: relation of the later and of the earlier thing, and the question about {a} (later) and {b}.
DIFFERENCES: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    (
        "born",
        "born",
        ("How many years after {b} was {a} born?", "By how many years does the birth of {b} precede that of {a}?"),
    ),
    (
        "founded",
        "founded",
        ("How many years after {b} was {a} founded?", "By how many years is {b} an older firm than {a}?"),
    ),
    (
        "published",
        "published",
        ("How many years after {b} was {a} published?", "By how many years did {b} appear before {a}?"),
    ),
    (
        "published",
        "born",
        (
            "How many years after the birth of {b} was {a} published?",
            "Counting from the birth year of {b}, after how many years did {a} appear?",
        ),
    ),
)

# All that stand in a relation to {s}: how they are counted, and which of them is the extreme of another relation.
GROUPS: dict[str, tuple[tuple[str, ...], tuple[tuple[str, str, tuple[str, ...]], ...]]] = {
    "employer": (
        ("How many people work for {s}?", "What is the number of people who have a post at {s}?"),
        (
            (
                "born",
                "earliest",
                ("Who is the oldest person who works for {s}?", "Of those with a post at {s}, who was born first?"),
            ),
            (
                "born",
                "latest",
                ("Who is the youngest person who works for {s}?", "Of those with a post at {s}, who was born last?"),
            ),
        ),
    ),
    "birthplace": (
        ("How many people were born in {s}?", "What is the number of people whose birthplace is {s}?"),
        (
            (
                "born",
                "earliest",
                ("Who is the oldest person born in {s}?", "Of those who come from {s}, who was born first?"),
            ),
        ),
    ),
    "country": (
        ("How many cities are in {s}?", "What is the number of cities that lie in {s}?"),
        (
            (
                "population",
                "largest",
                (
                    "Which city in {s} has the largest population?",
                    "Of the cities that lie in {s}, which is the largest?",
                ),
            ),
            (
                "population",
                "smallest",
                (
                    "Which city in {s} has the smallest population?",
                    "Of the cities that lie in {s}, which is the smallest?",
                ),
            ),
        ),
    ),
    "headquarters": (
        ("How many companies have their headquarters in {s}?", "What is the number of firms that are based in {s}?"),
        (
            (
                "employees",
                "largest",
                (
                    "Which company based in {s} has the most employees?",
                    "Of the firms based in {s}, which has the largest staff?",
                ),
            ),
        ),
    ),
    "author": (
        ("How many books did {s} write?", "What is the number of books from the pen of {s}?"),
        (
            (
                "published",
                "smallest",
                ("Which book by {s} was published first?", "Of what {s} wrote, what appeared first?"),
            ),
        ),
    ),
    "teacher": (("How many people were taught by {s}?", "What is the number of people whose teacher is {s}?"), ()),
}

# Two relations that together leave one: {a} is the object of the first and {b} that of the second.
INTERSECTIONS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("birthplace", "employer", ("Who was born in {a} and works for {b}?", "Which native of {a} has a post at {b}?")),
    ("teacher", "employer", ("Who was taught by {a} and works for {b}?", "Which pupil of {a} has a post at {b}?")),
    (
        "birthplace",
        "teacher",
        ("Who was born in {a} and taught by {b}?", "Which native of {a} learned the trade from {b}?"),
    ),
    ("author", "genre", ("Which book by {a} is of the genre {b}?", "What did {a} write that stands under {b}?")),
    (
        "headquarters",
        "founder",
        ("Which company based in {a} was founded by {b}?", "Which firm of {b} has its head office in {a}?"),
    ),
)

# Yes or no: whether two things have the same object of a relation.
SAME: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("birthplace", ("Were {a} and {b} born in the same city?", "Do {a} and {b} share a birthplace?")),
    ("employer", ("Do {a} and {b} work for the same company?", "Do {a} and {b} have the same employer?")),
    ("country", ("Are {a} and {b} in the same country?", "Do {a} and {b} lie within the same borders?")),
    ("headquarters", ("Are {a} and {b} based in the same city?", "Do {a} and {b} have head offices in one city?")),
    ("author", ("Were {a} and {b} written by the same person?", "Do {a} and {b} come from one pen?")),
    ("teacher", ("Were {a} and {b} taught by the same person?", "Do {a} and {b} have the same teacher?")),
)
