"""A policy learns which query is worth something: the smallest search there is, three queries of which one brings up
the answer. Without the process reward, and without advantages, it learns nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import moesaic
from moesaic.align import advantages
from moesaic.align.align import align
from moesaic.serve.core.engine import Engine
from moesaic.serve.core.request import Sampling
from tests.align.made import ADAMW, recipe_of
from tests.serve.made import talking_model

QUESTION = "Who makes honey?"
TEXTS = {"cat": "A cat sleeps.", "dog": "A dog barks.", "bee": "A bee makes honey."}
DRAWN = 48


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A policy that asks for any of the three, as often, and then always answers."""
    folder = tmp_path_factory.mktemp("start")
    texts = folder / "texts"
    texts.mkdir()
    lines = []
    for query, text in TEXTS.items():
        (texts / f"{query}.txt").write_text(text)
        said = [f"Action: search {query}", "Action: answer bee"]
        turns = [("user", QUESTION), ("assistant", said[0]), ("user", text), ("assistant", said[1])]
        lines.append({"messages": [{"role": role, "content": content} for role, content in turns]})
    (folder / "forms.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    asked = {"messages": [{"role": "user", "content": QUESTION}], "answer": "honey"}
    (folder / "asked.jsonl").write_text(json.dumps(asked) + "\n")
    stage = f'{{name: sft, steps: 30, lr: 0.01, batch_tokens: 512, data: [{{path: "{folder}/forms.jsonl"}}]}}'
    align(recipe_of(folder, stage, more=ADAMW), talking_model(folder / "base"), folder / "sft", quiet=True)
    return folder


def learned(start: Path, out: Path, **process: float) -> Path:
    environment = {
        "name": "retrieval",
        "path": str(start / "texts"),
        "form": "direct",
        "instructions": "",
        "passages": 1,
        "turns": 2,
        "process": process,
    }
    stage = {
        "name": "policy",
        "steps": 6,
        "lr": 0.004,
        "data": [{"path": str(start / "asked.jsonl")}],
        "environment": environment,
        "rewards": [{"name": "environment"}, {"name": "process", "by": "mean"}],
        "prompts": 2,
        "group": 8,
        "max_tokens": 24,
        "evaluate_every": 0,
    }
    out.mkdir()
    align(recipe_of(out, json.dumps(stage), more=ADAMW), start / "sft", out / "policy", quiet=True)
    return out / "policy"


def share(policy: Path) -> float:
    """How often it asks for what brings up the answer."""
    model = moesaic.load(policy, threads=1)
    assert model.tokenizer is not None
    prompt = model.tokenizer.encode(model.tokenizer.chat([{"role": "user", "content": QUESTION}]), special=False)
    engine = Engine(model)
    done = engine.complete([engine.request(prompt, Sampling(24, 1.0, seed=seed)) for seed in range(DRAWN)])
    return sum("search bee" in one.text for one in done) / DRAWN


def test_the_query_that_brings_up_the_answer_is_learned(start: Path, tmp_path: Path) -> None:
    before = share(start / "sft")
    policy = learned(start, tmp_path / "run")
    after = share(policy)
    assert before < 0.6 and after > before + 0.3, (before, after)
    steps = [json.loads(line) for line in (policy / "metrics.jsonl").read_text().splitlines()]
    assert all(step["mismatch_max"] == 0 for step in steps)


def test_without_process_rewards_nothing_is_learned(start: Path, tmp_path: Path) -> None:
    """No answer is ever right here, so the process reward is all that tells queries apart."""
    policy = learned(start, tmp_path / "run", sufficiency=0.0, utility=0.0, novelty=0.0)
    assert share(policy) == pytest.approx(share(start / "sft"), abs=0.1)


def test_without_advantages_nothing_is_learned(start: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same weight for every completion, whatever it was worth."""
    monkeypatch.setitem(advantages.ADVANTAGES, "group_relative", lambda rewards_QG: torch.zeros_like(rewards_QG))
    assert share(learned(start, tmp_path / "run")) == share(start / "sft")
