"""The quickstart from an existing model: upcycled with the same outputs, fine-tuned, quantized to 4 bits."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from rich.console import Console

import moesaic
from moesaic.quickstart.real import RealLife
from tests import forked
from tests.random_models import save_random, small_config
from tests.serve.made import TEXTS, VOCABULARY


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("dense") / "model"
    sizes = {"hidden": 64, "ffn": 128, "layers": 2, "heads": (4, 2), "max_position_embeddings": 512}
    return save_random(small_config("llama", VOCABULARY, eos_token_id=0, **sizes), directory, TEXTS)


def test_from_dense_to_served(dense: Path, tmp_path: Path) -> None:
    out = tmp_path / "life"
    ended = forked.run(["quickstart", "--model", str(dense), "--out", str(out), "align.stages.0.steps=3"])
    assert ended.returncode == 0, ended.stderr[-2000:]
    assert "Response (" in ended.stdout
    known = json.loads((out / "quickstart.json").read_text())
    assert list(known) == ["machine", "upcycled", "sft", "small", "evaluated"]
    assert known["upcycled"]["upcycled"] and known["upcycled"]["parameters"] > known["upcycled"]["parameters_before"]
    assert known["sft"]["step"] == 3
    plain, mixture = (moesaic.load(place).logits([[5, 6, 7, 8]])[0] for place in (dense, out / "mixture"))
    torch.testing.assert_close(plain, mixture, rtol=1e-4, atol=1e-4)
    assert "Quantized to 4 bits" in (out / "report.html").read_text()


def test_a_model_that_is_not_there(tmp_path: Path) -> None:
    ended = forked.run(["quickstart", "--model", str(tmp_path / "none"), "--out", str(tmp_path)])
    assert ended.returncode == 2 and "no such" in ended.stderr


def test_a_directory_of_the_last_version_keeps_its_stages(tmp_path: Path) -> None:
    (tmp_path / "taught").mkdir()
    (tmp_path / "quickstart.json").write_text('{"machine": {}, "begun": {"active": 1}, "taught": {"step": 3}}')
    life = RealLife(tmp_path, Console(), source="smollm2")
    assert list(life.known) == ["machine", "upcycled", "sft"] and life.known["sft"] == {"step": 3}
    assert life.models()["SFT"].is_dir() and not (tmp_path / "taught").exists()
