"""What AIConfigurator's own estimate says of the measured serving runs, row by row, for `bench/plan_serving.py`.

    python -m venv /tmp/peer && /tmp/peer/bin/pip install aiconfigurator-core==0.12.0
    PYTHONPATH=. /tmp/peer/bin/python -m bench.plan_serving_peer       some minutes; writes plan_serving_peer.json

It is given what the planner is given: model, formats, layout, lengths, concurrency; its current tables for the device
and engine; prefill in steps of 8,192 tokens (every engine's default), fewer where there are not so many, as its own
search does. Where its tables lack a combination of cache formats the next is tried.
"""

from __future__ import annotations

import collections
import json
import logging
import pathlib
import warnings
from functools import cache
from typing import Any

from bench.plan_serving_rows import SYSTEMS, Case, find_table, read_cases

NAMES = {
    "meta-llama/Llama-3.1-70B": ["meta-llama/Meta-Llama-3.1-70B"],
    "meta-llama/Llama-3.1-8B-Instruct": ["meta-llama/Meta-Llama-3.1-8B"],
    "nvidia/Llama-3.1-8B-Instruct-FP8": ["meta-llama/Meta-Llama-3.1-8B"],
    "zhipuai/GLM-5": ["zai-org/GLM-5-FP8", "nvidia/GLM-5-NVFP4"],
}
CACHES = [(None, None), ("fp8", "bfloat16"), ("bfloat16", "bfloat16")]
STEP = 8192


@cache
def _database(system: str, backend: str) -> Any:
    from aiconfigurator_core.sdk.perf_database import get_database, get_version_slots

    slots = get_version_slots(system, backend)
    return get_database(system, backend, slots["current"], database_mode="HYBRID")


@cache
def _model(name: str, backend: str, sizes: tuple[int, ...], formats: tuple[str, str], caches: tuple[str, str]) -> Any:
    from aiconfigurator_core.sdk.config_builders import build_model_config
    from aiconfigurator_core.sdk.models import get_model

    gemm, moe = formats
    return get_model(name, build_model_config(*sizes, gemm or None, *caches, moe or None), backend)


def estimate(case: Case) -> list[float] | str:
    """TTFT and TPOT in milliseconds and its own output tokens per second; or why there are none."""
    from aiconfigurator_core.sdk.backends.factory import get_backend
    from aiconfigurator_core.sdk.config import RuntimeConfig

    if case.mode != "agg":
        return "split prefill and decode: not run"
    system = {short: long for long, short in SYSTEMS.items()}.get(case.system, case.system)
    layout = case.layout
    sizes = (layout.tp, layout.pp, layout.dp, layout.tp * layout.dp // layout.ep, layout.ep)
    batch = max(1, round(case.concurrency / (layout.dp * case.workers)))
    step = min(max(STEP, case.prompt), max(1, batch - 1) * case.prompt)
    why = ""
    for name in NAMES.get(case.path, [case.path]):
        for formats in dict.fromkeys([case.formats, ("", "")]):
            for caches in CACHES:
                try:
                    run = get_backend(case.backend).run_agg(
                        _model(name, case.backend, sizes, formats, caches), _database(system, case.backend),
                        RuntimeConfig(isl=case.prompt, osl=case.output, batch_size=batch), ctx_tokens=step,
                    )  # fmt: skip
                except Exception as error:  # its own errors are of many kinds
                    why = why or f"{type(error).__name__}: {str(error)[:80]}"
                    continue
                found = run.get_result_dict()
                ttft, tpot = float(found["ttft"]), float(found["tpot"])
                return [round(ttft, 1), round(tpot, 3), round(float(found["tokens/s"]), 1)]
    return why


def main() -> None:
    logging.disable(logging.CRITICAL)
    warnings.filterwarnings("ignore")
    table = find_table()
    if table is None:
        raise SystemExit("aiconfigurator-core is not installed here (see the head of this file)")
    done: dict[str, Any] = {}
    failed: collections.Counter[str] = collections.Counter()
    for case in read_cases(table):
        if isinstance(case, Case):
            got = estimate(case)
            if isinstance(got, str):
                failed[got] += 1
            else:
                done[str(case.number)] = got
    file = pathlib.Path(__file__).parent / "results" / "plan_serving_peer.json"
    about = {"package": "aiconfigurator-core 0.12.0", "failed": failed.most_common(20),
             "fields": ["ttft_ms", "tpot_ms", "own tokens/s"]}  # fmt: skip
    lines = ",\n".join(f'"{number}": {json.dumps(values)}' for number, values in done.items())
    file.write_text(f'{json.dumps(about)[:-1]}, "rows": {{\n{lines}\n}}}}\n')
    print(f"{len(done)} rows estimated, {sum(failed.values())} not; {file.name}")
    for reason, count in failed.most_common(12):
        print(f"{count:5d}  {reason}")


if __name__ == "__main__":
    main()
