"""Calibration: constants come back from timings made of them; the file is whole or refused."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest

from moesaic.errors import UserError
from moesaic.plan import calibrate, cost, hardware
from moesaic.plan.calibrate import Timing, fit, known_device, measure, write_entry
from moesaic.plan.hardware import Device, load_cluster, load_device

H200 = load_device("h200")


def timings_of(device: Device, noise: float = 0.0, outliers: int = 0) -> list[Timing]:
    """As a machine with exactly these constants would give them."""
    draw = random.Random(7)

    def scattered(seconds: float) -> float:
        return seconds * (1 + draw.uniform(-noise, noise))

    found = [Timing("launch", scattered(device.launch)) for _ in range(3)]
    for bytes_ in (2e9, 4e9, 8e9):
        found.append(Timing("copy", scattered(cost.elementwise(bytes_, device)), bytes_=bytes_))
    for dtype in ("bf16", "fp32"):
        for width in (2048, 4096, 8192):
            for k in (128, 512, 2048, 8192):
                seconds = cost.matmul(width, width, k, device, dtype)
                found.append(Timing("matmul", scattered(seconds), dtype, width, width, k))
    flops = 1e12
    found.append(Timing("attention", flops / (device.peak("bf16") * device.attention) + device.launch, flops=flops))
    for number in range(outliers):
        place = 6 + 5 * number
        found[place] = replace(found[place], seconds=20 * found[place].seconds)
    return found


def test_constants_come_back() -> None:
    truth = replace(H200, matmul={"default": 0.8, "bf16": 0.77, "fp32": 0.6}, k_half=150.0, memory=0.85, launch=5e-6)
    entry = fit(timings_of(truth), H200)
    assert entry["matmul"]["bf16"] == pytest.approx(0.77, rel=0.01)
    assert entry["matmul"]["fp32"] == pytest.approx(0.6, rel=0.01)
    assert entry["k_half"] == pytest.approx(150, rel=0.05)
    assert entry["memory"] == pytest.approx(0.85, rel=0.01)
    assert entry["launch"] == pytest.approx(5e-6)
    assert entry["attention"] == pytest.approx(H200.attention, rel=0.01)


def test_noise_and_outliers_do_not_count() -> None:
    truth = replace(H200, matmul={"default": 0.8, "bf16": 0.7, "fp32": 0.7}, k_half=120.0)
    entry = fit(timings_of(truth, noise=0.03, outliers=4), H200)
    assert entry["matmul"]["bf16"] == pytest.approx(0.7, rel=0.05)
    assert entry["k_half"] == pytest.approx(120, rel=0.4)


def test_of_an_unknown_device_the_rates_are_the_peaks(tmp_path: Path) -> None:
    """And what it then predicts is what was measured, for sizes that were not measured too."""
    truth = replace(load_device("cpu"), k_half=80.0, flops={"fp32": 50e9, "bf16": 90e9}, bandwidth=1e12, launch=1e-6)
    entry = fit(timings_of(truth), load_device("cpu"), units=2, known=False)
    write_entry({"base": "cpu", **entry}, file=tmp_path / "own.yaml")
    found = load_device("here", own=tmp_path / "own.yaml")
    for m, n, k in ((300, 700, 900), (4096, 4096, 4096), (1000, 1000, 64)):
        assert cost.matmul(m, n, k, found, "fp32") == pytest.approx(cost.matmul(m, n, k, truth, "fp32"), rel=0.05)
    assert found.peak("fp16") >= found.peak("fp32")


def test_nothing_measured_is_an_error() -> None:
    with pytest.raises(UserError, match="no launch"):
        fit([], H200)
    some = [Timing("launch", 1e-6), Timing("copy", 1.0, bytes_=1e12)]
    with pytest.raises(UserError, match="no matmul was measured"):
        fit(some, H200)
    with pytest.raises(UserError, match="large enough"):
        fit([*some, Timing("matmul", 1e-7, "bf16", 16, 16, 16)], H200)


def test_a_drivers_name_is_recognised() -> None:
    assert known_device("NVIDIA H200") == "h200"
    assert known_device("NVIDIA A100-SXM4-80GB") == "a100"
    assert known_device("NVIDIA GB200") == "gb200"
    assert known_device("NVIDIA GeForce RTX 4090") == "rtx4090"
    assert known_device("Tesla T4") is None


def test_the_entry_stands_beside_others_and_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = tmp_path / "cache" / "hardware.yaml"
    monkeypatch.setattr(hardware, "OWN", own)
    write_entry({"base": "h100", "price": 1.0}, name="lab")
    write_entry({"base": "h200", "matmul": {"bf16": 0.5}, "launch": 1e-5})
    cluster = load_cluster("1xhere")
    assert cluster.device.sustained("bf16") == pytest.approx(0.5 * H200.peak("bf16"))
    assert (cluster.device.launch, load_device("lab").price) == (1e-5, 1.0)
    assert [path.name for path in own.parent.iterdir()] == ["hardware.yaml"]  # nothing half is left


def test_a_bad_entry_changes_nothing(tmp_path: Path) -> None:
    file = write_entry({"base": "h200"}, file=tmp_path / "own.yaml")
    before = file.read_text()
    for wrong in ({"base": "h200", "launch": -1.0}, {"base": "nothing"}, {"base": "h200", "colour": 1.0}):
        with pytest.raises(UserError):
            write_entry(wrong, file=file)
        assert file.read_text() == before


@pytest.mark.parametrize(
    "content", ["here: {base: h100, launch", "- a\n- b\n", "here: 5\n", "here: {a: 1}\nhere: {}\n"]
)
def test_a_broken_file_is_refused_with_the_way_out(tmp_path: Path, content: str) -> None:
    file = tmp_path / "own.yaml"
    file.write_text(content)
    with pytest.raises(UserError, match="calibrate again") as error:
        write_entry({"base": "h200"}, file=file)
    assert "own.yaml" in str(error.value)
    assert file.read_text() == content
    file.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match="not text"):
        write_entry({"base": "h200"}, file=file)


def test_this_machine_can_be_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """That it runs and gives numbers one can plan with; how large they are is the machine's business."""
    monkeypatch.setattr(calibrate, "WIDTHS", {"cpu": (128, 256)})
    monkeypatch.setattr(calibrate, "COPIED", {"cpu": (1 << 20, 1 << 21)})
    entry = measure("cpu", seconds=0.1)
    write_entry(entry, file=tmp_path / "own.yaml")
    here = load_device("here", own=tmp_path / "own.yaml")
    assert here.sustained("fp32") > 1e8 and here.bandwidth > 1e8 and 0 < here.launch < 1e-2
    assert 0 < here.attention < 100
    with pytest.raises(UserError, match="cpu or cuda"):
        calibrate.machine_facts("tpu")
