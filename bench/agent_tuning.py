"""AgentTuning from end to end with a tiny model: a teacher behind an OpenAI-compatible URL plays in two worlds, its
episodes are filtered by reward and mixed 1:4 with general data, and the model is asked on held-out tasks, in a world
that it has never seen, and about what it could do before.

    python -m bench.agent_tuning                       half an hour of a core
    python -m bench.agent_tuning --arms mixed unmixed  twenty minutes

The start has learned sums only. Arms are the same number of steps from it: `mixed` (the method), `unmixed` (only
trajectories), `unfiltered` (the mix, with the teacher's failures in it), `general` (no trajectories). The teacher knows
how the worlds go and is careless at a third of its turns (bench/worlds_policy.py). Intervals are Wilson's, at 95 %.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import moesaic
from bench.know_rl import Chance
from bench.measure import record
from bench.worlds_policy import demonstrations, empty_model, habit, text_of, trained
from moesaic import atomic
from moesaic.align.examples import TaskExamples
from moesaic.evaluate.best_of_n import BestOfNBackend
from moesaic.evaluate.interval import wilson
from moesaic.evaluate.suites import SuiteContext
from moesaic.evaluate.suites.agents import Agents
from moesaic.evaluate.suites.tasks import Tasks
from tests.worlds.solvers import next_action

WORLDS, UNSEEN = ("sql", "cards"), "graph"
GENERAL = "chain_sum:min_terms=2,max_terms=3,min_digits=1,max_digits=1"
CARELESS = 0.35
ARMS: dict[str, dict[str, Any]] = {
    "mixed": {},
    "unmixed": {"data": [], "share": 1.0},
    "unfiltered": {"right": 0.0},
    "general": {},
}
KEYS = (*WORLDS, UNSEEN, "in_form", "sums")


def replied(messages: list[dict[str, Any]]) -> str:
    """A careless teacher's turn, which depends on the conversation only."""
    opening, last = str(messages[0]["content"]), str(messages[-1]["content"])
    draw = random.Random(f"{opening} {last} {len(messages)}")
    name = "sql" if "SQLite" in opening else "cards"
    careless = draw.random() < CARELESS
    return f"Action: {habit(name, opening, last, draw) if careless else next_action(messages)}"


@contextmanager
def teacher() -> Iterator[str]:
    """Speaks OpenAI's protocol."""

    class Playing(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
            said = {"message": {"content": replied(asked["messages"])}, "finish_reason": "stop"}
            body = json.dumps({"choices": [said]}).encode()
            self.send_response(200)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            return None

    serving = ThreadingHTTPServer(("127.0.0.1", 0), Playing)
    Thread(target=serving.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{serving.server_port}/v1"
    finally:
        serving.shutdown()
        serving.server_close()


def start_model(folder: Path, steps: int) -> tuple[Path, float]:
    """Knows sums, and has a tokenizer with the words of worlds."""
    shown = [line for name in (*WORLDS, UNSEEN) for line in demonstrations(name, 300, 0, 0.0)]
    examples = TaskExamples(GENERAL, "train")
    sums = ({"messages": examples[number].conversation()} for number in range(600))
    base = empty_model([*text_of(shown), *text_of(sums)], folder, 0)
    sft = {"name": "sft", "steps": steps, "data": [{"path": f"builtin:{GENERAL}"}], "batch_tokens": 2048}
    return folder / "start", trained([sft], base, folder / "start", lr=0.01)


def stage(arm: str, steps: int, seed: int, url: str) -> dict[str, Any]:
    general = [{"path": f"builtin:{GENERAL}", "skip": 50_000}]
    shared = {"steps": steps, "batch_tokens": 2048, "seed": seed, "data": general}
    if arm == "general":
        return shared | {"name": "sft"}
    world = {"name": "several", "worlds": list(WORLDS)}
    taught = {"environment": world, "teacher": {"url": url, "model": "teacher", "at_once": 1}, "episodes": 500}
    return shared | {"name": "demonstrations", "max_tokens": 40, "temperature": 0.0} | taught | ARMS[arm]


def asked(model: Path, episodes: int) -> dict[str, Any]:
    """Success in each world, the share of episodes in the unseen one that did not fail by their form, and sums."""
    file = model.with_suffix(f".{episodes}.json")
    if not file.exists():
        loaded = moesaic.load(model, threads=1)
        context = SuiteContext(backend=BestOfNBackend(loaded, Chance(), 1))  # sampled
        found = Agents(",".join((*WORLDS, UNSEEN)), examples=episodes, max_tokens=40).run(None, context)
        formed = episodes - found["outcomes"][UNSEEN].get("invalid format", 0)
        known = Tasks(family=GENERAL, examples=2 * episodes, max_tokens=8).run(loaded, SuiteContext())
        values = {name: [found[name], episodes] for name in (*WORLDS, UNSEEN)}
        values |= {"in_form": [formed / episodes, episodes], "sums": [known["accuracy"], 2 * episodes]}
        atomic.write_json(file, values)
    values = json.loads(file.read_text())
    told(model.name, values)
    return values


def told(name: str, values: dict[str, Any]) -> None:
    shown = []
    for key, (share, count) in values.items():
        low, high = wilson(share * count, count)
        shown.append(f"{key} {share:.3f} ({low:.3f} to {high:.3f})")
    print(f"{name:14} {'  '.join(shown)}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--start-steps", type=int, default=200)
    parser.add_argument("--steps", type=int, default=600, help="of every arm")
    parser.add_argument("--lr", type=float, default=0.003, help="of every arm (Muon)")
    parser.add_argument("--episodes", type=int, default=60, help="held out, in each world")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--out", type=Path, default=Path("out/agent_tuning"))
    parser.add_argument("--no-record", action="store_true", help="print only")
    arguments = parser.parse_args()
    start, seconds = start_model(arguments.out, arguments.start_steps)
    rows: list[dict[str, Any]] = [{"arm": "start", "asked": asked(start, arguments.episodes), "cpu_seconds": seconds}]
    for arm in arguments.arms:
        own = []
        for seed in arguments.seeds:
            out = arguments.out / f"{arm}-{seed}"
            with teacher() as url:
                spent = trained([stage(arm, arguments.steps, seed, url)], start, out, lr=arguments.lr)
            notes = out / "demonstrations" / "summary.json"
            collected = json.loads(notes.read_text())["notes"] if notes.exists() else {}
            values = asked(out, arguments.episodes)
            own.append({"arm": arm, "seed": seed, "asked": values, "cpu_seconds": spent} | collected)
        both: dict[str, Any] = {}
        for key in KEYS:
            count = sum(row["asked"][key][1] for row in own)
            share = sum(row["asked"][key][0] for row in own) / len(own)
            both[key] = [share, count, *wilson(share * count, count)]
        rows += [*own, {"arm": arm, "seeds": arguments.seeds, "asked": both}]
    if not arguments.no_record:
        parameters = sum(parameter.numel() for parameter in moesaic.load(start).parameters())
        record("agent_tuning", rows, parameters=parameters, careless=CARELESS, steps=arguments.steps, lr=arguments.lr)


if __name__ == "__main__":
    main()
