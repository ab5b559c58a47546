"""Exact match and F1 of answers to multi-hop questions: from memory, from passages, and with follow-up questions.

    python bench/know_answer.py --data DATA/hotpotqa --data DATA/musique --model out/smollm2 --questions 40
    python bench/know_answer.py --data DATA/hotpotqa --url http://127.0.0.1:8000

Answers are a few words, compared as SQuAD's script does (articles, case and punctuation apart). Given are the passages
that hold the answer, which bounds what retrieval can give; 95 % intervals by bootstrap over questions. With --cited,
answers with citations too, written freely and as quotes: how many are supported, and how many quote the right answer.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import string
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import moesaic
from bench.measure import machine
from moesaic.know.answer.answering import Answerer, short_text
from moesaic.know.answer.follow_up import FollowUp
from moesaic.know.answer.prompts import CLOSED, SHORT_FORM, conversation
from moesaic.know.answer.retrieval import ByMethod
from moesaic.know.answer.writer import Writer
from moesaic.know.answer.writers import EngineWriter, ServerWriter
from moesaic.know.chunk import Chunk, Hit
from moesaic.know.knowledge_base import KnowledgeBase


@dataclass(frozen=True)
class Question:
    text: str
    answers: tuple[str, ...]
    given: tuple[tuple[str, str], ...]  # title and text of the passages it rests on


def read(folder: Path) -> tuple[list[Question], list[tuple[str, str]]]:
    """Questions and corpus of HotpotQA or MuSiQue, in their published forms."""
    questions = []
    corpus: dict[str, tuple[str, str]] = {}
    for record in json.loads((folder / "qa_train.json").read_text(encoding="utf-8")):
        if "context" in record:
            passages = [(title, "".join(said).strip()) for title, said in record["context"]]
            needed = {title for title, _ in record["supporting_facts"]}
            given = tuple(passage for passage in passages if passage[0] in needed)
        else:
            passages = [(one["title"], one["paragraph_text"]) for one in record["paragraphs"]]
            places = {step["paragraph_support_idx"] for step in record["question_decomposition"]}
            given = tuple(passages[place] for place in sorted(places) if place is not None)
        answers = (record["answer"], *record.get("answer_aliases", ()))
        questions.append(Question(record["question"], answers, given))
        corpus |= {f"{title}\n{text}": (title, text) for title, text in passages}
    return questions, list(corpus.values())


def normal(text: str) -> str:
    text = "".join(c for c in text.lower() if c not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())


def f1(said: str, truth: str) -> float:
    ours, theirs = normal(said).split(), normal(truth).split()
    common = sum((Counter(ours) & Counter(theirs)).values())
    return 2 * common / (len(ours) + len(theirs)) if common else float(ours == theirs)


def score(said: str, answers: Sequence[str]) -> tuple[float, float]:
    return float(any(normal(said) == normal(one) for one in answers)), max(f1(said, one) for one in answers)


def interval(values: Sequence[float], seed: int = 0) -> tuple[float, float, float]:
    rng = random.Random(seed)
    means = sorted(sum(rng.choices(values, k=len(values))) / len(values) for _ in range(1000))
    return sum(values) / len(values), means[25], means[975]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, action="append", required=True)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--url")
    parser.add_argument("--name")
    parser.add_argument("--questions", type=int, default=100)
    parser.add_argument("--passages", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--method", default="auto")
    parser.add_argument("--cited", type=int, default=0, help="questions to answer with citations as well")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    if (asked.model is None) == (asked.url is None):
        parser.error("name one of --model and --url")
    writer = ServerWriter(asked.url, asked.name) if asked.url else EngineWriter(moesaic.load(asked.model))
    told = {}
    for folder in asked.data:
        questions, corpus = read(folder)
        with KnowledgeBase.of_texts(corpus) as base:
            told[folder.name] = measure(asked, folder.name, writer, questions[: asked.questions], base)
        if asked.json:
            asked.json.write_text(
                json.dumps({"bench": "know_answer", "machine": machine(), "data": told}, indent=1) + "\n"
            )


def measure(
    asked: argparse.Namespace, name: str, writer: Writer, questions: list[Question], base: KnowledgeBase
) -> dict[str, object]:
    answerer = Answerer(ByMethod(base, asked.method), writer, passages=asked.passages)
    texts = [question.text for question in questions]
    ways: dict[str, Callable[[], list[str]]] = {
        "closed book": lambda: closed(writer, texts),
        f"top {asked.passages} passages": lambda: answerer.short(texts),
        f"with follow-up, {asked.rounds} round(s)": lambda: FollowUp(answerer, asked.rounds).short(texts),
        "given the right passages": lambda: answerer.short(texts, [hits_of(question) for question in questions]),
    }
    rows: dict[str, object] = {}
    for way, run in ways.items():
        began = time.process_time()
        scores = [score(said, question.answers) for said, question in zip(run(), questions, strict=True)]
        seconds = time.process_time() - began
        exact, close = interval([s[0] for s in scores]), interval([s[1] for s in scores])
        rows[way] = {"exact": exact, "f1": close, "cpu_seconds": seconds, "count": len(scores)}
        print(
            f"{name:10} {way:28} exact {exact[0]:.3f} [{exact[1]:.3f}, {exact[2]:.3f}]"
            f"  F1 {close[0]:.3f} [{close[1]:.3f}, {close[2]:.3f}]  {seconds:.0f} s of processor time",
            flush=True,
        )
    if asked.cited:
        rows |= {way: cited(name, way, answerer, questions[: asked.cited]) for way in ("written", "quoted")}
    return rows


def cited(name: str, way: str, answerer: Answerer, questions: list[Question]) -> dict[str, int]:
    answers = [replace(answerer, quote=way == "quoted").answer(question.text) for question in questions]
    kept = [(answer, question) for answer, question in zip(answers, questions, strict=True) if not answer.abstained]
    with_answer = sum(
        any(normal(one) in normal(citation.quote) for one in question.answers for citation in answer.citations)
        for answer, question in kept
    )
    print(
        f"{name:10} cited, {way}: {len(kept)} of {len(answers)} supported (the others abstain),"
        f" {with_answer} with the right answer in a quote",
        flush=True,
    )
    return {"supported": len(kept), "with_answer": with_answer, "count": len(answers)}


def closed(writer: Writer, questions: Sequence[str]) -> list[str]:
    asked = [conversation(CLOSED, question) for question in questions]
    return [short_text(text) for text in writer.write(asked, max_tokens=40, form=SHORT_FORM)]


def hits_of(question: Question) -> list[Hit]:
    return [
        Hit(Chunk(f"given {n}", title, title, title, text, 0, len(text)), n, 1.0)
        for n, (title, text) in enumerate(question.given)
    ]


if __name__ == "__main__":
    main()
