"""A tiny policy that can search, and searches badly: made from nothing. What bench/know_rl.py starts from.

A demonstrator knows which documents an answer rests on. From its right ways the policy learns to read, to copy names
and to write each kind of action; then, from its bad ones, habits: to stop a hop short and answer what is only on the
way, to ask again, to ask for whoever was named last, to answer what was asked about. Names are new in every world, and
those that are asked about later have never been seen: what is learned is to copy.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from moesaic.align.align import align
from moesaic.data.tokenizer_training import PIECES, save_tokenizer, train_tokenizer
from moesaic.recipe import load_recipe
from moesaic.serve.parsers import Message
from moesaic.train.pretrain import pretrain
from moesaic.worlds.environments.multihop import Multihop
from moesaic.worlds.search_forms import FORMS, Action, Final, Query
from moesaic.worlds.searching import Searching
from moesaic.worlds.text_actions import WorldExamples

# Bad habits, and how often a demonstrator follows them at a state where it can.
SHORT, STRAY, AGAIN, GUESS = 0.4, 0.2, 0.1, 0.2
# Names are read by their syllables, all of which every split has; what questions and actions begin with is whole.
SYLLABLES = rf" ?(?:Action|Who|What|Where)\b| ?\p{{Lu}}[^aeiou\W]*[aeiou]+|{PIECES}"


def demonstrations(world: Multihop, count: int, seed: int, right: float) -> Iterator[dict[str, Any]]:
    """Conversations; `right` is the share of them without a mistake."""
    examples = WorldExamples(world, 1_000 + seed)  # not the worlds that stages of the same seed sample
    draw = random.Random(f"demonstrations {seed}")
    for number in range(count):
        episode = world.begin(examples[number])
        assert isinstance(episode, Searching)
        messages, careful = list(episode.messages), draw.random() < right
        for _ in range(world.turns):
            action = next_action(episode, messages, draw, careful)
            text = FORMS[world.form].write(action, ("...",) * len(FORMS[world.form].sections))
            step = episode.step(Message(text))
            messages += [{"role": "assistant", "content": text}]
            if step.done:
                break
            messages += step.messages
        while messages[-1]["role"] != "assistant":
            messages.pop()
        yield {"messages": messages}


def next_action(episode: Searching, messages: list[dict[str, Any]], draw: random.Random, careful: bool) -> Action:
    """The right one, or what a bad habit says."""
    seen = names_in("\n".join(str(message["content"]) for message in messages if message["role"] != "assistant"))
    asked = [searched.query for searched in episode.history]
    missing = [title for title in episode.asked.supporting if title not in asked]
    last = episode.turn + 1 == episode.rules.turns
    if not careful:
        if missing and len(missing) < len(episode.asked.supporting) and draw.random() < SHORT:
            return Final(missing[0])
        chance = draw.random()
        if chance < GUESS:
            return Final(seen[0])
        if chance < GUESS + STRAY and not last:
            return Query(seen[-1])
        if chance < GUESS + STRAY + AGAIN and asked and not last:
            return Query(asked[-1])
    if missing and not last:
        return Query(missing[0])
    return Final(episode.asked.answers[0] if not missing else seen[-1])


def names_in(text: str) -> list[str]:
    """In the order in which they are named first."""
    said = dict.fromkeys(re.findall(r"\b[A-Z][a-z]+(?: [A-Z][a-z]+)*\b", text))
    return [name for name in said if name not in ("Who", "What", "Where", "Which", "When", "How", "The", "This")]


BASE = """
model: {{family: qwen3, vocab: {vocab}, hidden: 64, layers: 3, heads: 4, kv_heads: 4, head_size: 32, dense_hidden: 192,
  dense_layers: 3, shared_experts: 0, context: 256, tied: true}}
data: {{tokenizer: "{tokenizer}", sources: [{{name: worlds, path: "{text}"}}], sequence_length: 128}}
train: {{steps: 2, batch_tokens: 1024, warmup_steps: 1, save_every: 2, seed: {seed}}}
optimizer: {{name: muon, lr: 0.001, weight_decay: 0.0}}
"""
SFT = """
align:
  stages: [{{name: sft, steps: {steps}, lr: {lr}, data: {data}, batch_tokens: 2048, evaluate_every: 0, seed: {seed}}}]
optimizer: {{name: {optimizer}, lr: {lr}, weight_decay: 0.0}}
schedule: {schedule}
train: {{warmup_steps: 30}}
"""
LATE, FADING = ("{name: wsd, decay: 0.3}", "{name: wsd, decay: 0.9}")  # how the learning rate falls


def tiny_policy(world: Multihop, folder: Path, seed: int, steps: int) -> Path:
    """A policy that has learned how from right demonstrations and habits from bad ones. A run that was stopped goes
    on."""
    files = _demonstrations(world, folder, seed)
    texts = (json.loads(line)["text"] for line in files["text"].read_text().splitlines())
    tokenizer = train_tokenizer(texts, 1024, SYLLABLES)
    (folder / "tokenizer").mkdir(exist_ok=True)
    save_tokenizer(tokenizer, folder / "tokenizer")
    base = {"tokenizer": folder / "tokenizer", "vocab": tokenizer.fast.get_vocab_size(), "text": files["text"]}
    (folder / "base.yaml").write_text(BASE.format(seed=seed, **base))
    pretrain(load_recipe(folder / "base.yaml"), folder / "base", quiet=True)
    rate = {"optimizer": "muon", "seed": seed}
    right, bad = (json.dumps([{"path": str(files[name])}]) for name in ("right", "bad"))
    (folder / "right.yaml").write_text(SFT.format(steps=steps, lr=0.01, data=right, schedule=LATE, **rate))
    few = max(2, steps // 5)  # habits are learned sooner than reading
    (folder / "bad.yaml").write_text(SFT.format(steps=few, lr=0.004, data=bad, schedule=FADING, **rate))
    align(load_recipe(folder / "right.yaml"), folder / "base", folder / "right", quiet=True)
    align(load_recipe(folder / "bad.yaml"), folder / "right", folder / "sft", quiet=True)
    return folder / "sft"


def told_policy(world: Multihop, folder: Path, seed: int, model: Path, steps: int = 40) -> Path:
    """A model that speaks already, shown how this is done, rightly and wrongly."""
    files = _demonstrations(world, folder, seed)
    rate = {"lr": 0.00002, "optimizer": "adamw", "seed": seed}
    data = json.dumps([{"path": str(files["right"])}, {"path": str(files["bad"])}])
    (folder / "mixed.yaml").write_text(SFT.format(steps=steps, data=data, schedule=FADING, **rate))
    align(load_recipe(folder / "mixed.yaml"), model, folder / "sft", quiet=True)
    return folder / "sft"


def _demonstrations(world: Multihop, folder: Path, seed: int) -> dict[str, Path]:
    folder.mkdir(parents=True, exist_ok=True)
    files = {"text": folder / "worlds.jsonl", "right": folder / "right.jsonl", "bad": folder / "bad.jsonl"}
    if not files["bad"].exists():
        shown = [
            {"text": "\n".join(str(message["content"]) for message in line["messages"])}
            for line in demonstrations(world, 2_000, seed + 7, 1.0)
        ]
        _write(files["text"], shown)
        _write(files["right"], demonstrations(world, 9_000, seed, 1.0))
        _write(files["bad"], demonstrations(world, 3_000, seed + 3, 0.0))
    return files


def _write(file: Path, lines: Iterable[dict[str, Any]]) -> None:
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
