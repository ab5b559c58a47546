"""What a reward model learns from and how it is asked: pairs of answers, steps that are right or wrong, and scores.

    {"prompt": "2 + 3 =", "chosen": "5", "rejected": "6"}
    {"messages": [...], "steps": [{"text": "First 2 + 3 = 5.\\n", "label": 1}, {"text": "Then 5 + 1 = 7.", "label": 0}]}

A pair is judged at the last token of each answer, a step at the last token of its text (process rewards).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from moesaic.align.conversation import Said
from moesaic.align.examples import BUILTIN
from moesaic.align.preference.pairs import Pair, check_pair, read_pair, read_source
from moesaic.align.sft import pack_said
from moesaic.data.packing import GroupedBatch
from moesaic.data.tasks import Split
from moesaic.errors import UserError
from moesaic.json_lines import json_lines
from moesaic.model.tokenizer import Tokenizer
from moesaic.model.transformer import Model
from moesaic.model.value_head import values_at

NO_LABEL = -1.0


@dataclass(frozen=True)
class Steps:
    """An answer, and how right it is after some of its tokens, from 0 to 1."""

    number: int
    tokens: list[int]
    labels: dict[int, float]


Judgeable = Pair | Steps


def check_judged(line: Mapping[str, Any], place: str) -> object:
    """What can be seen to be wrong with a line without a tokenizer."""
    return check_steps(line, place) if "steps" in line else check_pair(line, place)


def check_steps(line: Mapping[str, Any], place: str) -> tuple[list[Any], list[Any]]:
    """What was asked, and the steps."""
    messages = line.get("messages", line.get("prompt"))
    messages = [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
    steps = line["steps"]
    if not isinstance(messages, list) or not messages or not all(isinstance(m, dict) for m in messages):
        raise UserError(place, "has neither messages nor a prompt", "Say what was asked.")
    form = 'Steps are [{"text": ..., "label": from 0 to 1}, ...].'
    if not isinstance(steps, list) or not steps or not all(isinstance(step, dict) for step in steps):
        raise UserError(place, "has no steps", form)
    for step in steps:
        label = step.get("label")
        if not isinstance(step.get("text"), str) or not step["text"].strip():
            raise UserError(place, "a step has no text", form)
        if not isinstance(label, int | float) or not 0 <= label <= 1:
            raise UserError(place, f"a step's label is {label!r}", form)
    return messages, steps


def read_steps(tokenizer: Tokenizer, line: Mapping[str, Any], place: str, number: int) -> Steps:
    messages, steps = check_steps(line, place)
    try:
        tokens, rows = step_rows(tokenizer, messages, [step["text"] for step in steps], line.get("tools"), place)
    except UserError as error:  # of the chat template, which does not know the line
        raise UserError(place, error.problem, error.remedy) from None
    return Steps(number, tokens, {row: float(step["label"]) for row, step in zip(rows, steps, strict=True)})


def step_rows(
    tokenizer: Tokenizer, messages: Sequence[Any], texts: Sequence[str], tools: Any = None, place: str = "steps"
) -> tuple[list[int], list[int]]:
    """A conversation that ends with an answer made of `texts`: its tokens, and the last one of each text."""
    options = {"tools": list(tools)} if tools else {}
    answer = {"role": "assistant", "content": "".join(texts)}
    before = tokenizer.chat([dict(m) for m in messages], reply=True, **options)
    whole = tokenizer.chat([*(dict(m) for m in messages), answer], reply=False, **options)
    if not whole.startswith(before + answer["content"]):
        raise UserError(place, "the chat template changes the text of an answer", "Strip white space at its ends.")
    encoded = tokenizer.fast.encode(whole, add_special_tokens=False)
    rows, end = [], len(before)
    for text in texts:
        last = end + len(text.rstrip())  # white space after a step is not what says that it is over
        end += len(text)
        rows.append(max(row for row, (begin, stop) in enumerate(encoded.offsets) if begin < last and begin < stop))
    return list(encoded.ids), rows


def read_judged(
    tokenizer: Tokenizer, path: str, split: Split, max_pairs: int, max_length: int, first: int = 0, seed: int = 0
) -> tuple[list[Judgeable], int]:
    """Pairs and answers with judged steps of one source, and how many were too long; a file may hold both kinds."""
    if path.startswith(BUILTIN):
        pairs, left_out = read_source(tokenizer, path, split, max_pairs, max_length, first, seed)
        return list(pairs), left_out
    found: list[Judgeable] = []
    for place, line in json_lines(Path(path)):
        read = read_steps if "steps" in line else read_pair
        found.append(read(tokenizer, line, place, first + len(found)))
    short = [one for one in found if max(map(len, _sequences(one))) <= max_length]
    if not short:
        raise UserError(path, f"nothing is as short as {max_length} tokens", "Raise the stage's max_length.")
    return short, len(found) - len(short)


def _sequences(one: Judgeable) -> list[list[int]]:
    return [side.tokens for side in one.sides] if isinstance(one, Pair) else [one.tokens]


def pack_judged(
    items: Sequence[Judgeable], position: dict[str, Any], notes: dict[str, float] | None = None
) -> GroupedBatch:
    """The columns say at which token what is judged, and how much it counts: every pair the same, every step the same.

    `side`: 1 at the end of a chosen answer, -1 at that of a rejected one. `label`: how right a step is, else NO_LABEL.
    """
    pairs = sum(isinstance(item, Pair) for item in items)
    steps = sum(len(item.labels) for item in items if isinstance(item, Steps))
    said: list[Said] = []
    rows: dict[str, list[float]] = {name: [] for name in ("side", "label", "share", "margin", "pair_weight")}
    for item in items:
        for number, tokens in enumerate(_sequences(item)):
            said.append(Said(tokens, [False] * len(tokens)))
            before = len(tokens) - 1
            if isinstance(item, Pair):
                rows["side"] += [0.0] * before + [1.0 - 2.0 * number]
                rows["label"] += [NO_LABEL] * len(tokens)
                rows["share"] += [0.0] * before + [1.0 / pairs]
                rows["margin"] += [item.margin] * len(tokens)
                rows["pair_weight"] += [item.weight] * len(tokens)
            else:
                rows["side"] += [0.0] * len(tokens)
                rows["label"] += [item.labels.get(row, NO_LABEL) for row in range(len(tokens))]
                rows["share"] += [1.0 / steps if row in item.labels else 0.0 for row in range(len(tokens))]
                rows["margin"] += [0.0] * len(tokens)
                rows["pair_weight"] += [1.0] * len(tokens)
    plain = pack_said(said, position)
    columns = {name: torch.tensor(values) for name, values in rows.items()}
    groups = [len(_sequences(item)) for item in items]
    sizes = plain.lengths, plain.domains, len(items)
    return GroupedBatch(plain.tokens_T, plain.targets_T, *sizes, position, columns, notes or {}, groups=groups)


class JudgedAccuracy:
    """The share of held-out pairs in which the chosen answer gets more, and of held-out steps judged rightly."""

    def __init__(self, items: Sequence[Judgeable]) -> None:
        self.pairs = [item for item in items if isinstance(item, Pair)]
        self.steps = [item for item in items if isinstance(item, Steps)]

    def __call__(self, model: Model) -> dict[str, float]:
        found: dict[str, float] = {}
        if self.steps:
            rows = [list(item.labels) for item in self.steps]
            values = torch.cat(values_at(model, [item.tokens for item in self.steps], rows))
            labels = torch.tensor([label for item in self.steps for label in item.labels.values()])
            found["step_accuracy"] = found["accuracy"] = float(((values > 0) == (labels > 0.5)).float().mean())
        if self.pairs:
            ends = [tokens for pair in self.pairs for tokens in _sequences(pair)]
            values_P2 = torch.cat(values_at(model, ends, [[len(one) - 1] for one in ends])).reshape(-1, 2)
            lead_P = values_P2[:, 0] - values_P2[:, 1]
            found |= {"accuracy": float((lead_P > 0).float().mean()), "held_out_margin": float(lead_P.mean())}
        return found


def weighed(items: Sequence[Judgeable], weights: Mapping[int, float]) -> list[Judgeable]:
    """With other weights, by number; what has none is left out."""
    return [
        replace(item, weight=weights[item.number]) if isinstance(item, Pair) else item
        for item in items
        if not isinstance(item, Pair) or item.number in weights
    ]
