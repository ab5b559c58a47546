"""Calibration: kinds of text in turns, as many samples as it takes, and what it is for: text unlike the calibration's.

pytest tests/compress/test_calibration.py
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from moesaic.cli import main
from moesaic.compress import calibration, convergence
from moesaic.compress.calibration_statistics import InputStatistics
from moesaic.compress.gptq_rounding import gptq
from moesaic.compress.job import Job
from moesaic.compress.layer_store import LayerStore
from moesaic.data.plain_text import builtin_text
from moesaic.kernels.grid import Grid
from moesaic.model.directory import Parts, load
from moesaic.model.formats.opening import open_checkpoint
from tests.compress.made import make


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("model") / "model", "llama")


def test_every_prefix_has_its_share_of_each_kind() -> None:
    kinds = [[[kind]] * count for kind, count in ((1, 9), (2, 3), (3, 6))]
    found = [piece[0] for piece in calibration.mixed(kinds, 12)]
    assert found[:9] == [1, 2, 3] * 3 and found[9:] == [1, 3, 1]


def test_what_the_model_writes_is_its_own(path: Path) -> None:
    model = load(path)
    starts = [[5, 6, 7, 8, 9], [50, 51, 52, 53, 54]]
    first, second = calibration.written_by(model, starts, 40)
    assert len(first) == len(second) == 40 and first[:4] == starts[0][:4] and first[4:] != second[4:]
    assert calibration.written_by(model, starts, 40)[0] == first
    # Likelier than chance under the model: drawn from it.
    drawn = float(model.logprobs([first])[0].mean())
    chance = torch.randint(0, 320, (400,), generator=torch.Generator().manual_seed(0)).tolist()
    assert drawn > float(model.logprobs([chance[:256]])[0].mean()) + 0.3


def test_rounding_fitted_to_several_kinds_loses_less_on_another() -> None:
    """Kinds of text are mixtures of common directions; one kind alone says nothing of some of them."""
    generator = torch.Generator().manual_seed(0)
    directions = torch.randn(8, 64, 64, generator=generator) * torch.logspace(0, -2, 64)

    def text(*parts: int) -> torch.Tensor:
        return torch.cat([torch.randn(384 // len(parts), 64, generator=generator) @ directions[n] for n in parts])

    weight_OI = torch.randn(64, 64, generator=generator)
    unlike = text(1, 2, 3, 4)

    def loss(rows_TI: torch.Tensor) -> float:
        made = gptq(weight_OI, InputStatistics(rows_TI), Grid(3, 32, symmetric=False), 0.01).dense()
        return float((unlike @ (made - weight_OI).T).square().mean())

    assert loss(text(0, 1, 2, 3)) < 0.8 * loss(text(0))


def job_of(path: Path, sequences: list[list[int]], out: Path) -> Job:
    return Job(Parts(open_checkpoint(path)), path, LayerStore(out, {"of": len(sequences)}), sequences)


def test_more_samples_are_read_where_they_tell_more(path: Path, tmp_path: Path) -> None:
    tokenizer = load(path).tokenizer
    assert tokenizer is not None
    pieces = calibration.sequences(builtin_text(), tokenizer, 64, 32, "test")
    varied = convergence.enough_samples(job_of(path, pieces, tmp_path / "varied"))
    same = convergence.enough_samples(job_of(path, [pieces[0]] * 64, tmp_path / "same"))
    assert same == 2 * convergence.FEWEST + convergence.ASIDE < varied <= 64


def test_the_report_has_text_like_and_unlike(path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = tmp_path / "text.txt"
    data.write_text("the quick brown fox jumps over the lazy dog and runs away. " * 400)
    asked = ["compress", str(path), "--method", "gptq", "--out", str(tmp_path / "out"), "--data", str(data), "--json"]
    assert main([*asked, "--samples", "8", "--length", "32", "--check-tokens", "128", "turns=0"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["calibration_tokens"] == 8 * 32
    for kind in ("", "unlike_"):
        assert told[f"{kind}perplexity"] > 1 and told[f"{kind}perplexity_before"] > 1
    assert told["unlike_perplexity_before"] != told["perplexity_before"]


def kinds_of(sequences: list[list[int]], texts: dict[str, str]) -> Iterator[str]:
    for tokens in sequences:
        yield next((kind for kind, text in texts.items() if str(tokens)[1:-1] in text), "own")


def test_half_is_the_users_text_and_the_rest_of_other_kinds(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from moesaic.compress import compress as program
    from moesaic.compress.methods.rtn import RoundToNearest

    class Reader(RoundToNearest):
        reads_text = True

        def run(self, job: Job) -> Any:
            seen.extend(job.sequences)
            return super().run(job)

    seen: list[list[int]] = []
    tokenizer = load(path).tokenizer
    assert tokenizer is not None
    data = tmp_path / "text.txt"
    data.write_text("".join(f"line {n} of a text about {n * n} things; " for n in range(600)))
    wish = program.CompressionRequest(data=data, samples=16, length=32, check_tokens=0)
    program.compress(path, Reader(), tmp_path / "out", wish)
    texts = {"user": str(tokenizer.encode(data.read_text())), "builtin": str(tokenizer.encode(builtin_text()[:9000]))}
    found = list(kinds_of(seen, texts))
    assert [found.count(kind) for kind in ("user", "own", "builtin")] == [8, 4, 4]
    assert {"user", "own", "builtin"} <= set(found[-8:])
