"""docs/adding.md is true: each of its examples is added as it stands there, and used by its name."""

from __future__ import annotations

import importlib
import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import moesaic
from moesaic.cli import main
from moesaic.errors import UserError
from moesaic.kernels.quantized import QuantizedMatrix
from moesaic.methods import Method, build
from moesaic.serve.core.drafters import Drafter
from moesaic.serve.core.engine import Engine
from moesaic.serve.core.kv_policies import KVPolicy
from tests.compress.made import make
from tests.matrix import Compression, KVCase
from tests.model import oracle
from tests.serve.tiny import VOCABULARY, tiny_model

PAGE = (Path(__file__).parents[1] / "docs" / "adding.md").read_text()
FILES = dict(re.findall(r"^`(moesaic/\S+\.py)`\n\n```python\n(.*?)^```", PAGE, re.M | re.S))
# The matrix's line of a method, as it stands on the page.
LINES = dict(re.findall(r'^```python\n"(\w+)": (.*),\n```', PAGE, re.M))
Add = Callable[[str], str]


@pytest.fixture
def add(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Add]:
    """Puts the file of a kind into a folder beside the package's own; returns the method's name."""
    added = []

    def one(kind: str) -> str:
        ((path, text),) = [(Path(path), text) for path, text in FILES.items() if Path(path).parent.match(kind)]
        folder = tmp_path / "added" / path.parent
        folder.mkdir(parents=True)
        (folder / path.name).write_text(text)
        package = importlib.import_module(".".join(path.parent.parts))
        monkeypatch.setattr(package, "__path__", [*package.__path__, str(folder)])
        added.append((package, path.stem))
        return path.stem

    yield one
    for package, name in added:
        sys.modules.pop(f"{package.__name__}.{name}", None)
        vars(package).pop(name, None)


def line(name: str, **names: Any) -> Any:
    """What the matrix would say of a method."""
    return eval(LINES[name], names)


def test_the_page_has_a_file_and_a_line_for_each() -> None:
    assert len(FILES) == 5 and {Path(path).stem for path in FILES} == LINES.keys()
    root = Path(moesaic.__file__).parents[1]
    assert not [path for path in FILES if (root / path).exists() or not (root / path).parent.is_dir()]


def test_a_kv_policy(add: Add) -> None:
    name = add("kv_policies")
    case = line(name, KVCase=KVCase)
    model = tiny_model()
    prompts = [[3 + (7 * n * n) % (VOCABULARY - 3) for n in range(length)] for length in (100, 61)]

    def answers(options: dict[str, Any] | None) -> list[list[int]]:
        policy = None if options is None else build(Method(name, options), KVPolicy, "test")
        engine = Engine(model, page_size=4, kv_policy=policy)
        found = engine.generate(prompts, max_tokens=12, temperature=0.0, ignore_eos=True)
        return [answer.tokens for answer in found]

    plain = answers(None)
    assert answers(case.whole) == plain
    assert answers(case.pruning) != plain
    with pytest.raises(UserError, match="--kv-policy: stride must be at least 1"):
        build(Method(name, {"stride": 0}), KVPolicy, "--kv-policy")


def test_a_drafter(add: Add) -> None:
    name = add("drafters")
    model = tiny_model()
    prompts = [[5, 6, 7, 8, 9] * 5, [11, 12, 13] * 6]
    wishes: dict[str, Any] = {"max_tokens": 16, "temperature": 0.0, "ignore_eos": True}
    plain = [answer.tokens for answer in Engine(model).generate(prompts, **wishes)]
    engine = Engine(model, drafter=build(Method(name, line(name)), Drafter, "test"))
    assert [answer.tokens for answer in engine.generate(prompts, **wishes)] == plain
    assert engine.counts.drafted_tokens > 0


def test_an_objective(add: Add, tmp_path: Path) -> None:
    name = add("objectives")
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        "model: {vocab: 320, hidden: 16, layers: 2, heads: 2, kv_heads: 1, head_size: 8, experts: 2, expert_hidden: 8, "
        "dense_hidden: 16, context: 32, mtp_layers: 0}\n"
        'data: {sources: [{name: sums, path: "builtin:arithmetic", documents: 60}], sequence_length: 32}\n'
        f"train: {{steps: 2, batch_tokens: 64, warmup_steps: 0, objective: next_token, data: {tmp_path}/data}}\n"
    )
    assert main(["prepare", str(recipe), "--out", str(tmp_path / "data"), "--json"]) == 0

    def losses(out: str, objective: dict[str, Any]) -> list[float]:
        named = f"train.objective={json.dumps(objective)}"
        assert main(["train", str(recipe), "--out", str(tmp_path / out), "--json", named]) == 0
        return [json.loads(line)["loss"] for line in (tmp_path / out / "metrics.jsonl").read_text().splitlines()]

    plain = losses("plain", {"name": "next_token"})
    assert losses("none", {"name": name, "share": 0.0}) == pytest.approx(plain, rel=1e-4)
    assert losses("smooth", {"name": name, **line(name)}) != pytest.approx(plain, rel=1e-4)
    assert (
        main(["train", str(recipe), "--out", str(tmp_path / "bad"), f"train.objective={{name: {name}, share: 1}}"]) == 2
    )


def test_a_quantizer(add: Add, tmp_path: Path) -> None:
    name = add("methods")
    case = line(name, Compression=Compression)
    whole = make(tmp_path / "whole")
    words = [f"{key}={value}" for key, value in case.options.items()]
    assert main(["compress", str(whole), "--method", name, "--out", str(tmp_path / "small"), "--json", *words]) == 0
    sizes = [(tmp_path / where / "model.safetensors").stat().st_size for where in ("whole", "small")]
    assert sizes[1] < case.bytes_left * sizes[0]
    small = moesaic.load(tmp_path / "small")
    matrices = [module for module in small.layers.modules() if isinstance(module, QuantizedMatrix)]
    assert matrices
    for matrix in matrices:
        dense_OI = matrix.dense()
        for start in range(0, dense_OI.shape[1], case.options["group"]):
            group_OX = dense_OI[:, start : start + case.options["group"]].abs()
            sizes_O = group_OX.amax(1, keepdim=True)
            assert ((group_OX == 0) | torch.isclose(group_OX, sizes_O, rtol=1e-3)).all()
    change = torch.cat(small.logits([[5, 6, 7, 8]])) - torch.cat(moesaic.load(whole).logits([[5, 6, 7, 8]]))
    assert 0 < change.norm() / torch.cat(moesaic.load(whole).logits([[5, 6, 7, 8]])).norm() < case.logit_change


def test_a_family(add: Add, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = add("families")
    monkeypatch.setitem(oracle.CASES, name, line(name, GQA=oracle.GQA))
    theirs = oracle.save(name, tmp_path / "theirs")
    model = moesaic.load(tmp_path / "theirs")
    assert model.config.family == name and {layer.window for layer in model.config.layers} == {5}
    tokens = [3 + (11 * n * n) % 90 for n in range(20)]
    torch.testing.assert_close(model.logits([tokens])[0], oracle.logits(theirs, tokens), rtol=1e-3, atol=1e-4)
    assert main(["convert", str(tmp_path / "theirs"), str(tmp_path / "ours"), "--json"]) == 0
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours", attn_implementation="eager")
    assert type(again).__name__ == "MistralForCausalLM"
    torch.testing.assert_close(oracle.logits(again.eval(), tokens), oracle.logits(theirs, tokens))
