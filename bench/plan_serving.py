"""The planner's serving estimates beside measured runs, and beside AIConfigurator's estimates of the same runs.

    python -m bench.plan_serving                       needs the package aiconfigurator-core, for its table of runs
    python -m bench.plan_serving --table FILE.csv      or only that table

Rows whose text's sha256 begins with a byte below 128 tuned the constants (`bench/plan_serving_tune.py`); what is
reported is the others. Output tokens per second are concurrency * output / (TTFT + TPOT * (output - 1)), of measured
and estimated times alike. AIConfigurator's estimates come from `bench/plan_serving_peer.py`. Writes plan_serving.json.
"""

from __future__ import annotations

import argparse
import collections
import json
import statistics
from collections.abc import Callable, Iterable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from bench.measure import RESULTS, record
from bench.plan_serving_rows import Case, Unusable, find_table, output_rate, read_cases
from moesaic.parallel.layout import ParallelLayout
from moesaic.plan.hardware import Cluster, load_device
from moesaic.plan.models import from_dimensions, load_model
from moesaic.plan.serving.engines import load_engine
from moesaic.plan.serving.estimate import ServingPlan, estimate_serving
from moesaic.plan.serving.expected_error import GENERATIONS, kind_of
from moesaic.plan.serving.measured_tables import MeasuredTables
from moesaic.plan.serving.simulate import Arrival, poisson, simulate_serving
from moesaic.plan.serving.step import Serving
from moesaic.plan.shape import ModelShape

OTHER = {"hopper": "b200", "blackwell": "h200"}
MANY = 1_000_000  # devices: a row says itself how many it has
# The model of bench/gpu_train.py; measured with bench/gpu_decode.py, 512 in and 128 out (docs/results.md).
OWN = {"layers": 16, "hidden": 2048, "heads": 32, "kv_heads": 4, "head_dim": 128, "ffn": 768, "vocab": 32000,
       "experts": 64, "topk": 8, "expert_hidden": 768}  # fmt: skip
OWN_MEASURED = {"moesaic": {1: 1079, 128: 21338, 512: 31405}, "vllm": {1: 620, 128: 18073, 512: 21248}}


def estimate(case: Case, model: ModelShape, cluster: Cluster, tables: MeasuredTables | None = None) -> ServingPlan:
    return estimate_serving(
        model, cluster, case.layout, prompt=case.prompt, output=case.output, concurrency=case.concurrency,
        dtype=case.dtype, backend=case.backend, prefill=case.prefill, workers=case.workers,
        prefill_workers=case.prefill_workers, tables=tables,
    )  # fmt: skip


def estimates(cases: Iterable[Case], tables: MeasuredTables | None = None) -> dict[int, ServingPlan]:
    models: dict[str, ModelShape] = {}
    found = {}
    for case in cases:
        model = (
            models.setdefault(case.model, load_model(case.model)) if case.model not in models else models[case.model]
        )
        found[case.number] = estimate(case, model, Cluster(load_device(case.system), MANY), tables)
    return found


def holds_the_weights(case: Case, plan: ServingPlan) -> bool:
    return plan.memory_bytes["weights"] < load_device(case.system).memory_bytes


def errors_of(cases: list[Case], **changed: Any) -> list[float]:
    """With something else than the row says: an engine, or tables."""
    plans = estimates([replace(case, **changed) for case in cases])
    return [plans[case.number].output_tokens_per_second / case.throughput - 1 for case in cases]


def refined(cases: list[Case], errors: dict[int, float], data: Path) -> dict[str, Any] | None:
    """With the package's measured expert layers, on the rows that they change."""
    if not data.is_dir():
        return None
    plans = estimates(cases, MeasuredTables(data))
    found = {case.number: plans[case.number].output_tokens_per_second / case.throughput - 1 for case in cases}
    changed = [case.number for case in cases if abs(found[case.number] - errors[case.number]) > 1e-9]
    return {
        "with tables": spread([found[number] for number in changed]),
        "without": spread([errors[number] for number in changed]),
    }


