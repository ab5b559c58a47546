"""One matrix for every method: it makes the model smaller, it is read, it serves, and a killed run goes on."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import moesaic
from moesaic.compress import layers, layerwise
from moesaic.compress.compress import CompressionRequest, compress
from moesaic.compress.job import Job
from moesaic.compress.layerwise import LayerwiseCompressor
from moesaic.compress.methods import Compressor
from moesaic.methods import Method, build
from moesaic.model.directory import load
from tests.compress.made import make
from tests.matrix import COMPRESSORS

WISH = CompressionRequest(samples=4, length=64, check_tokens=64, min_expert_tokens=16)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    return cache(lambda kind: make(tmp_path_factory.mktemp("plain") / "model", kind))


@pytest.fixture(scope="module")
def model(made: Callable[[str], Path]) -> Path:
    return made("qwen3_moe")


@pytest.fixture(scope="module")
def compressed(made: Any, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, dict[str, Any]]]:
    """The model by each method, undisturbed, and what is told of it."""

    @cache
    def once(name: str) -> tuple[Path, dict[str, Any]]:
        out = tmp_path_factory.mktemp("compressed") / name
        return out, compress(made(COMPRESSORS[name].kind), built(name), out, WISH)

    return once


def built(name: str) -> Compressor:
    return build(Method(name, COMPRESSORS[name].options), Compressor, "test")  # type: ignore[type-abstract]


@pytest.mark.parametrize("name", COMPRESSORS)
class TestEveryCompressor:
    def test_smaller_read_back_and_the_same_tokens_in_any_batch(self, name: str, made: Any, compressed: Any) -> None:
        case = COMPRESSORS[name]
        out, told = compressed(name)
        model = made(case.kind)
        assert told["bytes"] <= case.bytes_left * told["bytes_before"]
        assert told["bits_per_weight"] == pytest.approx(told["bytes"] * 8 / told["parameters"], abs=1e-3)
        assert told["perplexity"] > 0 and (out / "moesaic.json").is_file()
        small, plain = load(out), load(model)
        prompts = [[5, 6, 7, 8], [9, 10], [11, 12, 13]]
        if case.logit_change is not None:
            off = torch.cat(small.logits(prompts)) - torch.cat(plain.logits(prompts))
            assert off.norm() / torch.cat(plain.logits(prompts)).norm() < case.logit_change
        engine = moesaic.Engine(small)
        together = engine.generate(prompts, max_tokens=6, temperature=0.0)
        alone = [engine.generate([prompt], max_tokens=6, temperature=0.0)[0] for prompt in prompts]
        assert [answer.tokens for answer in together] == [answer.tokens for answer in alone]

    def test_a_killed_run_goes_on_to_the_same_weights(
        self, name: str, made: Any, tmp_path: Path, compressed: Any
    ) -> None:
        model = made(COMPRESSORS[name].kind)

        def stop(what: str, done: int, total: int) -> None:
            if done >= 1:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            compress(model, built(name), tmp_path / "part", WISH, stop)
        assert not (tmp_path / "part").exists()
        compress(model, built(name), tmp_path / "part", WISH)
        files = [(out / "model.safetensors").read_bytes() for out in (compressed(name)[0], tmp_path / "part")]
        assert files[0] == files[1]
        assert not list(tmp_path.glob(".*compressing"))


def test_a_resumed_run_does_not_do_layers_again(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    honest = layers.load_block

    def plural(job: Job, path: str, *rest: Any) -> Any:
        done.append(path)
        return honest(job, path, *rest)

    monkeypatch.setattr(layerwise, "load_block", plural)

    def stop(what: str, number: int, total: int) -> None:
        if number == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        compress(model, built("gptq"), tmp_path / "out", WISH, stop)
    compress(model, built("gptq"), tmp_path / "out", WISH)
    assert done == ["layers.0", "layers.1"]


@pytest.mark.figures
def test_gptq_loses_less_than_rounding(model: Path, tmp_path: Path) -> None:
    """At the outputs of the matrices of the first layer, which see the same inputs under both."""
    errors = {}
    options = {"bits": 3, "group": 32, "symmetric": False}
    for name in ("rtn", "gptq"):
        method = build(Method(name, options), Compressor, "test")  # type: ignore[type-abstract]
        assert isinstance(method, LayerwiseCompressor)
        seen_by = build(Method("gptq", options), Compressor, "test")  # type: ignore[type-abstract]

        class Both(type(seen_by)):  # type: ignore[misc]
            def matrix_compressor(self, job: Job, method: Any = method) -> Any:
                return method.matrix

        told = compress(model, Both(**options), tmp_path / name, WISH)
        errors[name] = told["layer_errors"][0]["errors"]
    assert errors["gptq"].keys() == errors["rtn"].keys()
    for kind, error in errors["gptq"].items():
        assert error < 0.95 * errors["rtn"][kind], kind


def test_an_expert_that_nobody_chooses_sees_the_tokens_nearest_to_it(tmp_path: Path) -> None:
    """The last expert's router row is the first one's turned round, and the first always wins."""
    from moesaic import kernels
    from moesaic.compress.calibration_statistics import CalibratedLayer, RecordingKernels

    model = load(make(tmp_path / "model"))
    block = model.layers[0]
    router = block.ffn.router  # type: ignore[union-attr]
    x_TD = torch.randn(40, 64)
    with torch.no_grad():
        router.weight.zero_()  # type: ignore[union-attr]
        router.weight[3, 0] = -1.0  # type: ignore[union-attr, index]
        x_TD[:, 0] = torch.linspace(1, 2, 40)
    recorder = RecordingKernels(kernels.choose("cpu"))
    with torch.no_grad():
        block.ffn(x_TD, layers.context_of(model.config, [40], recorder, model.device))  # type: ignore[operator, arg-type]
    calibrated = CalibratedLayer(block, recorder, 8, iter, x_TD)  # type: ignore[arg-type]
    unloved = calibrated.statistics("ffn.gate_up_EGD.3")
    assert unloved is not None and unloved.share == 0
    assert torch.equal(unloved.rows_TI.sort(0).values, x_TD[:8].sort(0).values)  # the least repelled
    down = calibrated.statistics("ffn.down_EDF.3")
    assert down is not None and down.rows_TI.shape == (8, 32)
    loved = calibrated.statistics("ffn.gate_up_EGD.0")
    assert loved is not None and len(loved.rows_TI) == 40 * loved.share > 8
