"""Tiny policies that act in worlds, made from nothing by SFT on demonstrations: what the benches of agents start from.

A demonstrator is a player of tests/worlds/solvers.py, which knows no more than it is shown. A careless one plays on the
same knowledge, and at every turn has a habit with some probability: to answer or finish before it has looked (`sql`),
to play its lowest card (`cards`).
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from bench.align_tiny import timed
from moesaic.align.align import align
from moesaic.data.tokenizer_training import PIECES, save_tokenizer, train_tokenizer
from moesaic.methods import Method, build
from moesaic.recipe import load_recipe
from moesaic.serve.parsers import Message
from moesaic.train.pretrain import pretrain
from moesaic.worlds.environments import Environment
from moesaic.worlds.text_actions import World, WorldExamples
from tests.worlds.matching import matched
from tests.worlds.solvers import SOLVERS

Messages = list[dict[str, Any]]


def world_of(name: str, **options: Any) -> World:
    world = build(Method(name, options), Environment, name)
    assert isinstance(world, World)
    return world


def demonstrations(name: str, count: int, seed: int, careless: float, **options: Any) -> Iterator[dict[str, Any]]:
    """Conversations, each with the reward that it ended with."""
    world, draw = world_of(name, **options), random.Random(f"demonstrations {name} {seed}")
    examples = WorldExamples(world, 1_000 + seed)  # not the tasks that stages of the same seed are given
    for number in range(count):
        episode = world.begin(examples[number])
        messages: Messages = list(episode.messages)
        playing = SOLVERS[name](str(messages[0]["content"]))
        action, reward = next(playing), 0.0
        for _ in range(world.turns):
            if draw.random() < careless:
                action = habit(name, str(messages[0]["content"]), str(messages[-1]["content"]), draw)
            step = episode.step(Message(text := f"Action: {action}"))
            messages.append({"role": "assistant", "content": text})
            reward += step.reward
            if step.done:
                break
            messages += step.messages
            action = playing.send(str(step.messages[0]["content"]))
        episode.close()
        yield {"messages": messages[: -1 if messages[-1]["role"] == "user" else None], "reward": reward}


def habit(name: str, opening: str, seen: str, draw: random.Random) -> str:
    if name == "cards":
        (hand,) = matched(r"Your hand: ([\d, ]+)\.", seen.splitlines()[-1])
        return f"play {min(map(int, hand.split(',')))}"
    assert name == "sql"
    return f"answer {draw.randrange(10)}" if "Question:" in opening else "finish"


BASE = """
model: {{family: qwen3, vocab: {vocab}, hidden: {hidden}, layers: 3, heads: 4, kv_heads: 4, head_size: 32,
  dense_hidden: {dense}, dense_layers: 3, shared_experts: 0, context: 1024, tied: true}}
data: {{tokenizer: "{tokenizer}", sources: [{{name: worlds, path: "{text}"}}], sequence_length: 128}}
train: {{steps: 2, batch_tokens: 1024, warmup_steps: 1, save_every: 2, seed: {seed}}}
optimizer: {{name: muon, lr: 0.001, weight_decay: 0.0}}
"""


def empty_model(
    texts: Iterable[str], folder: Path, seed: int, vocabulary: int = 1200, hidden: int = 64, pieces: str = PIECES
) -> Path:
    """A model that has learned nothing yet, and a tokenizer that knows the words; made once."""
    if (folder / "base" / "config.json").exists():
        return folder / "base"
    folder.mkdir(parents=True, exist_ok=True)
    lines = list(texts)
    text = folder / "text.jsonl"
    write(text, ({"text": line} for line in lines))
    tokenizer = train_tokenizer(lines, vocabulary, pieces)
    (folder / "tokenizer").mkdir(exist_ok=True)
    save_tokenizer(tokenizer, folder / "tokenizer")
    sizes = {"vocab": tokenizer.fast.get_vocab_size(), "hidden": hidden, "dense": 3 * hidden}
    (folder / "base.yaml").write_text(BASE.format(tokenizer=folder / "tokenizer", text=text, seed=seed, **sizes))
    pretrain(load_recipe(folder / "base.yaml"), folder / "base", quiet=True)
    return folder / "base"


def trained(
    stages: list[dict[str, Any]], model: Path, out: Path, lr: float, optimizer: str = "muon", decay: float = 0.3
) -> float:
    """Runs stages, or goes on with them; the seconds of computing."""
    out.parent.mkdir(parents=True, exist_ok=True)
    whole = {
        "align": {"stages": [{"evaluate_every": 0} | stage for stage in stages]},
        "optimizer": {"name": optimizer, "lr": lr, "weight_decay": 0.0},
        "schedule": {"name": "wsd", "decay": decay},
        "train": {"warmup_steps": 10},
    }
    file = out.with_suffix(".recipe.json")
    file.write_text(json.dumps(whole))
    return timed(out, lambda: align(load_recipe(file), model, out, quiet=True))


def text_of(lines: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    for line in lines:
        yield "\n".join(str(message["content"]) for message in line["messages"])


def write(file: Path, lines: Iterable[Mapping[str, Any]]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