def simulated() -> list[dict[str, Any]]:
    """The closed estimate beside discrete events: clients with prompts and outputs within 10 % of the lengths given."""
    rows = []
    for name, device, layout, dtype in (
        ("deepseek-v3", "b200", ParallelLayout(tp=8), "fp8"),
        ("llama-3-70b", "h200", ParallelLayout(tp=4), "fp8"),
        ("gpt-oss-120b", "h200", ParallelLayout(tp=2), "fp4"),
    ):
        for backend in ("vllm", "sglang"):
            for clients in (4, 64, 256):
                for prompt in (1024, 8192):
                    model, engine = load_model(name), load_engine(backend)
                    serving = Serving(model, load_device(device), layout, engine, dtype, engine.cache_dtype(dtype))
                    run = simulate_serving(serving, poisson(1.0, 6 * clients, prompt, 512, 0, 0.1), clients=clients)
                    plan = estimate_serving(
                        model, Cluster(load_device(device), MANY), layout, prompt=prompt, output=512,
                        concurrency=clients, dtype=dtype, backend=backend,
                    )  # fmt: skip
                    ratio = run.output_tokens_per_second / plan.output_tokens_per_second
                    rows.append({"model": name, "backend": backend, "clients": clients, "prompt": prompt,
                                 "simulated over estimated": round(ratio, 3)})  # fmt: skip
    return rows


def other_generation(cases: list[Case]) -> list[float]:
    """What devices without runs must expect: Hopper's runs with Blackwell's constants and the other way round."""
    found = []
    for case in cases:
        mine, other = load_device(case.system), load_device(OTHER[GENERATIONS[case.system]])
        borrowed: dict[str, Any] = {
            item.name: getattr(other, item.name) for item in fields(mine) if item.name.startswith("serve_")
        }
        plan = estimate(case, load_model(case.model), Cluster(replace(mine, **borrowed), MANY))
        found.append(plan.output_tokens_per_second / case.throughput - 1)
    return found


def kind(case: Case) -> str:
    """As `plan/serving/expected_error.py` tells kinds apart."""
    return f"{GENERATIONS[case.system]} {kind_of(load_model(case.model)) if case.mode == 'agg' else 'split'}"


def spread(errors: list[float]) -> dict[str, Any]:
    sizes = sorted(abs(error) for error in errors)
    return {
        "rows": len(sizes),
        "median": round(statistics.median(sizes), 4),
        "p90": round(sizes[int(0.9 * (len(sizes) - 1))], 4),
        "bias": round(statistics.median(errors), 4),
    }


def table(cases: list[Case], errors: dict[int, float], key: Callable[[Case], str]) -> dict[str, Any]:
    groups: dict[str, list[float]] = collections.defaultdict(list)
    for case in cases:
        groups[key(case)].append(errors[case.number])
    return {name: spread(group) for name, group in sorted(groups.items())}


def own_engine() -> list[dict[str, Any]]:
    """This product's engine and vLLM on one H200: all requests come at once and without a server before the engine."""
    model = from_dimensions(OWN, "bench", "moe-5b")
    rows = []
    for backend, measured in OWN_MEASURED.items():
        serving = Serving(model, load_device("H200"), ParallelLayout(), load_engine(backend), "bf16", "bf16")
        for requests, rate in measured.items():
            found = simulate_serving(serving, [Arrival(0.0, 512, 128)] * requests).output_tokens_per_second
            rows.append({"backend": backend, "requests": requests, "measured": rate, "estimated": round(found),
                         "error": round(found / rate - 1, 3)})  # fmt: skip
    return rows


