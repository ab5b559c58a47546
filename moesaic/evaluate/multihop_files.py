"""Multi-hop questions from files in their published forms: HotpotQA and 2WikiMultihopQA (a JSON array with `context`
and `supporting_facts`), MuSiQue (JSON lines or an array, with `paragraphs`), MetaQA (lines of a question with its
[entity], a tab, and answers with | between them; `kb.txt` with lines subject|relation|object lies beside it or above).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moesaic.errors import UserError

Passage = tuple[str, str]  # title and text
FORMS = "HotpotQA's, 2WikiMultihopQA's, MuSiQue's or MetaQA's"
REMEDY = f"Name a file in {FORMS} published form."


@dataclass(frozen=True)
class Item:
    question: str
    answers: tuple[str, ...]  # each is right by itself
    gold: tuple[Passage, ...]  # that the answer is in
    kind: str = ""
    program: str | None = None  # in the intermediate language, where it is known
    asked: str = ""  # the question as its form marks it


@dataclass(frozen=True)
class Items:
    form: str
    items: tuple[Item, ...]
    passages: tuple[Passage, ...]  # all that can be searched
    triples: tuple[tuple[str, str, str], ...] = ()


def read_items(file: Path) -> Items:
    try:
        text = file.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(file, f"cannot be read ({error})", REMEDY) from None
    if not text.strip():
        raise UserError(file, "is empty", REMEDY)
    return read_json(file, text) if text.lstrip()[0] in "[{" and not metaqa_line(text) else read_metaqa(file, text)


def metaqa_line(text: str) -> bool:
    """A question may begin with its [entity]; only JSON goes on as JSON does."""
    first = text.lstrip().split("\n", 1)[0]
    return "\t" in first and not first.lstrip("[ ").startswith("{")


def entries(file: Path, text: str) -> Iterator[tuple[str, Any]]:
    """The objects of an array or of lines, each with its place."""
    decoder, at = json.JSONDecoder(), len(text) - len(text.lstrip())
    in_array = text[at] == "["
    at += in_array
    while True:
        at += len(re.compile(r"[\s,]*" if in_array else r"\s*").match(text, at)[0])  # type: ignore[index]  # always matches
        line = text.count("\n", 0, at) + 1
        if at >= len(text) or (in_array and text[at] == "]"):
            if in_array and at >= len(text):
                raise UserError(f"{file}:{line}", "ends inside of the array", "Is it whole?")
            return
        try:
            found, at = decoder.raw_decode(text, at)
        except ValueError as error:
            place = getattr(error, "lineno", line)
            raise UserError(f"{file}:{place}", f"is no JSON ({getattr(error, 'msg', error)})", REMEDY) from None
        yield f"{file}:{line}", found


def read_json(file: Path, text: str) -> Items:
    items: list[Item] = []
    passages: dict[Passage, None] = {}
    form = ""
    for place, entry in entries(file, text):
        if not isinstance(entry, dict) or not isinstance(entry.get("question"), str):
            raise UserError(place, "is no object with a question", REMEDY)
        musique = "paragraphs" in entry
        form = "musique" if musique else "2wiki" if "evidences" in entry else "hotpotqa"
        try:
            item, own = of_musique(entry) if musique else of_hotpotqa(entry)
        except (KeyError, TypeError, ValueError, IndexError) as error:
            problem = f"lacks {error}" if isinstance(error, KeyError) else f"is not of that form ({error})"
            raise UserError(place, f"is not a question as {form} has it: {problem}", REMEDY) from None
        items.append(item)
        passages.update(dict.fromkeys(own))
    if not items:
        raise UserError(file, "holds no questions", REMEDY)
    return Items(form, tuple(items), tuple(passages))


def of_hotpotqa(entry: dict[str, Any]) -> tuple[Item, list[Passage]]:
    context = [(str(title), "".join(spaced(sentences))) for title, sentences in entry["context"]]
    wanted = {str(fact[0]) for fact in entry["supporting_facts"]}
    gold = tuple(passage for passage in context if passage[0] in wanted)
    return Item(entry["question"], (text_of(entry["answer"]),), gold, str(entry.get("type", ""))), context


def spaced(sentences: list[str]) -> Iterator[str]:
    """HotpotQA's sentences bring their spaces along, 2Wiki's do not."""
    for number, sentence in enumerate(sentences):
        yield sentence if not number or sentence[:1].isspace() else f" {sentence}"


def of_musique(entry: dict[str, Any]) -> tuple[Item, list[Passage]]:
    told = [(str(p["title"]), str(p["paragraph_text"]), bool(p.get("is_supporting"))) for p in entry["paragraphs"]]
    gold = tuple((title, text) for title, text, supporting in told if supporting)
    answers = (text_of(entry["answer"]), *map(str, entry.get("answer_aliases") or ()))
    if entry.get("answerable") is False:  # of MuSiQue-Full: the answer stands in none of its paragraphs
        answers = ("unknown", "unanswerable")
    kind = str(entry.get("id", "")).split("__")[0]
    return Item(entry["question"], answers, gold, kind), [(title, text) for title, text, _ in told]


def text_of(answer: Any) -> str:
    if not isinstance(answer, str) or not answer.strip():
        raise ValueError(f"its answer is {answer!r}")
    return answer


def read_metaqa(file: Path, text: str) -> Items:
    base = next((place for folder in list(file.resolve().parents)[:3] if (place := folder / "kb.txt").is_file()), None)
    if base is None:
        raise UserError(file, "has no kb.txt beside it or above it", f"{REMEDY} MetaQA's graph is its kb.txt.")
    triples = list(read_kb(base))
    about: dict[str, list[str]] = {}
    for subject, relation, value in triples:
        about.setdefault(subject, []).append(f"{subject} {relation.replace('_', ' ')} {value}.")
    passages = {subject: (subject, " ".join(sentences)) for subject, sentences in about.items()}
    items = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        question, tab, answers = line.partition("\t")
        entity = re.search(r"\[([^\]]+)\]", question)
        if not tab or entity is None or not answers.strip():
            problem = "is not a question with its [entity], a tab, and answers with | between them"
            raise UserError(f"{file}:{number}", problem, REMEDY)
        plain = question.replace("[", "").replace("]", "").strip()
        gold = (passages[entity[1]],) if entity[1] in passages else ()
        items.append(Item(plain, tuple(answers.strip().split("|")), gold, asked=question.strip()))
    return Items("metaqa", tuple(items), tuple(passages.values()), tuple(triples))


def read_kb(file: Path) -> Iterator[tuple[str, str, str]]:
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
        parts = line.split("|")
        if len(parts) == 3 and all(part.strip() for part in parts):
            yield parts[0].strip(), parts[1].strip(), parts[2].strip()
        elif line.strip():
            raise UserError(f"{file}:{number}", "is not subject|relation|object", "Is it MetaQA's kb.txt?")
