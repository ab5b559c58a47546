"""FlowPrefill beside chunked prefill: how much load keeps nine deadlines in ten, and how long a short prompt waits.

    python -m bench.flow_prefill --seconds 270     writes bench/results/flow_prefill.json; again, until it says "done"
    python -m bench.flow_prefill --anew            forget what the file has

The same trace of short, medium and long prompts, which arrive by a Poisson process, is served by a real model under
FlowPrefill and under chunked prefill at every token budget. Deadlines differ as the prompts do: a short prompt must be
read within a fraction of the time a long one takes, a long one within a few times its own. Goodput is what the paper
means by it: the highest load at which 90 % of all requests get their first token in time. Load 1 is as many requests
as the engine could just read, in whole prompts, if they came one after the other. Each policy's load is raised in
steps of 0.2 until it fails, and the step between is tried as well. Answers are one token long: what is measured is the
time to it. Chunked prefill serves the earliest deadline first too; it is the engine's other policy, not a straw man.

Time is the CPU time of the engine's one thread: what else the machine does meanwhile does not count, waiting for the
next arrival takes no time, and all policies pay for what they compute and decide.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import json
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from bench.measure import RESULTS, record
from moesaic.model.families import read_config
from moesaic.model.transformer import Model
from moesaic.serve.core.engine import Engine
from moesaic.serve.core.request import Request, Sampling
from moesaic.serve.core.scheduling_policies import SchedulingPolicy
from moesaic.serve.core.scheduling_policies.chunked import Chunked
from moesaic.serve.core.scheduling_policies.flow import FlowPrefill

SHAPE: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "vocab_size": 4096,
    "hidden_size": 192,
    "num_hidden_layers": 8,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "intermediate_size": 512,
    "moe_intermediate_size": 96,
    "num_experts": 16,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 2048,
}
BUDGETS = (64, 128, 256, 512)
FIRST, STEP, LAST = 0.6, 0.2, 2.4  # loads
ENOUGH = 0.9  # of all deadlines
FILE = RESULTS / "flow_prefill.json"


@dataclass(frozen=True)
class Class:
    name: str
    share: float
    low: int  # tokens of the prompt
    high: int
    stretch: float  # the deadline, in times the reading of its longest prompt


CLASSES = (
    Class("short", 0.6, 8, 32, 12.0),
    Class("medium", 0.25, 80, 160, 4.0),
    Class("long", 0.15, 300, 600, 4.0),
)


@dataclass(frozen=True)
class Arrival:
    kind: str
    when: float
    prompt: list[int]
    due: float


class ThreadTime:
    """The CPU time of this thread, as a clock for an engine, in which what was planned happens between layers."""

    def __init__(self, model: Model) -> None:
        self.skipped = -time.thread_time()
        self.plans: list[tuple[float, int, Callable[[], object]]] = []
        self.numbers = itertools.count()
        self.hooks = [layer.register_forward_hook(lambda *_: self.catch_up()) for layer in model.layers]

    def __call__(self) -> float:
        return time.thread_time() + self.skipped

    def at(self, when: float, what: Callable[[], object]) -> None:
        heapq.heappush(self.plans, (when, next(self.numbers), what))

    def catch_up(self) -> None:
        while self.plans and self.plans[0][0] <= self():
            heapq.heappop(self.plans)[2]()

    def run(self, engine: Engine) -> None:
        while self.plans or engine.working:
            if not engine.working:
                self.skipped += max(0.0, self.plans[0][0] - self())
            self.catch_up()
            engine.step()
        for hook in self.hooks:
            hook.remove()


def make_model() -> Model:
    return Model(read_config(SHAPE, "bench")).initialize().requires_grad_(False)


def words(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(SHAPE["vocab_size"]) for _ in range(length)]


def begin(model: Model, policy: SchedulingPolicy) -> tuple[Engine, ThreadTime]:
    clock = ThreadTime(model)
    engine = Engine(model, policy=policy, clock=clock, reuse_prefixes=False, cache_bytes=256 << 20)
    clock.skipped = -time.thread_time()  # making the cache does not count
    return engine, clock


def alone(model: Model, length: int) -> float:
    """Seconds from arrival to first token with nobody else there."""
    times = []
    for seed in range(5):
        engine, clock = begin(model, Chunked(tokens=4096))
        request = submit(engine, clock, words(random.Random(seed), length), 0.0, None)
        clock.run(engine)
        assert request.first_token is not None
        times.append(request.first_token)
    return statistics.median(times)


def submit(engine: Engine, clock: ThreadTime, prompt: list[int], when: float, due: float | None) -> Request:
    request = engine.request(prompt, Sampling(max_tokens=1, temperature=0.0, ignore_eos=True))
    request.arrived, request.deadline = when, None if due is None else when + due
    clock.at(when, lambda: engine.submit(request))
    return request


def trace(count: int, load: float, seconds: dict[str, float]) -> list[Arrival]:
    """The same requests at every load, closer together."""
    rng = random.Random(11)
    # The reading of a prompt grows in proportion: the mean of a class is that of its mean length.
    mean = sum(kind.share * seconds[kind.name] * (kind.low + kind.high) / 2 / kind.high for kind in CLASSES)
    now, arrivals = 0.0, []
    for _ in range(count):
        now += rng.expovariate(load / mean)
        (kind,) = rng.choices(CLASSES, weights=[kind.share for kind in CLASSES])
        prompt = words(rng, rng.randint(kind.low, kind.high))
        arrivals.append(Arrival(kind.name, now, prompt, kind.stretch * seconds[kind.name]))
    return arrivals


def serve(model: Model, policy: SchedulingPolicy, arrivals: list[Arrival]) -> dict[str, Any]:
    engine, clock = begin(model, policy)
    requests = [submit(engine, clock, one.prompt, one.when, one.due) for one in arrivals]
    clock.run(engine)
    first = {kind.name: [] for kind in CLASSES}
    met = {kind.name: [] for kind in CLASSES}
    for one, request in zip(arrivals, requests, strict=True):
        assert request.first_token is not None and request.deadline is not None
        first[one.kind].append(request.first_token - one.when)
        met[one.kind].append(request.first_token <= request.deadline)
    everyone = list(itertools.chain(*met.values()))
    return {
        "met": sum(everyone) / len(everyone),
        "goodput": sum(everyone) / arrivals[-1].when,
        "met_by_class": {name: sum(those) / len(those) for name, those in met.items()},
        "worst_first_token": {name: max(those) for name, those in first.items()},
        "seconds": clock(),
    }


def waits(model: Model, policy: SchedulingPolicy, length: int, seconds: float, rounds: int = 10) -> list[float]:
    """How long short requests that come while a long prompt is read wait for their first token."""
    rng = random.Random(5)
    engine, clock = begin(model, policy)
    shorts = []
    for number in range(rounds):
        start = number * 3 * seconds
        submit(engine, clock, words(rng, length), start, 10 * seconds)
        when = start + rng.uniform(0.1, 0.9) * seconds
        shorts.append(submit(engine, clock, words(rng, CLASSES[0].high), when, seconds))
    clock.run(engine)
    return [request.first_token - request.arrived for request in shorts if request.first_token is not None]


def goodput(rows: list[dict[str, Any]], policy: str) -> float:
    """The highest load that was sustained."""
    return max((row["load"] for row in rows if row["policy"] == policy and row["met"] >= ENOUGH), default=0.0)


def next_load(rows: list[dict[str, Any]], policy: str) -> float | None:
    """Upwards until one fails, then half a step back; None when all is known."""
    tried = {row["load"]: row["met"] >= ENOUGH for row in rows if row["policy"] == policy}
    load = FIRST
    while tried.get(load) and load < LAST:
        load = round(load + STEP, 2)
    if load not in tried:
        return load
    between = round(load - STEP / 2, 2)
    return None if tried[load] or between in tried else between


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=3600.0, help="begin nothing new after so long")
    parser.add_argument("--anew", action="store_true", help="forget what the results file has")
    options = parser.parse_args()
    torch.set_num_threads(1)
    until = time.monotonic() + options.seconds
    model = make_model()
    console = Console(width=120)
    kept = FILE.exists() and not options.anew
    before = json.loads(FILE.read_text()) if kept else {"rows": [], "worst_short_wait": {}}
    seconds = before.get("seconds_alone") or {kind.name: alone(model, kind.high) for kind in CLASSES}
    layer = seconds["long"] / len(model.layers)
    console.print(", ".join(f"{kind.name} ({kind.high} tokens) {seconds[kind.name]:.3f} s" for kind in CLASSES))

    policies: dict[str, Callable[[], SchedulingPolicy]] = {"flow": FlowPrefill}
    policies |= {f"chunked {budget}": lambda budget=budget: Chunked(tokens=budget) for budget in BUDGETS}
    rows, waited = before["rows"], before["worst_short_wait"]

    def save() -> None:
        found = {name: goodput(rows, name) for name in policies}
        best = max(load for name, load in found.items() if name != "flow")
        facts = {"seconds_alone": seconds, "layer_seconds": layer, "worst_short_wait": waited, "goodput": found}
        ratio = found["flow"] / best if best else None
        classes = [vars(kind) for kind in CLASSES]
        record("flow_prefill", rows, model=SHAPE, classes=classes, requests=options.requests, ratio=ratio, **facts)

    for name, policy in policies.items():
        if name not in waited:
            waited[name] = max(waits(model, policy(), CLASSES[-1].high, seconds["long"]))
            save()
    for name, policy in policies.items():
        while (load := next_load(rows, name)) is not None and time.monotonic() < until:
            rows.append(
                {"load": load, "policy": name, **serve(model, policy(), trace(options.requests, load, seconds))}
            )
            print(f"{name}, load {load}: {rows[-1]['met']:.1%} in time", flush=True)
            save()

    names = [kind.name for kind in CLASSES]
    table = Table("policy", "load", "in time", "requests/s in time", *names, "worst short s")
    for row in sorted(rows, key=lambda row: (row["policy"], row["load"])):
        by_class = [f"{row['met_by_class'][name]:.0%}" for name in names]
        worst = row["worst_first_token"]["short"]
        cells = [row["policy"], f"{row['load']:.1f}", f"{row['met']:.1%}", f"{row['goodput']:.2f}", *by_class]
        table.add_row(*cells, f"{worst:.3f}")
    console.print(table)
    loads = {name: goodput(rows, name) for name in policies}
    best = max(load for name, load in loads.items() if name != "flow")
    console.print(f"goodput, the highest load with {ENOUGH:.0%} in time: {loads}; {loads['flow'] / (best or 1):.2f}x")
    others = sorted(wait for name, wait in waited.items() if name != "flow")
    bound = layer + seconds["short"]
    console.print(
        f"a short request during a long prompt waits at most {waited['flow']:.3f} s; one layer {layer:.3f} s and its "
        f"own {seconds['short']:.3f} s make {bound:.3f} s; chunked {others[0]:.3f} to {others[-1]:.3f} s"
    )
    done = all(next_load(rows, name) is None for name in policies)
    console.print(f"wrote {FILE}; {'done' if done else 'call it again for the rest'}")


if __name__ == "__main__":
    main()
