"""Perplexity beside `transformers`' own loss, and windows that leave no token out."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
import transformers

from moesaic.cli import main
from moesaic.data.plain_text import builtin_text
from moesaic.evaluate.suites import SuiteContext
from moesaic.evaluate.suites.perplexity import Perplexity
from moesaic.model.directory import load
from moesaic.model.perplexity import perplexity
from tests.compress.made import make


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("plain") / "model")


def test_one_window_is_the_loss_of_transformers(model: Path) -> None:
    ours = load(model)
    assert ours.tokenizer is not None
    tokens = ours.tokenizer.encode(builtin_text()[:600])[:200]
    theirs = transformers.AutoModelForCausalLM.from_pretrained(model).eval()
    with torch.no_grad():
        loss = theirs(torch.tensor([tokens]), labels=torch.tensor([tokens])).loss
    assert perplexity(ours, tokens, 256, 256).perplexity == pytest.approx(math.exp(loss), rel=1e-4)


def test_a_stride_counts_every_token_once_with_what_came_before(model: Path) -> None:
    ours = load(model)
    tokens = [int(number) for number in torch.randint(0, 300, (157,))]
    found = perplexity(ours, tokens, 64, 16)
    assert found.predicted == 156
    whole, last = 0.0, 0
    for end in [64, 80, 96, 112, 128, 144, 157]:  # each window's tokens that no window before has
        start = {157: 96}.get(end, end - 64)
        logits = ours.logits([tokens[start:end]])[0].log_softmax(-1)
        for place in range(max(last, start + 1), end):
            whole -= float(logits[place - start - 1, tokens[place]])
        last = end
    assert found.nats == pytest.approx(whole, rel=1e-4)
    assert perplexity(ours, tokens, 64, 64).predicted == 157 - 3


def test_bits_of_bytes_that_were_predicted(model: Path, tmp_path: Path) -> None:
    """The first token of a window is not predicted, so its bytes say nothing of how many bits one takes."""
    (tmp_path / "text.txt").write_text(builtin_text()[:900])
    ours = load(model)
    for window in (2, 4, 0):
        found = Perplexity(window=window).run(ours, SuiteContext(tmp_path / "text.txt"))
        a_token = found["nats_per_token"] / math.log(2)
        assert found["bits_per_byte"] == pytest.approx(a_token * found["tokens"] / 900, rel=1e-6)


def test_the_command(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "text.txt").write_text(builtin_text()[:900])
    words = ["evaluate", str(model), "--suite", "perplexity", "--data", str(tmp_path / "text.txt"), "--json"]
    assert main([*words, "window=64", "stride=32"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["perplexity"] > 1 and told["window"] == 64 and told["stride"] == 32
    assert told["predicted"] == told["tokens"] - 1
    for wrong in (["window=100000"], ["window=64", "stride=65"], ["wndow=3"], ["window=1"]):
        assert main([*words, *wrong]) == 2
    (tmp_path / "text.txt").write_text("")
    assert main(words) == 2
