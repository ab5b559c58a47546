"""Rejection sampling (ChatGLM-Math): many completions of every prompt, scored; the good ones are fine-tuned on, and the
best against the worst are preference pairs.

Files in the run's `rejection` folder, written once, each whole or not at all:

    samples.jsonl   every completion with its score
    kept.jsonl      prompts with their best completions, as an SFT stage reads them
    pairs.jsonl     prompts with a good and a bad completion, as a preference stage reads them
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Any, Literal

from moesaic import atomic
from moesaic.align.examples import Mixture
from moesaic.align.rewards import Reward
from moesaic.align.rollouts.constraint_pairs import constraint_pairs
from moesaic.align.rollouts.diverse import diverse
from moesaic.align.rollouts.rollout import Sample, generate
from moesaic.errors import UserError
from moesaic.json_files import read_json
from moesaic.serve.core.engine import Engine
from moesaic.worlds.completions import seed_of
from moesaic.worlds.example import Example

AT_ONCE = 16  # prompts


@dataclass(frozen=True)
class Rule:
    """Which completions are good, and which pairs are made of them."""

    right: float  # a good completion's score is at least this
    keep: int  # good completions of a prompt that are trained on, the best first
    margin: float  # a pair's scores are at least so far apart
    diverse: float = 1.0  # share of the good completions that is kept, those that are least alike
    by: Literal["score", "constraint"] = "score"  # the best against the worst, or a pair for each constraint


def collect(
    engine: Engine,
    examples: Mixture,
    prompts: int,
    group: int,
    sampling: Mapping[str, Any],
    rewards: Sequence[tuple[str, float, Reward]],
    rule: Rule,
    seed: int,
    folder: Path,
    key: str,
) -> dict[str, float]:
    """Makes the files, unless those of the same `key` are there. Returns what came of it."""
    done = folder / "summary.json"
    if done.is_file() and (summary := read_json(done)).get("key") == key:
        return dict(summary["notes"])
    folder.mkdir(parents=True, exist_ok=True)
    lines: dict[str, list[dict[str, Any]]] = {"samples": [], "kept": [], "pairs": []}
    order = examples.at([0] * len(examples.sources))
    scores: list[float] = []
    solved = 0
    for start in range(0, prompts, AT_ONCE):
        batch = [next(order) for _ in range(min(AT_ONCE, prompts - start))]
        seeds = [seed_of(seed, start + number) for number in range(len(batch))]
        rollouts = generate(engine, batch, group, sampling, rewards, seeds)
        for example, samples in zip(batch, rollouts.groups, strict=True):
            kept, best_and_worst = chosen(samples, rule)
            scores += [sample.judged.total for sample in samples]
            solved += bool(kept)
            base = _prompt(example)
            lines["samples"] += [
                base | {"text": sample.text, "score": sample.judged.total, "problems": list(sample.judged.problems)}
                for sample in samples
            ]
            said = [[*example.messages, {"role": "assistant", "content": sample.text}] for sample in kept]
            lines["kept"] += [base | {"messages": messages} for messages in said]
            if rule.by == "constraint":
                for kind, better, worse in constraint_pairs(example, samples):
                    lines["pairs"].append(base | {"chosen": better.text, "rejected": worse.text, "constraint": kind})
            elif best_and_worst is not None:
                better, worse = best_and_worst
                lines["pairs"].append(base | {"chosen": better.text, "rejected": worse.text})
    if not lines["kept"] and not lines["pairs"]:
        problem = f"none of {len(scores)} completions scored {rule.right:g} and ended by itself"
        raise UserError("align.stages: rejection", problem, "Raise group or max_tokens, or lower right.")
    if rule.diverse < 1:
        texts = [" ".join(str(message["content"]) for message in line["messages"]) for line in lines["kept"]]
        lines["kept"] = [lines["kept"][n] for n in diverse(texts, ceil(rule.diverse * len(texts)))]
    for name, found in lines.items():
        write_lines(folder / f"{name}.jsonl", found)
    notes = {
        "sampled_reward": sum(scores) / len(scores),
        "sampled_right": sum(score >= rule.right for score in scores) / len(scores),
        "questions_answered": solved / prompts,
        "answers_kept": float(len(lines["kept"])),
        "pairs_made": float(len(lines["pairs"])),
    }
    atomic.write_json(done, {"key": key, "notes": notes}, indent=1)
    return notes


def chosen(samples: Sequence[Sample], rule: Rule) -> tuple[list[Sample], tuple[Sample, Sample] | None]:
    """The different good completions that are kept, and the pair. One that was truncated is not good, whatever its
    score, and one that could not be scored is not bad."""
    by_score = sorted(samples, key=lambda sample: -sample.judged.total)
    good: dict[str, Sample] = {}
    for sample in by_score:
        if sample.judged.total >= rule.right and sample.finish_reason == "stop" and sample.text.strip():
            good.setdefault(sample.text.strip(), sample)
    kept = list(good.values())[: rule.keep]
    bad = [s for s in by_score if s.judged.total < rule.right and s.text.strip() and not s.judged.problems]
    if not kept or not bad or kept[0].judged.total - bad[-1].judged.total < rule.margin:
        return kept, None
    return kept, (kept[0], bad[-1])


def key_of(*parts: Any) -> str:
    return hashlib.blake2b(repr(parts).encode(), digest_size=12).hexdigest()


def _prompt(example: Example) -> dict[str, Any]:
    tools = {"tools": example.facts["tools"]} if "tools" in example.facts else {}
    return {"messages": list(example.messages)} | tools


def write_lines(file: Path, lines: Sequence[Mapping[str, Any]]) -> None:
    text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
    atomic.write_bytes(file, text.encode(errors="replace"))  # a response may hold half of a surrogate pair
