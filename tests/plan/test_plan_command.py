"""`moesaic plan` as people and scripts call it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from moesaic.__main__ import main

TRAIN = ["plan", "--model", "Llama-3-8B", "--cluster", "8xH100", "--train", "--batch", "64", "--seq", "4096"]
SERVE = ["plan", "--model", "GPT-OSS-120B", "--cluster", "4xH200", "--serve", "--in", "1024", "--out", "128"]


def call(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = main(list(words))
    out, err = capsys.readouterr()
    return int(code or 0), out, err


def test_training_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = call(
        capsys, *TRAIN, "--layout", "tp=2 dp=4", "--recompute", "selective", "--overlap", "tp,dp", "--json"
    )
    report = json.loads(out)
    assert code == 0
    for key in ("step_seconds", "mfu", "tokens_per_second", "bubble", "exposed_communication", "expected_error"):
        assert isinstance(report[key], float), key
    assert report["tokens_per_second"] == pytest.approx(64 * 4096 / report["step_seconds"])
    parts = report["memory_bytes"]
    assert parts["total"] == pytest.approx(sum(size for name, size in parts.items() if name != "total"))
    assert sum(report["seconds"].values()) == pytest.approx(report["step_seconds"], rel=1e-6)
    assert 0 < report["mfu"] < 1 and 0 < report["expected_error"] < 1


def test_searched_layout_is_written_and_taken_again(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file, trace, picture = tmp_path / "layout.json", tmp_path / "trace.json", tmp_path / "step.png"
    code, out, _ = call(capsys, *TRAIN, "--save", str(file), "--trace", str(trace), "--gantt", str(picture), "--json")
    found = json.loads(out)
    assert code == 0 and found["runners_up"] and found["fits"]
    assert json.loads(file.read_text())["parallel"] == found["parallel"]
    assert json.loads(trace.read_text())["traceEvents"]
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert found["simulated_seconds"] == pytest.approx(found["step_seconds"], rel=0.03)
    code, out, _ = call(capsys, *TRAIN, "--layout", str(file), "--recompute", found["recompute"], "--json")
    assert code == 0
    assert json.loads(out)["step_seconds"] == pytest.approx(found["step_seconds"])


def test_in_words(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = call(capsys, *TRAIN)
    assert code == 0
    for word in ("step", "throughput", "MFU", "memory", "Of a step: matmul", "published runs", "Next:"):
        assert word in out


def test_serving_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = call(capsys, *SERVE, "--concurrency", "32", "--layout", "tp=4", "--json")
    report = json.loads(out)
    assert code == 0
    for key in ("ttft_ms", "tpot_ms", "output_tokens_per_second", "tokens_per_second_per_gpu", "expected_error"):
        assert report[key] > 0
    total = report["ttft_ms"] + 127 * report["tpot_ms"]
    assert report["output_tokens_per_second"] == pytest.approx(32 * 128 / total * 1e3, rel=1e-6)
    assert report["tokens_per_second_per_gpu"] == pytest.approx(report["output_tokens_per_second"] / 4)


def test_serving_searches(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = call(capsys, *SERVE, "--json")
    best = json.loads(out)
    assert code == 0 and best["fits"]
    assert all(other["output_tokens_per_second"] <= best["output_tokens_per_second"] for other in best["runners_up"])


def test_devices_of_ones_own(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("mine: {base: h100, bandwidth: 6.7e+12, matmul: {default: 0.9}}\n")
    known = json.loads(call(capsys, *TRAIN, "--layout", "dp=8", "--json")[1])
    words = [word if word != "8xH100" else "8xmine" for word in TRAIN]
    code, out, _ = call(capsys, *words, "--layout", "dp=8", "--hardware", str(file), "--json")
    assert code == 0 and json.loads(out)["step_seconds"] < known["step_seconds"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--model", "GLM-4.5-Airr", "--cluster", "8xH100"], "Did you mean glm-4.5-air"),
        (["--model", "GLM-4.5", "--cluster", "8xH10"], "Did you mean"),
        (["--model", "GLM-4.5", "--cluster", "8xH100"], "does not fit"),
        (["--model", "GLM-4.5", "--cluster", "1xRTX4090", "--serve"], "does not fit"),
        (["--model", "GLM-4.5", "--cluster", "eight"], "no device|how many"),
        (["--model", "missing.yaml", "--cluster", "8xH100"], "no such file"),
        (["--model", "Llama-3-8B", "--cluster", "8xH100", "--layout", "tp=3"], "does not divide"),
        (["--model", "Llama-3-8B", "--cluster", "8xH100", "--recompute", "some"], "One of none"),
        (["--model", "Llama-3-8B", "--cluster", "8xH100", "--dtype", "fp7"], "One of"),
        (["--model", "Llama-3-8B", "--cluster", "8xH100", "--overlap", "tp,xx"], "One of"),
        (["--model", "Llama-3-8B", "--cluster", "8xH100", "--batch", "0"], "from 1 on"),
        (["--model", "Llama-3-8B", "--cluster", "8xH100", "--train", "--serve"], "one of them"),
        (["--model", "Llama-3-8B", "--cluster", "8xH100", "--imbalance", "0.5"], "1 or more"),
        (["--model", "Llama-3-8B", "--cluster", "8xH100", "--layout", "none.json"], "none.json"),
    ],
)
def test_wrong_requests(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    import re

    code, out, err = call(capsys, "plan", *words)
    assert code == 2
    assert not out
    assert re.search(message, err), err


class TestFurtherQuestions:
    def test_what_made_a_run_slow(self, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
        file = tmp_path / "trace.json"
        call(capsys, *TRAIN, "--layout", "pp=4 dp=2", "--trace", str(file))
        code, out, _ = call(capsys, "plan", "whatif", str(file), "--json")
        found = json.loads(out)
        assert code == 0 and found["ranks"] == 4 and found["slowdown"] >= 1
        code, out, _ = call(capsys, "plan", "whatif", str(file))
        assert code == 0 and "GPU hours wasted" in out

    def test_failures(self, capsys: pytest.CaptureFixture[str]) -> None:
        words = ["plan", "failures", "--cluster", "16384xH100", "--checkpoint-seconds", "20", "--json"]
        code, out, _ = call(capsys, *words)
        best = json.loads(out)
        assert code == 0 and 0.85 < best["goodput"] < 0.95
        worse = json.loads(call(capsys, *words, "--interval-minutes", "120")[1])
        assert worse["goodput"] < best["goodput"]
        assert call(capsys, *words, "--elastic")[0] == 2  # without a number of spares it means nothing

    def test_clocks(self, capsys: pytest.CaptureFixture[str]) -> None:
        words = ["--model", "Qwen3-30B-A3B", "--cluster", "4xH200", "--rate", "20", "--seconds", "60"]
        code, out, _ = call(capsys, "plan", "energy", *words, "--json")
        found = {one["policy"]: one for one in json.loads(out)}
        assert code == 0 and found["voltana"]["saved"] >= 0.25 and found["voltana"]["attainment"] >= 0.99
        assert next(iter(found.values()))["saved"] == 0

    def test_separate_experts(self, capsys: pytest.CaptureFixture[str]) -> None:
        words = ["plan", "disaggregate", "--model", "Qwen3-235B-A22B", "--cluster", "32xH800", "--json"]
        decoding = json.loads(call(capsys, *words)[1])
        split = decoding["disaggregated"]
        assert split["attention"] + split["experts"] <= 32 and split["tpot"] <= 0.15
        training = json.loads(call(capsys, *words, "--train")[1])
        assert training["disaggregated"]["seconds"] < training["exposed"]["seconds"]
        assert call(capsys, "plan", "disaggregate", "--model", "Llama-3-8B", "--cluster", "32xH800", "--train")[0] == 2
