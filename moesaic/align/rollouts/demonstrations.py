"""Trajectories of a teacher, filtered by their reward (AgentTuning).

Files in the run's `demonstrations` folder:

    episodes.jsonl   every episode, with its reward; it grows as they are played, and a run that was stopped goes on
    kept.jsonl       those that ended well, as an SFT stage reads them; written once, whole or not at all
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from moesaic import atomic
from moesaic.align.rollouts.rejection import write_lines
from moesaic.errors import UserError
from moesaic.json_files import read_json
from moesaic.json_lines import json_lines
from moesaic.train.report.metrics import Journal
from moesaic.worlds.environments import Environment
from moesaic.worlds.playing import Player, play
from moesaic.worlds.text_actions import WorldExamples

AT_ONCE = 64  # episodes


def collect_demonstrations(
    player: Player, environment: Environment, episodes: int, right: float, seed: int, folder: Path, key: str
) -> dict[str, float]:
    """Makes the files, unless those of the same `key` are there. Returns what came of it."""
    done = folder / "summary.json"
    if done.is_file() and (summary := read_json(done)).get("key") == key:
        return dict(summary["notes"])
    lines = list(_played(player, environment, episodes, seed, folder, key))
    kept = [line for line in lines if line["reward"] >= right and line["messages"]]
    if not kept:
        problem = f"none of the teacher's {episodes} episodes had a reward of {right:g}"
        raise UserError(
            "align.stages: demonstrations", problem, "Take a better teacher or more episodes, or lower right."
        )
    write_lines(folder / "kept.jsonl", [{"messages": line["messages"], "reward": line["reward"]} for line in kept])
    notes = {
        "teacher_reward": sum(line["reward"] for line in lines) / len(lines),
        "episodes": float(len(lines)),
        "episodes_kept": float(len(kept)),
    }
    atomic.write_json(done, {"key": key, "notes": notes}, indent=1)
    return notes


def _played(
    player: Player, environment: Environment, episodes: int, seed: int, folder: Path, key: str
) -> Iterator[dict[str, Any]]:
    """Those that an earlier call played, and then the others, written down as they come."""
    file = folder / "episodes.jsonl"
    journal = Journal(file)
    before = [line for _, line in json_lines(file)] if file.stat().st_size else []
    if any(line.get("key") != key for line in before):  # played by somebody else, or otherwise
        journal.replace([])
        before = []
    yield from before[:episodes]
    examples = WorldExamples(environment, seed)
    try:
        for start in range(len(before), episodes, AT_ONCE):
            numbers = range(start, min(start + AT_ONCE, episodes))
            for one in play(player, environment, [examples[number] for number in numbers], first=start):
                line = {"key": key, "reward": one.reward, "invalid": one.invalid, "messages": one.messages}
                journal.append(line)
                yield line
    finally:
        journal.close()
