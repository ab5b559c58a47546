"""Serving estimates beside measured runs that no constant was tuned on.

One run of every model, device and engine in `silicon_sample.csv` of aiconfigurator-core 0.12.0, prefill and decode not
split: of those not tuned on, the one whose text has the smallest sha256. `python -m bench.plan_serving`
compares all 1,937.
"""

from __future__ import annotations

import statistics

from moesaic.parallel.layout import parse_layout
from moesaic.plan.hardware import load_cluster
from moesaic.plan.models import load_model
from moesaic.plan.serving.estimate import ServingPlan, estimate_serving

Run = tuple[str, str, str, str, str, int, int, int, int, float, float]
# Model, device, engine, dtype, layout, prompt, output, concurrency, workers, measured TTFT and TPOT in milliseconds.
RUNS: list[Run] = [
    ("deepseek-v3", "b200", "sglang", "fp4", "tp=4 ep=4", 8192, 1024, 8, 1, 369.3, 11.62),
    ("deepseek-v3", "b200", "trtllm", "fp8", "tp=8", 1024, 1024, 8, 1, 153.3, 6.816),
    ("deepseek-v3", "b300", "sglang", "fp8", "tp=8", 8192, 1024, 4, 1, 2050.0, 13.98),
    ("deepseek-v3", "gb200", "trtllm", "fp4", "tp=8 ep=8", 4000, 1000, 320, 8, 350.2, 17.35),
    ("deepseek-v3", "h200", "sglang", "fp8", "tp=8", 1024, 1024, 8, 1, 244.9, 12.47),
    ("deepseek-v3", "h200", "trtllm", "fp8", "tp=8 ep=8", 1024, 8192, 4, 1, 493.9, 7.106),
    ("glm-5", "b200", "sglang", "fp8", "tp=8", 1024, 8192, 4, 1, 297.2, 17.04),
    ("glm-5", "b300", "sglang", "fp8", "tp=8", 1024, 1024, 32, 1, 209.6, 24.11),
    ("glm-5", "h200", "sglang", "fp8", "tp=8", 1024, 1024, 4, 1, 311.6, 17.91),
    ("gpt-oss-120b", "b200", "trtllm", "fp4", "tp=2", 1024, 1024, 4, 1, 42.04, 2.821),
    ("gpt-oss-120b", "b200", "vllm", "fp4", "tp=1", 1024, 8192, 16, 1, 60.12, 5.399),
    ("gpt-oss-120b", "h100", "trtllm", "fp8", "tp=4", 4000, 1000, 192, 4, 1591.0, 48.79),
    ("gpt-oss-120b", "h100", "vllm", "fp4", "tp=2", 8192, 1024, 32, 1, 581.1, 16.51),
    ("gpt-oss-120b", "h200", "trtllm", "fp4", "tp=4", 1024, 1024, 64, 1, 165.2, 11.4),
    ("gpt-oss-120b", "h200", "vllm", "fp4", "tp=4", 8192, 1024, 16, 1, 293.7, 7.023),
    ("kimi-k2", "b200", "vllm", "int4", "tp=8", 1024, 8192, 4, 1, 117.1, 10.38),
    ("kimi-k2", "b300", "vllm", "fp4", "tp=4", 1024, 1024, 16, 1, 109.1, 12.47),
    ("kimi-k2", "h200", "vllm", "int4", "tp=8", 1024, 1024, 16, 1, 192.8, 16.35),
    ("llama-3-70b", "b200", "trtllm", "fp8", "tp=2", 1024, 8192, 128, 1, 367.1, 20.86),
    ("llama-3-70b", "b200", "vllm", "fp4", "tp=2", 8192, 1024, 32, 1, 808.2, 20.95),
    ("llama-3-70b", "h100", "vllm", "fp8", "tp=8", 8192, 1024, 4, 1, 300.8, 10.22),
    ("llama-3-70b", "h200", "trtllm", "fp8", "tp=4", 8192, 1024, 8, 1, 567.1, 10.98),
    ("llama-3-70b", "h200", "vllm", "fp8", "tp=8", 8192, 1024, 4, 1, 303.2, 8.762),
    ("llama-3-8b", "h100", "trtllm", "bf16", "tp=2", 2048, 256, 8, 1, 254.9, 5.525),
    ("llama-3-8b", "h200", "sglang", "fp8", "tp=1", 4000, 2000, 128, 1, 830.1, 29.96),
    ("llama-3-8b", "h200", "vllm", "fp8", "tp=2", 8000, 1000, 112, 1, 202.6, 19.73),
    ("minimax-m2", "b200", "vllm", "fp8", "tp=4", 8192, 1024, 16, 1, 324.1, 12.03),
    ("minimax-m2", "b300", "vllm", "fp4", "tp=1", 8192, 1024, 4, 1, 185.5, 8.029),
    ("minimax-m2", "h100", "vllm", "fp8", "tp=4 ep=4", 1024, 1024, 4, 1, 85.66, 10.09),
    ("minimax-m2", "h200", "vllm", "fp8", "tp=8", 8192, 1024, 4, 1, 197.9, 8.416),
    ("qwen3-235b-a22b", "h100", "trtllm", "fp8", "tp=4 ep=4", 1024, 256, 64, 1, 346.7, 35.02),
    ("qwen3-235b-a22b", "h200", "sglang", "fp8", "tp=4", 2000, 100, 7, 1, 553.8, 22.28),
    ("qwen3-235b-a22b", "h200", "vllm", "fp8", "tp=2 ep=2", 8000, 100, 4, 1, 819.0, 55.8),
    ("qwen3-32b", "b200", "trtllm", "fp4", "tp=2", 15000, 500, 416, 32, 719.3, 13.66),
    ("qwen3-32b", "gb200", "trtllm", "bf16", "tp=2", 2000, 500, 32, 2, 610.0, 28.65),
    ("qwen3-32b", "h100", "sglang", "bf16", "tp=4", 4096, 128, 16, 1, 1384.0, 18.69),
    ("qwen3-32b", "h100", "trtllm", "fp8", "tp=1", 1024, 256, 8, 1, 272.8, 16.99),
    ("qwen3-32b", "h100", "vllm", "bf16", "tp=8", 1024, 1024, 16, 1, 100.8, 8.925),
    ("qwen3.5-397b-a17b", "b200", "sglang", "fp8", "tp=8", 1024, 8192, 8, 1, 301.4, 8.88),
    ("qwen3.5-397b-a17b", "b300", "sglang", "bf16", "tp=4", 1024, 1024, 4, 1, 159.0, 7.561),
    ("qwen3.5-397b-a17b", "h200", "sglang", "fp8", "tp=8 ep=8", 1024, 1024, 32, 1, 377.1, 22.08),
]


def estimates(engine: str | None = None) -> list[tuple[ServingPlan, float]]:
    """Each with the relative error of output tokens per second."""
    made = []
    for model, device, own, dtype, layout, prompt, output, clients, workers, ttft, tpot in RUNS:
        plan = estimate_serving(
            load_model(model), load_cluster(f"64x{device}"), parse_layout(layout), prompt=prompt, output=output,
            concurrency=clients, dtype=dtype, backend=engine or own, workers=workers,
        )  # fmt: skip
        measured = clients * output / (ttft + tpot * (output - 1)) * 1e3
        made.append((plan, plan.output_tokens_per_second / measured - 1))
    return made


def test_half_of_the_runs_are_within_fifteen_percent() -> None:
    assert statistics.median(abs(error) for _, error in estimates()) <= 0.15


def test_the_stated_error_covers_most_runs() -> None:
    covered = [abs(error) <= plan.expected_error for plan, error in estimates()]
    assert sum(covered) >= 0.8 * len(covered)  # of 40 runs that 90 % of all should be within


def test_an_unknown_engine_costs_little() -> None:
    assert statistics.median(abs(error) for _, error in estimates("typical")) <= 0.2
