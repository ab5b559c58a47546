"""Where plans come from: programs of the intermediate language, plain patterns of English, a model with a grammar."""

from __future__ import annotations

import re

from moesaic.errors import UserError
from moesaic.know.answer.writer import Form, Writer
from moesaic.know.language.program import (
    Aggregate,
    Amount,
    Arithmetic,
    Compute,
    Extreme,
    HowMany,
    Is,
    IsThere,
    Joined,
    Literal,
    Name,
    NumberOf,
    Of,
    Program,
    Set,
    What,
    Whose,
)
from moesaic.know.language.values import written
from moesaic.know.solver.steps import Deduce, Math, NotAPlan, Plan, Retrieve, Steps, Term, plan_grammar, read_plan

JOINS = {"and": "both", "or": "either", "but not": "without"}


def plan_of(program: Program) -> Plan:
    """Of a program without comparisons, qualifiers and texts, which a look-up by steps has no form for."""
    steps = Steps()
    if isinstance(program, What):
        return steps.plan(of_set(program.set, steps))
    if isinstance(program, HowMany):
        return steps.plan(steps.add(Math("count", of_set(program.set, steps))))
    if isinstance(program, IsThere):
        inner = program.set
        if isinstance(inner, Joined) and inner.word == "and":
            return steps.plan(steps.add(Deduce("same", of_set(inner.left, steps), of_set(inner.right, steps))))
        return steps.plan(steps.add(Deduce("any", of_set(inner, steps))))
    if isinstance(program, Compute):
        return steps.plan(of_amount(program.amount, steps))
    raise NotAPlan("program", f"{program} has no plan")


def of_set(found: Set, steps: Steps) -> Term:
    if isinstance(found, Name):
        return found.name
    if isinstance(found, Literal):
        return written(found.value)
    if isinstance(found, Of) and found.relation.qualifier is None:
        return steps.add(Retrieve(of_set(found.set, steps), found.relation.name, None))
    if isinstance(found, Whose) and isinstance(found.test, Is) and found.relation.qualifier is None:
        return steps.add(Retrieve(None, found.relation.name, of_set(found.test.set, steps)))
    if isinstance(found, Joined):
        return steps.add(Deduce(JOINS[found.word], of_set(found.left, steps), of_set(found.right, steps)))
    if isinstance(found, Extreme) and found.relation.qualifier is None:
        members = of_set(found.set, steps)
        values = steps.add(Retrieve(members, found.relation.name, None))
        return steps.add(Deduce(found.word, members, values))
    raise NotAPlan("program", f"{found} has no plan")


def of_amount(amount: Amount, steps: Steps) -> Term:
    if isinstance(amount, NumberOf):
        return steps.add(Math("count", of_set(amount.set, steps)))
    if isinstance(amount, Aggregate) and amount.relation.qualifier is None:
        values = steps.add(Retrieve(of_set(amount.set, steps), amount.relation.name, None))
        return steps.add(Math(amount.word, values)) if amount.word in ("sum", "average") else values
    if isinstance(amount, Arithmetic):
        return steps.add(Math(amount.word, of_amount(amount.left, steps), of_amount(amount.right, steps)))
    raise NotAPlan("program", f"{amount} has no plan")


# Verbs that ask for the other end of a relation, and adjectives that compare by one.
VERBS = {
    "founded": "founder", "wrote": "author", "directed": "director", "taught": "teacher", "married": "spouse",
    "composed": "composer", "painted": "painter", "produced": "producer", "invented": "inventor", "owns": "owner",
}  # fmt: skip
COMPARATIVES = {
    "older": ("born", "earliest"), "younger": ("born", "latest"), "larger": ("population", "largest"),
    "bigger": ("population", "largest"), "smaller": ("population", "smallest"), "taller": ("height", "largest"),
    "longer": ("length", "largest"), "shorter": ("length", "smallest"),
}  # fmt: skip
OF = re.compile(r"(?:the|a) (?P<relation>[a-z]+(?: [a-z]+){0,2}?) of (?P<about>.+)")  # "The Clock of Morva" is a name
ITS = re.compile(r"(?P<about>.+?)'s? (?P<relation>[a-z][a-z ]*)")
_AB, _WHICH, _MADE = "(?P<a>.+),? or (?P<b>.+)", r"which(?: \w+)?", "founded|published|released|built"
FORMS: dict[str, str] = {
    rf"(?:who|what|{_WHICH}) is (?P<than>{'|'.join(COMPARATIVES)}),? {_AB}": "than",
    rf"{_WHICH} has more (?P<relation>[a-z ]+), {_AB}": "more",
    rf"{_WHICH} was (?P<relation>{_MADE}) (?P<end>first|last), {_AB}": "first",
    r"(?:do|does|did) (?P<a>.+) and (?P<b>.+) have the same (?P<relation>[a-z ]+)": "same",
    r"(?:is|was) the (?P<relation>[a-z ]+) of (?P<a>.+) the same as that of (?P<b>.+)": "same",
    r"(?:were|was) (?P<a>.+) and (?P<b>.+) born in the same (?:city|place|town)": "birthplace of both",
    rf"how many years after the birth of (?P<b>.+) was (?P<a>.+) (?P<relation>{_MADE})": "birth",
    rf"how many years after (?P<b>.+) was (?P<a>.+) (?P<relation>born|{_MADE})": "years",
    r"where (?:was|were) (?P<about>.+) born": "birthplace",
    rf"when (?:was|were) (?P<about>.+) (?P<relation>born|{_MADE})": "",
    r"how many (?P<relation>[a-z ]+?) (?:does|do|did) (?P<about>.+) have": "",
    rf"who (?P<verb>{'|'.join(VERBS)}) (?P<about>.+)": "verb",
    r"(?:who|what|where|when|which \w+) (?:is|was|are|were) (?P<what>the .+ of .+|.+'s? [a-z ]+)": "phrase",
}
QUESTIONS = [(re.compile(form, re.I), kind) for form, kind in FORMS.items()]  # the first that fits


