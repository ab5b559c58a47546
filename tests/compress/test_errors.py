"""What a user can get wrong about compression, told in one line with exit code 2."""

from __future__ import annotations

import shlex
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from moesaic.atomic import exclusive
from moesaic.cli import main
from moesaic.compress import compress as compressing
from moesaic.compress.layer_store import parts_folder
from moesaic.model import lineage
from tests.compress.made import make


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("plain") / "model", "llama", tie_word_embeddings=True)


@pytest.mark.parametrize(
    "words, problem",
    [
        (["--method", "rtn", "bits=7"], "bits must be one of 1, 2, 3, 4, 5, 6, 8, not 7"),
        (["--method", "rtn", "group=48"], "multiple of 32"),
        (["--method", "gptt"], 'no such method "gptt"'),
        (["--method", "rtn", "bit=4"], "no method that was named has such an option; did you mean bits?"),
        (["--method", "nm", "n=4"], "n must be from 1 to below m"),
        (["--method", "mixed", "bits=9.5"], "bits must be from 2 to 8"),
        (["--method", "prune_experts", "keep=2"], "has no experts"),
        (["--method", "rtn", "--layout", "gguf"], 'no such layout "gguf"'),
        (["--method", "rtn", "--layout", "compressed-tensors", "--ends-bits", "8"], "keeps the embedding"),
        (["--method", "milo", "--layout", "compressed-tensors"], "cannot be kept in"),
        (["--method", "rtn", "--layout", "compressed-tensors", "group=128", "bits=4", "--ends-bits", "7"], "must be 0"),
        (["--method", "students", "depth=0.9"], "0.9 of 2 layers are all of them"),
        (["--method", "gptq", "--samples", "0"], "must be at least 1"),
        (["--method", "gptq", "--samples", "2", "--length", "32"], "--samples: 2 pieces of 32 tokens are 64, and 128"),
        (["--method", "gptq", "--data", "nowhere.txt"], "no such file"),
    ],
)
def test_wrong_requests(
    words: list[str], problem: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compress", str(model), "--out", str(tmp_path / "out"), *words]) == 2
    shown = capsys.readouterr().err
    assert problem in shown and "Traceback" not in shown
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    "words, problem",
    [
        (["gptq"], "codes with zero points"),
        (["rtn", "symmetric=false"], "codes with zero points"),
        (["zeroquant"], "8-bit weights for 8-bit activations"),
        (["mixed", "symmetric=true", "target=transformers"], "codes of several sizes"),
    ],
)
def test_mixtures_that_transformers_could_not_load(
    words: list[str], problem: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = make(tmp_path / "model")
    capsys.readouterr()
    asked = ["compress", str(model), "--out", str(tmp_path / "out"), "--layout", "compressed-tensors"]
    assert main([*asked, "--method", *words]) == 2
    shown = capsys.readouterr().err
    assert f"transformers cannot load a mixture of experts from {problem}" in shown and "Leave out --layout" in shown
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_too_little_text(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "short.txt").write_text("A few words.")
    words = ["compress", str(model), "--method", "gptq", "--out", str(tmp_path / "out")]
    assert main([*words, "--data", str(tmp_path / "short.txt")]) == 2
    assert "too small to calibrate with" in capsys.readouterr().err


@pytest.mark.parametrize("method", ["rtn", "gptq", "mixed"])
def test_weights_that_are_not_finite(
    method: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(model, tmp_path / "model")
    weights = load_file(tmp_path / "model" / "model.safetensors")
    weights["model.layers.1.self_attn.k_proj.weight"][0, 0] = float("nan")
    save_file(weights, tmp_path / "model" / "model.safetensors", {"format": "pt"})
    assert main(["compress", str(tmp_path / "model"), "--method", method, "--out", str(tmp_path / "out")]) == 2
    assert "not finite" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_two_at_once(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["compress", str(model), "--method", "rtn", "--out", str(tmp_path / "out"), "--check-tokens", "0"]
    with exclusive(parts_folder(tmp_path / "out")):
        assert main(words) == 2
        assert "another moesaic is writing here" in capsys.readouterr().err
    (tmp_path / ".out.compressing").mkdir()
    (tmp_path / ".out.compressing" / "request").write_text("another, that was killed")
    assert main(words) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_what_would_be_lost_is_refused_at_once(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    shutil.copytree(model, run)
    shutil.copytree(model, run / "checkpoints" / "step-2")
    words = ["compress", str(run / "checkpoints" / "step-2"), "--method", "rtn", "--check-tokens", "0", "--force"]
    assert main([*words, "--out", str(run)]) == 2
    assert "step-2, which would be lost" in capsys.readouterr().err
    assert (run / "checkpoints" / "step-2" / "model.safetensors").exists()
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.tex").write_text("ten years of work")
    assert main([*words, "--out", str(tmp_path / "home")]) == 2
    assert "holds other things than a model" in capsys.readouterr().err
    assert not parts_folder(tmp_path / "home").exists()  # before any layer was made


def test_killed_while_it_was_measured(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*arguments: object) -> None:
        raise KeyboardInterrupt

    words = ["compress", str(model), "--method", "rtn", "--out", str(tmp_path / "out")]
    with monkeypatch.context() as patch:
        patch.setattr(compressing, "_cost", killed)
        main([*words, "bits=4"])
    assert "perplexity" not in lineage.read(tmp_path / "out")[-1]
    assert main([*words, "bits=3"]) == 2  # another's
    assert "exists already" in capsys.readouterr().err
    assert main([*words, "bits=4"]) == 0
    assert "perplexity" in lineage.read(tmp_path / "out")[-1]
    assert main([*words, "bits=4"]) == 2  # done


def test_show_takes_a_life_as_it_is(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(model, tmp_path / "model")
    (tmp_path / "model" / lineage.FILE).write_text('{"life": [{"stage": 3, "when": 20240101}]}')
    assert main(["show", str(tmp_path / "model")]) == 0
    assert "20240101" in capsys.readouterr().out


def test_what_to_do_next_can_be_copied(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = str(tmp_path / "a small one")
    assert main(["compress", str(model), "--out", out, "--method", "rtn", "--check-tokens", "0"]) == 0
    talk, measure = capsys.readouterr().out.splitlines()[-1].split("    ")
    assert shlex.split(talk.removeprefix("Chat: ")) == ["moesaic", "chat", out]
    assert shlex.split(measure.removeprefix("Evaluate: "))[:3] == ["moesaic", "evaluate", out]
    assert main(["convert", str(model), str(tmp_path / "a copy")]) == 0
    look = capsys.readouterr().out.splitlines()[-1].removeprefix("Inspect it: ")
    assert shlex.split(look) == ["moesaic", "show", str(tmp_path / "a copy")]


def test_compressed_already(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--method", "rtn", "--check-tokens", "0"]
    assert main(["compress", str(model), "--out", str(tmp_path / "one"), *words]) == 0
    assert main(["compress", str(tmp_path / "one"), "--out", str(tmp_path / "two"), *words]) == 2
    assert "is compressed already" in capsys.readouterr().err
    assert main(["compress", str(model), "--out", str(tmp_path / "one"), *words]) == 2
    assert "exists already" in capsys.readouterr().err


def test_show_says_bits_and_convert_gives_plain_weights_back(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import json

    import torch

    from moesaic.model.directory import load

    assert main(["compress", str(model), "--method", "rtn", "--check-tokens", "0", "--out", str(tmp_path / "one")]) == 0
    capsys.readouterr()
    assert main(["show", str(tmp_path / "one"), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    size = (tmp_path / "one" / "model.safetensors").stat().st_size
    assert shown["bits_per_weight"] == pytest.approx(size * 8 / shown["parameters"], abs=1e-3) and shown["compressed"]
    assert shown["life"][-1]["stage"] == "compress" and shown["life"][-1]["layer_errors"]
    assert main(["convert", str(tmp_path / "one"), str(tmp_path / "plain")]) == 0
    ids = [[1, 2, 3, 4, 5]]
    small, plain = load(tmp_path / "one", mode="reference"), load(tmp_path / "plain", mode="reference")
    assert not plain.quantized and small.quantized
    torch.testing.assert_close(small.logits(ids)[0], plain.logits(ids)[0], rtol=1e-4, atol=1e-4)


def test_a_damaged_directory_is_refused(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import json

    out = tmp_path / "one"
    assert main(["compress", str(model), "--method", "rtn", "--check-tokens", "0", "--out", str(out)]) == 0
    config = json.loads((out / "config.json").read_text())
    for wrong, problem in (
        ({"bits": 7, "group": 64}, "7 bits"),
        ({"bits": 4, "group": 30}, "multiples of 32"),
        ({"bits": 3, "group": 64}, "is (128, 32), not (128, 24)"),
        ({"bits": 4, "group": 64, "n": 4, "m": 4}, "4 of 4 weights"),
        ({"bits": 4, "group": 64, "n": 2, "m": 4}, "not (128, 16)"),
        ({"bits": 4}, "needs bits and group"),
        ([], "is no scheme"),
    ):
        config["quantization_config"]["default"] = wrong
        (out / "config.json").write_text(json.dumps(config))
        assert main(["evaluate", str(out)]) == 2
        assert problem in capsys.readouterr().err, wrong
