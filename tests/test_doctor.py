"""The doctor tells what is there, and for what is missing the command that helps."""

from __future__ import annotations

import json
from importlib.metadata import PackageNotFoundError, version

import pytest
import torch

from moesaic import doctor
from moesaic.cli import main
from moesaic.kernels import hardware, native
from moesaic.kernels.hardware import Processor
from moesaic.kernels.native import build


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "READ", 1 << 16)
    monkeypatch.setattr(doctor, "SIZE", 64)


def test_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 0
    told = {finding["name"]: finding for finding in json.loads(capsys.readouterr().out)["findings"]}
    assert told["torch"]["found"] == torch.__version__
    assert "float32" in told["dtypes"]["found"]
    assert told["compiled kernels"]["fine"] == (native.kernels() is not None)


@pytest.mark.parametrize(
    ("machine", "flags", "told"),
    [
        ("x86_64", "avx512_vnni", "fast here: float32; training uses float32"),
        ("x86_64", "amx_bf16 avx512_bf16", "fast here: float32, bfloat16 (amx_bf16); training uses bfloat16"),
        ("aarch64", "asimdhp", "fast here: float32; training uses float32"),
    ],
)
def test_the_dtype_that_training_uses_is_reported(monkeypatch: pytest.MonkeyPatch, machine, flags, told) -> None:
    monkeypatch.setattr(hardware, "device", lambda: torch.device("cpu"))
    monkeypatch.setattr(hardware, "processor", lambda: Processor(machine, frozenset(flags.split())))
    assert told == next(finding.found for finding in doctor.examine() if finding.name == "dtypes")


def test_what_is_missing_comes_with_its_remedy(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    def without_ray(package: str) -> str:
        if package == "ray":
            raise PackageNotFoundError(package)
        return version(package)

    monkeypatch.setattr(doctor, "version", without_ray)
    monkeypatch.setattr(native, "built", lambda: build.NotBuilt("there is no C compiler"))
    monkeypatch.setattr(build, "compiler", lambda: None)
    found = {finding.name: finding for finding in doctor.examine()}
    assert not found["ray"].fine and "moesaic[cluster]" in found["ray"].remedy
    assert not found["compiled kernels"].fine and "compiler" in found["compiled kernels"].remedy
    assert found["transformers"].fine
    assert main(["doctor"]) == 0  # a missing extra is no failure
    assert "pip install 'moesaic[cluster]'" in capsys.readouterr().out


def test_a_package_that_everything_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    def other(package: str) -> str:
        if package == "pydantic":
            raise PackageNotFoundError(package)
        return "0.1" if package == "rich" else version(package)

    assert next(doctor.examine()).fine
    monkeypatch.setattr(doctor, "version", other)
    first = next(doctor.examine())
    assert not first.fine and "pydantic" in first.found and "rich" in first.found and "torch" not in first.found
    assert first.remedy.startswith("pip install 'pydantic>=")

    def nothing(package: str) -> list[str]:
        raise PackageNotFoundError(package)

    monkeypatch.setattr(doctor, "requires", nothing)
    first = next(doctor.examine())
    assert not first.fine and first.remedy == "pip install -e ."