def plan_by_patterns(question: str) -> Plan | None:
    """Of a question in one of some plain forms."""
    text = question.strip().rstrip("?").strip()
    for words, relation in (("date of birth", "born"), ("place of birth", "birthplace")):
        text = text.replace(words, relation)
    for pattern, kind in QUESTIONS:
        match = pattern.fullmatch(text)
        if match is None:
            continue
        steps = Steps()
        parts = match.groupdict()
        if kind == "phrase":
            output = phrase(parts["what"], steps)
            if isinstance(output, str):
                continue
            return steps.plan(output)
        if "about" in parts:
            relation = VERBS[parts["verb"].lower()] if kind == "verb" else kind or parts["relation"].lower()
            return steps.plan(steps.add(Retrieve(phrase(parts["about"], steps), relation, None)))
        a, b = phrase(parts["a"].rstrip(","), steps), phrase(parts["b"], steps)
        if kind in ("same", "birthplace of both"):
            relation = parts.get("relation") or "birthplace"
            left, right = (steps.add(Retrieve(one, relation, None)) for one in (a, b))
            return steps.plan(steps.add(Deduce("same", left, right)))
        if kind in ("years", "birth"):
            later = parts["relation"].lower()
            left = steps.add(Retrieve(a, later, None))
            right = steps.add(Retrieve(b, "born" if kind == "birth" else later, None))
            return steps.plan(steps.add(Math("minus", left, right)))
        if kind == "than":
            relation, word = COMPARATIVES[parts["than"].lower()]
        else:
            relation = parts["relation"].lower()
            word = "smallest" if parts.get("end", "").lower() == "first" else "largest"
        both = steps.add(Deduce("either", a, b))
        values = steps.add(Retrieve(both, relation, None))
        return steps.plan(steps.add(Deduce(word, both, values)))
    return None


def phrase(text: str, steps: Steps) -> Term:
    """`the teacher of the author of X`, `X's teacher`; anything else is a name."""
    if match := OF.fullmatch(text.strip()):
        return steps.add(Retrieve(phrase(match["about"], steps), match["relation"].lower(), None))
    if match := ITS.fullmatch(text.strip()):
        return steps.add(Retrieve(phrase(match["about"], steps), match["relation"].lower(), None))
    return text.strip()


INSTRUCTION = """Decompose the question into steps that look up one fact each. Forms of steps:
x1 = retrieve("subject", "relation", ?)   x2 = retrieve(?, "relation", "object")   x3 = math(count x1)
x4 = math(x1 minus x2)   x5 = deduce(same x1 x2)   x6 = deduce(both x1 x2)   x7 = deduce(either "a" "b")
x8 = deduce(largest x1 by x2) (smallest, latest, earliest)   output(x8)"""
SHOWN = (
    (
        "Where was the founder of Acme born?",
        'x1 = retrieve("Acme", "founder", ?)\nx2 = retrieve(x1, "birthplace", ?)\noutput(x2)',
    ),
    (
        "Who is older, Ada Lind or Bo Ek?",
        'x1 = deduce(either "Ada Lind" "Bo Ek")\nx2 = retrieve(x1, "born", ?)\n'
        "x3 = deduce(earliest x1 by x2)\noutput(x3)",
    ),
    ("How many books did Bo Ek write?", 'x1 = retrieve(?, "author", "Bo Ek")\nx2 = math(count x1)\noutput(x2)'),
)


def plan_by_writer(question: str, writer: Writer) -> Plan | None:
    shown = [
        message
        for asked, plan in SHOWN
        for message in ({"role": "user", "content": asked}, {"role": "assistant", "content": plan})
    ]
    messages = [{"role": "system", "content": INSTRUCTION}, *shown, {"role": "user", "content": question}]
    (text,) = writer.write([messages], max_tokens=240, form=Form(grammar=plan_grammar()))
    try:
        return read_plan(text)
    except (UserError, ValueError):  # cut off, or from a server that passes over grammars
        return None
