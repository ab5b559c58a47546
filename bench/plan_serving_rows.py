"""Measured serving runs (`silicon_sample.csv` of the package aiconfigurator-core) as cases the planner can estimate.

What the table says is taken as it is, but for three things that its own duplicates show (docs/plan-serving.md):
rows where moe_tp = moe_ep > 1 have their devices multiplied twice (tp=8 ep=8 stands as tp=64), rows of tp = dp > 1 with
moe_ep = tp * dp too, and rows of tp above 8 without experts' division (tp=12 to 72) are sums over workers, no layouts.
A row's batch is one worker's: where its concurrency is a multiple of it, so many workers shared the load.
"""

from __future__ import annotations

import csv
import hashlib
import importlib.util
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from moesaic.parallel.layout import ParallelLayout

SYSTEMS = {"b200_sxm": "b200", "b300_sxm": "b300", "h200_sxm": "h200", "h100_sxm": "h100"}
MODELS = {
    "MiniMaxAI/MiniMax-M2.5": "minimax-m2",
    "Qwen/Qwen3-235B-A22B-FP8": "qwen3-235b-a22b",
    "Qwen/Qwen3-32B": "qwen3-32b",
    "nvidia/Qwen3-32B-NVFP4": "qwen3-32b",
    "Qwen/Qwen3.5-397B-A17B": "qwen3.5-397b-a17b",
    "deepseek-ai/DeepSeek-R1": "deepseek-v3",
    "deepseek-ai/DeepSeek-V3": "deepseek-v3",
    "nvidia/DeepSeek-R1-NVFP4": "deepseek-v3",
    "nvidia/DeepSeek-V3.1-NVFP4": "deepseek-v3",
    "meta-llama/Llama-3.1-70B": "llama-3-70b",
    "meta-llama/Llama-3.1-8B-Instruct": "llama-3-8b",
    "nvidia/Llama-3.1-8B-Instruct-FP8": "llama-3-8b",
    "moonshotai/Kimi-K2.5": "kimi-k2",
    "openai/gpt-oss-120b": "gpt-oss-120b",
    "zhipuai/GLM-5": "glm-5",
}


@dataclass(frozen=True)
class Case:
    number: int  # of the row, from 0
    model: str
    system: str
    backend: str
    version: str
    dtype: str
    mode: str
    prompt: int
    output: int
    concurrency: int
    layout: ParallelLayout
    workers: int
    prefill: ParallelLayout | None
    prefill_workers: int
    ttft_ms: float
    tpot_ms: float
    tuned_on: bool
    path: str = ""  # of the model, as the table names it
    formats: tuple[str, str] = ("", "")  # of matmuls and of experts, as the table names them

    @property
    def throughput(self) -> float:
        return output_rate(self.concurrency, self.output, self.ttft_ms, self.tpot_ms)


@dataclass(frozen=True)
class Unusable:
    number: int
    reason: str
    tuned_on: bool


def output_rate(concurrency: float, output: int, ttft_ms: float, tpot_ms: float) -> float:
    """Output tokens per second of `concurrency` clients that each send the next request when one is answered."""
    return concurrency * output / (ttft_ms + tpot_ms * (output - 1)) * 1e3


def find_table() -> Path | None:
    found = importlib.util.find_spec("aiconfigurator_core")
    if found is None or not found.submodule_search_locations:
        return None
    return Path(next(iter(found.submodule_search_locations))) / "systems" / "silicon_sample.csv"


def read_cases(table: Path) -> Iterator[Case | Unusable]:
    lines = table.read_text().splitlines()
    for number, (line, row) in enumerate(zip(lines[1:], csv.DictReader(lines), strict=True)):
        tuned_on = hashlib.sha256(line.encode()).digest()[0] < 128
        yield _case(number, row, tuned_on)


def _case(number: int, row: dict[str, str], tuned_on: bool) -> Case | Unusable:
    def whole(key: str) -> int:
        return int(float(row[key] or 0))

    def of(prefix: str) -> tuple[int, ...]:
        sizes = ("tp_size", "attention_dp_size", "pp_size", "moe_tp_size", "moe_ep_size")
        return tuple(whole(prefix + size) for size in sizes)

    split = row["mode"] == "disagg"
    workers = whole("decode_num_workers") if split else 1
    prefill_workers = whole("prefill_num_workers") if split else 1
    if split and not (workers and prefill_workers):
        return Unusable(number, "split, without the number of workers", tuned_on)
    layout = _layout(*of("decode_" if split else ""), split=split)
    prefill = _layout(*of("prefill_"), split=split) if split else None
    if layout is None or (split and prefill is None):
        return Unusable(number, "devices are a sum over workers", tuned_on)
    stated = re.search(r"silicon_concurrency=(\d+)", row["silicon_data_source"])
    batch = whole("decode_batch_size") * workers if split else whole("batch_size")
    if stated and not split:
        workers = max(1, round(int(stated[1]) / (batch * max(1, whole("attention_dp_size")))))
    return Case(
        number, MODELS[row["model_path"]], SYSTEMS.get(row["system"], row["system"]), row["backend"],
        row["backend_version"], _dtype(row), row["mode"], whole("isl"), whole("osl"),
        int(stated[1]) if stated else batch * layout.dp, layout, workers, prefill, prefill_workers,
        float(row["silicon_ttft_ms"]), float(row["silicon_tpot_ms"]), tuned_on,
        row["model_path"], (row["gemm_quant_mode"], row["moe_quant_mode"]),
    )  # fmt: skip


def _dtype(row: dict[str, str]) -> str:
    """Rows without a precision name the format of their matmuls."""
    modes = {"fp8": "fp8", "fp8_block": "fp8", "nvfp4": "fp4", "int4_wo": "int4", "": "bf16"}
    return row["precision"] or modes[row["moe_quant_mode"]]


def _layout(tp: int, dp: int, pp: int, moe_tp: int, moe_ep: int, *, split: bool) -> ParallelLayout | None:
    tp, dp, pp, ep = max(tp, 1), max(dp, 1), max(pp, 1), max(moe_ep, 1)
    if not split and moe_tp == moe_ep > 1:  # moe_tp holds all ranks already
        tp, dp = (1, moe_tp) if dp > 1 else (moe_tp, 1)
    elif tp == dp > 1 and moe_ep == tp * dp:
        dp, ep = 1, tp
    if tp > 8 and ep == 1:
        return None
    return ParallelLayout(tp=tp, dp=dp, pp=pp, ep=min(ep, tp * dp))