def peer_comparison(held_out: list[Case], errors: dict[int, float]) -> dict[str, Any] | None:
    file = RESULTS / "plan_serving_peer.json"
    if not file.is_file():
        return None
    peer = json.loads(file.read_text())["rows"]
    both = [case for case in held_out if str(case.number) in peer]
    theirs, own = {}, {}
    for case in both:
        ttft, tpot, rate = peer[str(case.number)]
        theirs[case.number] = output_rate(case.concurrency, case.output, ttft, tpot) / case.throughput - 1
        own[case.number] = rate * case.workers / case.throughput - 1
    closer = sum(abs(errors[case.number]) < abs(theirs[case.number]) for case in both)
    return {
        "rows": len(both),
        "ours": spread([errors[case.number] for case in both]),
        "aiconfigurator": spread(list(theirs.values())),
        "aiconfigurator, its own tokens/s": spread(list(own.values())),
        "share of rows where ours is closer": round(closer / len(both), 3),
        "by model, ours": table(both, errors, lambda case: case.model),
        "by model, aiconfigurator": table(both, theirs, lambda case: case.model),
        "by system, ours": table(both, errors, lambda case: case.system),
        "by system, aiconfigurator": table(both, theirs, lambda case: case.system),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", type=Path, help="silicon_sample.csv of aiconfigurator-core")
    given = parser.parse_args()
    file = given.table or find_table()
    if file is None or not file.is_file():
        raise SystemExit("pip install aiconfigurator-core, or give --table silicon_sample.csv of that package")
    rows = list(read_cases(file))
    unusable = collections.Counter(row.reason for row in rows if isinstance(row, Unusable) and not row.tuned_on)
    cases = [row for row in rows if isinstance(row, Case)]
    plans = estimates(cases)
    too_small = [case for case in cases if not holds_the_weights(case, plans[case.number])]
    unusable["fewer devices than the weights need"] = sum(not case.tuned_on for case in too_small)
    cases = [case for case in cases if case not in too_small]
    errors = {case.number: plans[case.number].output_tokens_per_second / case.throughput - 1 for case in cases}
    held_out = [case for case in cases if not case.tuned_on]
    seen = {(case.ttft_ms, case.tpot_ms) for case in cases if case.tuned_on}
    fresh = [case for case in held_out if (case.ttft_ms, case.tpot_ms) not in seen]
    covered = [abs(errors[case.number]) <= plans[case.number].expected_error for case in held_out]
    result = {
        "all": spread([errors[case.number] for case in held_out]),
        "without rows whose measurement also stands among the tuned": spread([errors[case.number] for case in fresh]),
        "tuned on": spread([errors[case.number] for case in cases if case.tuned_on]),
        "ttft": spread([plans[case.number].ttft_ms / case.ttft_ms - 1 for case in held_out]),
        "tpot": spread([plans[case.number].tpot_ms / case.tpot_ms - 1 for case in held_out]),
        "share within expected_error": round(sum(covered) / len(covered), 3),
        "not estimated, by reason": dict(unusable),
        "engine not known": spread(errors_of(held_out, backend="typical")),
        "constants of the other generation": spread(other_generation(held_out)),
        "by kind": table(held_out, errors, kind),
        "by system": table(held_out, errors, lambda case: case.system),
        "by model": table(held_out, errors, lambda case: case.model),
        "by backend": table(held_out, errors, lambda case: case.backend),
        "by dtype": table(held_out, errors, lambda case: case.dtype),
        "by mode": table(held_out, errors, lambda case: case.mode),
        "one H200": own_engine(),
        "measured tables": refined(held_out, errors, file.parent / "data"),
        "simulation": simulated(),
        "peer": peer_comparison(held_out, errors),
    }
    for name, value in result.items():
        if isinstance(value, dict) and name.startswith("by "):
            print(name)
            for key, line in value.items():
                print(f"  {key:24} {line['rows']:5} rows  median {line['median']:6.1%}  p90 {line['p90']:6.1%}")
        else:
            print(f"{name}: {json.dumps(value)}")
    record("plan_serving", [], **result)


if __name__ == "__main__":
    main()
