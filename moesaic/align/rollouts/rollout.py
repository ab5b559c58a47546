"""Rollouts: completions of an engine that holds the policy's weights, with their rewards, as batches to learn from.

Every token comes with the log-probability it was sampled with, the version of the weights it was sampled from, and, if
recorded, the experts it was routed to.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, field
from math import nan
from typing import Any

import torch
from torch import Tensor

from moesaic.align.advantages import normalised_each
from moesaic.align.rewards import Judged, Reward, judge
from moesaic.align.rollouts.engine_work import EngineWork
from moesaic.align.rollouts.follow_ups import with_replies
from moesaic.data.packing import IGNORED, Batch, GroupedBatch
from moesaic.phases import phase
from moesaic.serve.core.engine import Engine
from moesaic.serve.core.request import Completion, Request, completion
from moesaic.worlds.completions import requests_for
from moesaic.worlds.example import Example
from moesaic.worlds.judges import Answer

SHOWN = 70  # characters at the end of a prompt, in a line of the log


@dataclass
class Sample:
    """One completion, as the engine gave it."""

    prompt: list[int]
    tokens: list[int]
    logprobs: list[float]
    versions: list[int]
    text: str
    finish_reason: str
    judged: Judged
    routes: dict[int, Tensor] | None = None
    advantage: float = 0.0
    learn: list[bool] | None = None  # which of the tokens are learned from; None: all
    kept: list[tuple[int, ...]] | None = None  # among which tokens each was drawn, where sampling was truncated
    question: str = ""  # the end of the prompt, as text
    began: list[float] | None = None  # the trainer's own log-probabilities before the first update, where they matter

    def plain(self) -> dict[str, Any]:
        """For a checkpoint, between the updates that are taken from one set of rollouts."""
        return {
            "prompt": self.prompt,
            "tokens": self.tokens,
            "logprobs": self.logprobs,
            "versions": self.versions,
            "text": self.text,
            "finish_reason": self.finish_reason,
            "advantage": self.advantage,
            "reward": self.judged.total,
            "parts": self.judged.parts,
            "problems": list(self.judged.problems),
            "learn": self.learn,
            "kept": self.kept,
            "question": self.question,
            "began": self.began,
            "routes": {str(n): r.tolist() for n, r in self.routes.items()} if self.routes is not None else None,
        }

    @classmethod
    def from_plain(cls, values: Mapping[str, Any]) -> Sample:
        routes = values["routes"]
        return cls(
            values["prompt"],
            values["tokens"],
            values["logprobs"],
            values["versions"],
            values["text"],
            values["finish_reason"],
            Judged(values["reward"], values.get("parts", {}), tuple(values["problems"])),
            {int(n): torch.tensor(r) for n, r in routes.items()} if routes is not None else None,
            values["advantage"],
            values["learn"],
            values.get("kept"),
            values.get("question", ""),
            values.get("began"),
        )

    def line(self) -> str:
        """For the log."""
        question, text = " ".join(self.question.split()), " ".join(self.text.split())
        question = question if len(question) <= SHOWN else f"…{question[-SHOWN:]}"
        return f"{question} {text[:200]} (reward {self.judged.total:g})"

    @property
    def learned(self) -> list[bool]:
        return self.learn if self.learn is not None else [True] * len(self.tokens)


def rewards_of(groups: Sequence[Sequence[Sample]], each: Mapping[str, float] | None) -> Tensor:
    """Of every completion of every group one number; with `each`, the weights by name, every reward normalised first.

    In 64 bits: in 32 the mean of equal rewards is often another number, and the difference counts as spread.
    """
    if each is None:
        return torch.tensor([[sample.judged.total for sample in group] for group in groups], dtype=torch.float64)
    parts = [[[_given(sample.judged.parts[name]) for name in each] for sample in group] for group in groups]
    weights_R = torch.tensor(list(each.values()), dtype=torch.float64)
    return normalised_each(torch.tensor(parts, dtype=torch.float64), weights_R)


def _given(part: float | None) -> float:
    return nan if part is None else part


@dataclass
class Rollouts:
    """Groups of completions, one for each prompt, and what it took to get them."""

    groups: list[list[Sample]]
    work: EngineWork
    problems: list[str] = field(default_factory=list)

    def with_others(self, collect: Callable[[Any], list[Any]], prompts: int) -> Rollouts:
        """What all ranks have sampled for so many prompts, of which each took every so manieth; the same on all."""
        own = [[sample.plain() for sample in group] for group in self.groups]
        said = collect({"groups": own, "work": astuple(self.work), "problems": self.problems})
        groups: list[list[Sample]] = [[] for _ in range(prompts)]
        for rank, one in enumerate(said):
            for number, group in zip(range(rank, prompts, len(said)), one["groups"], strict=True):
                groups[number] = [Sample.from_plain(sample) for sample in group]
        problems = [problem for one in said for problem in one["problems"]]
        return Rollouts(groups, sum((EngineWork(*one["work"]) for one in said), EngineWork()), problems)


def answer_of(example: Example, request: Request, text: str) -> Answer:
    reason = request.finish_reason or "abort"
    known = example.truth, example.task, example.facts, example.messages
    return Answer(example.question, text, request.written, reason, *known)


def sample_of(request: Request, text: str, judged: Judged, question: str = "") -> Sample:
    return sample_from(request.prompt, completion(request, text), judged, question)


def sample_from(prompt: Sequence[int], done: Completion, judged: Judged, question: str = "") -> Sample:
    logprobs = [entry.logprob if entry.drawn is None else entry.drawn for entry in done.logprobs]
    kept = [entry.kept for entry in done.logprobs if entry.kept is not None]
    routes = None if done.routes is None else {layer: routes_TK.cpu() for layer, routes_TK in done.routes.items()}
    given = done.text, done.finish_reason, judged, routes
    sample = Sample(list(prompt), done.tokens, logprobs, done.versions, *given)
    sample.kept, sample.question = kept if len(kept) == len(logprobs) else None, question
    return sample


def generate(
    engine: Engine,
    examples: Sequence[Example],
    group: int,
    sampling: Mapping[str, Any],
    rewards: Sequence[tuple[str, float, Reward]],
    seeds: Sequence[int],
) -> Rollouts:
    """`group` completions of every prompt, with their rewards. The seeds are one per prompt."""
    asked: list[tuple[Example, Request]] = []
    for example, seed in zip(examples, seeds, strict=True):
        asked += [(example, request) for request in requests_for(engine, example, group, sampling, seed)]
    before = EngineWork.of(engine)
    completions = engine.complete([request for _, request in asked])
    answers = [answer_of(*pair, done.text) for pair, done in zip(asked, completions, strict=True)]
    with phase("reward"):
        judged = judge(rewards, with_replies(engine, rewards, answers))
    samples = [
        sample_from(request.prompt, done, verdict, example.question)
        for (example, request), done, verdict in zip(asked, completions, judged, strict=True)
    ]
    work = EngineWork.of(engine) - before
    problems = [problem for verdict in judged for problem in verdict.problems]
    groups = [samples[start : start + group] for start in range(0, len(samples), group)]
    return Rollouts(groups, work, problems)


def as_batch(
    samples: Sequence[Sample], version: int, level: str, position: dict[str, Any], notes: dict[str, float]
) -> Batch:
    """Samples laid end to end, with what the policy objective needs of every token.

    `level` token: every token counts the same (DAPO); sequence: every completion counts the same (GRPO).
    """
    count = sum(sum(sample.learned) for sample in samples)
    targets: list[int] = []
    rows: dict[str, list[float]] = {name: [] for name in ("old", "advantage", "reward", "weight", "fresh", "routed")}
    for sample in samples:
        before, spoken, learned = len(sample.prompt) - 1, len(sample.tokens), sample.learned
        # The row before a token predicts it; the last token's row predicts nothing.
        said = [token if learn else IGNORED for token, learn in zip(sample.tokens, learned, strict=True)]
        targets += [IGNORED] * before + said + [IGNORED]
        share = 1.0 / max(1, count if level == "token" else len(samples) * sum(learned))
        rows["old"] += [0.0] * before + sample.logprobs + [0.0]
        rows["advantage"] += [0.0] * before + [sample.advantage] * spoken + [0.0]
        rows["reward"] += [0.0] * before + [sample.judged.total] * spoken + [0.0]
        rows["weight"] += [0.0] * before + [share * learn for learn in learned] + [0.0]
        rows["fresh"] += [0.0] * before + [float(v == version) for v in sample.versions] + [0.0]
        # The engine never read the last token of a completion, so nobody routed it.
        current = float(all(v == version for v in sample.versions))
        rows["routed"] += [current] * (before + spoken) + [0.0]
        if sample.began is not None:
            rows.setdefault("began", []).extend([0.0] * before + sample.began + [0.0])
    columns = {name: torch.tensor(values) for name, values in rows.items()}
    columns["routed_count"] = columns["routed"].sum().clamp(min=1).expand(len(targets)).clone()
    if samples and all(sample.routes is not None for sample in samples):
        for layer in samples[0].routes or {}:
            pieces = []
            for sample in samples:
                assert sample.routes is not None
                routes_TK = sample.routes[layer]
                pieces += [routes_TK, torch.arange(routes_TK.shape[1])[None]]
            columns[f"routes/{layer}"] = torch.cat(pieces)
    if samples and all(sample.kept is not None for sample in samples):
        columns["kept"] = _kept(samples)
    tokens = [token for sample in samples for token in (*sample.prompt, *sample.tokens)]
    lengths = [len(sample.prompt) + len(sample.tokens) for sample in samples]
    given = torch.tensor(tokens), torch.tensor(targets), lengths, [0] * len(lengths), count, position, columns, notes
    return GroupedBatch(*given, groups=[1] * len(lengths))


def _kept(samples: Sequence[Sample]) -> Tensor:
    """The tokens each row was drawn among, side by side; rows with fewer of them name their first again."""
    rows: list[tuple[int, ...]] = []
    for sample in samples:
        assert sample.kept is not None
        rows += [(0,)] * (len(sample.prompt) - 1) + [tuple(kept) for kept in sample.kept] + [(0,)]
    width = max(map(len, rows))
    return torch.tensor([row + row[:1] * (width - len(row)) for row in rows])
