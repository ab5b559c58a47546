"""Tables of measured expert layers: read where they are, interpolated, and never needed."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from moesaic.parallel.layout import ParallelLayout
from moesaic.plan.hardware import load_cluster
from moesaic.plan.models import load_model
from moesaic.plan.serving.estimate import estimate_serving
from moesaic.plan.serving.measured_tables import ExpertLayer, MeasuredTables, find_tables, interpolate


def tables_of(root: Path, times: dict[int, float]) -> MeasuredTables:
    """A folder like the package's: one layer of Qwen3-30B-A3B on one H200, slower in an older version."""
    for version, factor in (("0.9.0", 100.0), ("0.12.0", 1.0)):
        folder = root / "h200_sxm" / "moe" / "vllm" / version
        folder.mkdir(parents=True)
        rows = [
            {"moe_dtype": "bfloat16", "num_tokens": tokens, "hidden_size": 2048, "inter_size": 768, "topk": 8,
             "num_experts": 128, "moe_tp_size": 1, "moe_ep_size": 1, "distribution": kind, "latency": latency * factor}
            for tokens, latency in times.items()
            for kind in ("balanced", "power_law_1.01")
        ]  # fmt: skip
        pq.write_table(pa.Table.from_pylist(rows), folder / "moe_perf.parquet")
    return MeasuredTables(root)


def test_a_layer_is_found_and_interpolated(tmp_path: Path) -> None:
    tables = tables_of(tmp_path, {1: 0.1, 4: 0.4, 16: 0.3})
    layer = ExpertLayer(2048, 768, 8, 128, 1, 1)
    assert tables.expert_seconds("h200", "vllm", "bf16", layer, 2) == pytest.approx(2e-4)
    assert tables.expert_seconds("h200", "vllm", "bf16", layer, 16) == pytest.approx(4e-4)  # never less than before
    assert tables.expert_seconds("h200", "vllm", "bf16", layer, 64) == pytest.approx(16e-4)
    assert tables.expert_seconds("h200", "vllm", "fp8", layer, 2) is None
    assert tables.expert_seconds("h100", "vllm", "bf16", layer, 2) is None
    assert tables.expert_seconds("h200", "sglang", "bf16", layer, 2) is None


def test_an_estimate_takes_what_was_measured(tmp_path: Path) -> None:
    model = load_model("qwen3-30b-a3b")
    asked = {"prompt": 512, "output": 128, "concurrency": 8, "backend": "vllm"}
    plain = estimate_serving(model, load_cluster("H200"), ParallelLayout(), **asked)  # type: ignore[arg-type]
    slow = tables_of(tmp_path, {1: 5.0, 10000: 5.0})
    with_tables = estimate_serving(model, load_cluster("H200"), ParallelLayout(), **asked, tables=slow)  # type: ignore[arg-type]
    assert 48 * 5.0 > with_tables.tpot_ms > 3 * plain.tpot_ms  # halfway, by ratio
    elsewhere = estimate_serving(model, load_cluster("H100"), ParallelLayout(), **asked, tables=slow)  # type: ignore[arg-type]
    assert elsewhere.tpot_ms == pytest.approx(
        estimate_serving(model, load_cluster("H100"), ParallelLayout(), **asked).tpot_ms  # type: ignore[arg-type]
    )


def test_the_ends_of_a_curve() -> None:
    curve = ([1.0, 8.0], [1e-5, 3e-5])
    assert interpolate(curve, 0.5) == 1e-5
    assert interpolate(curve, 16) == pytest.approx(6e-5)
    tables = find_tables()
    assert tables is None or tables.root.is_dir()
