"""FlowPrefill on one GPU: how long a short prompt waits behind a long one, and the load at which deadlines are kept.

    python bench/gpu_flow.py                       about 7 minutes on an H200
    python bench/gpu_flow.py --parts waits         two of them
    python bench/gpu_flow.py --tiny                on a CPU, in seconds: every line runs, and no number means anything

The GPU's sibling of bench/flow_prefill.py, by the wall clock: 16 layers of Qwen3-30B's widths with random weights, one
engine after the other over one model, requests that a second thread hands in when their time has come. FlowPrefill runs
layer by layer and is stopped between layers, where CUDA events say that the device is; chunked prefill runs as CUDA
graphs, at three token budgets, earliest deadline first.

Waits: a prompt of 16,384 tokens, and in its midst one of 128 that is urgent. In `flow, host clock`, the ablation, no
event is waited for, so that all layers are launched before the short one arrives.
Goal: within four layers and its own time. Goodput: the highest load at which 90 % of the requests have their first
token in time (goal: 1.5 times the best chunked setting); load 1 is what chunked prefill could just read in whole
prompts, one after the other. Rows go to bench/results/gpu_flow.json as they come; what fails is written down and the
rest goes on.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import random
import statistics
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from bench.flow_prefill import ENOUGH, Class, goodput, make_model, next_load
from bench.measure import record
from moesaic.model.transformer import Model
from moesaic.serve.core.device_timing import HostTimer
from moesaic.serve.core.engine import Engine
from moesaic.serve.core.request import Request, Sampling
from moesaic.serve.core.scheduling_policies import SchedulingPolicy
from moesaic.serve.core.scheduling_policies.chunked import Chunked
from moesaic.serve.core.scheduling_policies.flow import FlowPrefill

SAMPLING = Sampling(max_tokens=1, temperature=0.0, ignore_eos=True)
Plan = list[tuple[float, Request]]  # when each request is handed in, seconds from the start


class Bench:
    def __init__(self, tiny: bool, minutes: float) -> None:
        self.tiny, self.until = tiny, time.monotonic() + 60 * minutes
        if tiny:
            self.model: Model = make_model()
        else:
            from bench.gpu_train import config_of
            from bench.random_weights import random_model

            self.model = random_model(config_of(16, context=32768)).requires_grad_(False)
        sizes = ((4, 12), (24, 40), (60, 120)) if tiny else ((64, 256), (1024, 2048), (8192, 16384))
        names, shares, stretches = ("short", "medium", "long"), (0.6, 0.25, 0.15), (12.0, 4.0, 4.0)
        self.classes = [Class(*one) for one in zip(names, shares, *zip(*sizes), stretches)]
        self.longest, self.shortest = (120, 8) if tiny else (16384, 128)
        budgets = (32, 128) if tiny else (1024, 4096, 16384)
        self.policies: dict[str, Callable[[], SchedulingPolicy]] = {"flow": FlowPrefill}
        self.policies |= {f"chunked {budget}": lambda budget=budget: Chunked(tokens=budget) for budget in budgets}
        self.whole = f"chunked {budgets[-1]}"
        self.rows: list[dict[str, Any]] = []
        self.facts: dict[str, Any] = {"worst_wait_ms": {}, "median_wait_ms": {}, "longest": self.longest}
        self.failed: list[str] = []

    def save(self) -> None:
        if not self.tiny:
            classes = [vars(one) for one in self.classes]
            record("gpu_flow", self.rows, classes=classes, failed=self.failed, **self.facts)

    def engine(self, policy: str) -> Engine:
        memory = (1 << 24) if self.tiny else (16 << 30)
        gc.unfreeze()  # an engine of graphs keeps what there is out of collections, the last one's cache too
        gc.collect()
        return Engine(self.model, policy=self.policies[policy](), reuse_prefixes=False, cache_bytes=memory)

    def prompt(self, rng: random.Random, length: int) -> list[int]:
        return [rng.randrange(self.model.config.vocab) for _ in range(length)]

    def run(self, engine: Engine, plan: Plan) -> float:
        """Everything that was planned, in its time; the seconds it took."""
        start = engine.clock()
        for when, request in plan:
            request.arrived = start + when
            request.deadline = None if request.deadline is None else request.arrived + request.deadline
        handed = threading.Event()

        def hand_in() -> None:
            for when, request in plan:
                while (left := start + when - engine.clock()) > 0:
                    time.sleep(left if left < 0.002 else left - 0.001)
                engine.submit(request)
            handed.set()

        thread = threading.Thread(target=hand_in, daemon=True)
        thread.start()
        while engine.working or not handed.is_set():
            if engine.working:
                engine.step()
            else:
                time.sleep(0.0002)
        thread.join()
        return engine.clock() - start

    def request(self, engine: Engine, rng: random.Random, length: int, due: float | None) -> Request:
        request = engine.request(self.prompt(rng, length), SAMPLING)
        request.deadline = due
        return request

    def warm(self, engine: Engine) -> None:
        """Kernels are compiled, graphs captured, and times learned by what comes before."""
        engine.warm_up()
        rng = random.Random(1)
        for _ in range(2):
            for one in self.classes:
                for length in (one.low, (one.low + one.high) // 2, one.high):
                    self.run(engine, [(0.0, self.request(engine, rng, length, None))])
        together = [self.request(engine, rng, one.high, None) for one in self.classes for _ in range(2)]
        self.run(engine, [(0.0, request) for request in together])

    def alone(self, engine: Engine, length: int) -> float:
        found = []
        for seed in range(5):
            request = self.request(engine, random.Random(seed), length, None)
            self.run(engine, [(0.0, request)])
            assert request.first_token is not None
            found.append(request.first_token - request.arrived)
        return statistics.median(found)

    def waits(self, engine: Engine, seconds: float, rounds: int) -> list[float]:
        """A short request that comes while a long prompt is read: how long it waits for its first token."""
        rng, found = random.Random(5), []
        for _ in range(rounds):
            long = self.request(engine, rng, self.longest, 20 * seconds)
            short = self.request(engine, rng, self.shortest, seconds / 2)
            self.run(engine, [(0.0, long), (rng.uniform(0.2, 0.8) * seconds, short)])
            assert short.first_token is not None
            found.append(short.first_token - short.arrived)
        return found

    def measure_waits(self, rounds: int) -> None:
        for name in [*self.policies, "flow, host clock"]:
            try:
                engine = self.engine(name.split(",")[0])
                self.warm(engine)
                if "host" in name:
                    engine.runner.timer = HostTimer(engine.clock)
                    self.warm(engine)
                own = {one.name: self.alone(engine, one.high) for one in self.classes}
                long, short = self.alone(engine, self.longest), self.alone(engine, self.shortest)
                self.facts.setdefault("alone_ms", {})[name] = {key: round(1e3 * took, 2) for key, took in own.items()}
                found = sorted(self.waits(engine, long, rounds))
                self.facts["worst_wait_ms"][name] = round(1e3 * found[-1], 2)
                self.facts["median_wait_ms"][name] = round(1e3 * found[len(found) // 2], 2)
                if name == "flow":
                    layer = long / len(self.model.layers)
                    self.facts["layer_ms"], self.facts["short_ms"] = round(1e3 * layer, 2), round(1e3 * short, 2)
                    self.facts["bound_ms"] = round(1e3 * (4 * layer + short), 2)
                print(name, self.facts["alone_ms"][name], f"waits {found[-1]:.4f} s at worst", flush=True)
            except Exception as error:
                self.failed.append(f"waits, {name}: {type(error).__name__}: {error}"[:300])
                traceback.print_exc()
            self.save()

    def trace(self, engine: Engine, count: int, load: float, seconds: dict[str, float]) -> list[tuple[str, Plan]]:
        """The same requests at every load, closer together."""
        rng, now = random.Random(11), 0.0
        shares = [one.share for one in self.classes]
        mean = sum(one.share * seconds[one.name] * (one.low + one.high) / 2 / one.high for one in self.classes)
        found: list[tuple[str, Plan]] = []
        for _ in range(count):
            now += rng.expovariate(load / mean)
            (kind,) = rng.choices(self.classes, weights=shares)
            length, due = rng.randint(kind.low, kind.high), kind.stretch * seconds[kind.name]
            found.append((kind.name, [(now, self.request(engine, rng, length, due))]))
        return found

    def serve(self, engine: Engine, count: int, load: float, seconds: dict[str, float]) -> dict[str, Any]:
        arrivals = self.trace(engine, count, load, seconds)
        took = self.run(engine, list(itertools.chain(*(plan for _, plan in arrivals))))
        met: dict[str, list[bool]] = {one.name: [] for one in self.classes}
        for kind, [(_, request)] in arrivals:
            assert request.first_token is not None and request.deadline is not None
            met[kind].append(request.first_token <= request.deadline)
        everyone = list(itertools.chain(*met.values()))
        by_class = {name: round(sum(those) / max(1, len(those)), 4) for name, those in met.items()}
        return {"met": sum(everyone) / len(everyone), "met_by_class": by_class, "seconds": round(took, 2)}

    def measure_goodput(self, count: int) -> None:
        engine = self.engine(self.whole)
        self.warm(engine)
        seconds = {one.name: self.alone(engine, one.high) for one in self.classes}
        self.facts["deadlines_ms"] = {one.name: round(1e3 * one.stretch * seconds[one.name], 2) for one in self.classes}
        for name in self.policies:
            try:
                engine = self.engine(name)
                self.warm(engine)
                self.serve(engine, min(count, 40), 1.0, seconds)  # the shapes that a crowd makes
                while (load := next_load(self.rows, name)) is not None and time.monotonic() < self.until:
                    self.rows.append({"policy": name, "load": load, **self.serve(engine, count, load, seconds)})
                    print(self.rows[-1], flush=True)
                    if self.tiny:
                        break
            except Exception as error:
                self.failed.append(f"goodput, {name}: {type(error).__name__}: {error}"[:300])
                traceback.print_exc()
            loads = {known: goodput(self.rows, known) for known in self.policies}
            best = max(load for known, load in loads.items() if known != "flow")
            self.facts |= {"goodput": loads, "times_chunked": round(loads["flow"] / best, 2) if best else None}
            self.save()
        print(f"goodput with {ENOUGH:.0%} in time: {self.facts.get('goodput')}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="*", default=["waits", "goodput"], choices=["waits", "goodput"])
    parser.add_argument("--minutes", type=float, default=7.0, help="begin no further load after so long")
    parser.add_argument("--requests", type=int, default=150)
    parser.add_argument("--tiny", action="store_true", help="a small model on a CPU, recorded nowhere")
    options = parser.parse_args()
    bench = Bench(options.tiny, options.minutes)
    if "waits" in options.parts:
        bench.measure_waits(2 if options.tiny else 12)
    if "goodput" in options.parts:
        bench.measure_goodput(12 if options.tiny else options.requests)
    print({key: bench.facts[key] for key in bench.facts if key != "alone_ms"}, flush=True)
    print("failed:", bench.failed or "nothing", flush=True)
    if options.tiny and bench.failed:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
