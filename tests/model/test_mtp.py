"""Layers that predict further tokens (GLM-4.5, DeepSeek-V3, GLM-5) load, run and save; `transformers`' MTP model is the
judge of the numbers."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.modeling_layers import MtpModel

import moesaic
from moesaic.cli import main
from moesaic.errors import UserError
from moesaic.model import directory
from moesaic.model.formats.checkpoint import Checkpoint
from moesaic.model.layout import Layout
from moesaic.model.transformer import Model
from tests.model import oracle

CASES = [
    ("glm4_moe", 1),
    ("glm4_moe-groups", 2),
    ("deepseek_v3", 2),
    ("deepseek_v3-yarn", 1),
    ("deepseek_v3-no-query-rank", 1),
    ("glm_moe_dsa", 1),
    ("glm_moe_dsa-shared", 2),
]


def checkpoint(case: str, count: int, path: Path) -> transformers.PreTrainedModel:
    """A model with prediction layers named as in the published checkpoints: after the last layer, as layers of the
    same kind, with a projection, norms, and copies of the embedding and the head."""
    oracle.save(case, path)
    raw = json.loads((path / "config.json").read_text())
    tensors = load_file(path / "model.safetensors")
    last, hidden = raw["num_hidden_layers"], raw["hidden_size"]
    generator = torch.Generator().manual_seed(3)
    assert f"model.layers.{last - 1}.mlp.gate.weight" in tensors, "the last layer is a mixture"
    for number in range(last, last + count):
        own = {
            name.replace(f".{source}.", f".{number}.", 1): value
            # The attention of a layer that selects its own tokens; the mixture of the last.
            for source, part in ((0, ".self_attn."), (last - 1, "."))
            for name, value in tensors.items()
            if name.startswith(f"model.layers.{source}.")
            and part in name
            and (part != "." or ".self_attn." not in name)
        }
        for name, shape in (("enorm", (hidden,)), ("hnorm", (hidden,)), ("eh_proj", (hidden, 2 * hidden))):
            own[f"model.layers.{number}.{name}.weight"] = torch.zeros(shape)
        own[f"model.layers.{number}.shared_head.norm.weight"] = torch.zeros(hidden)
        for name, value in own.items():
            fresh = torch.randn(value.shape, generator=generator) * 0.2
            tensors[name] = fresh + 1 if name.endswith("norm.weight") else fresh
        embedding = tensors["model.embed_tokens.weight"]
        tensors[f"model.layers.{number}.embed_tokens.weight"] = embedding.clone()
        tensors[f"model.layers.{number}.shared_head.head.weight"] = tensors.get("lm_head.weight", embedding).clone()
    raw["num_nextn_predict_layers"] = count
    raw.pop("num_mtp_layers", None)
    (path / "config.json").write_text(json.dumps(raw))
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    return read_by_transformers(path, last)


def read_by_transformers(path: Path, last: int) -> transformers.PreTrainedModel:
    main = transformers.AutoModelForCausalLM.from_pretrained(
        path, attn_implementation="eager", experts_implementation="eager"
    ).eval()
    # It looks for these layers where the published models have them; ours are smaller.
    main._keys_to_ignore_on_load_unexpected = [rf"model\.layers\.({'|'.join(str(last + k) for k in range(5))})\..*"]
    return main


def expected(main: transformers.PreTrainedModel, tokens: list[int], count: int) -> list[torch.Tensor]:
    """The hidden states of each prediction layer, fed with those before it and the tokens that really follow."""
    oracle.restore_rope(main)
    if main.config.model_type == "glm_moe_dsa":
        run = by_a_model_of_one_layer(main)
    else:
        further = MtpModel.from_pretrained(main).eval()
        run = lambda number, hidden, after, positions: further.forward_layer(  # noqa: E731
            number, hidden, positions, None, input_ids=after
        )
    out = []
    with torch.no_grad():
        hidden = main.model(torch.tensor([tokens]), use_cache=False).last_hidden_state
        for number in range(count):
            length = len(tokens) - 1 - number
            positions = torch.arange(number + 1, len(tokens))[None]
            after = torch.tensor([tokens[number + 1 :]])
            hidden = run(number, hidden[:, :length], after, positions)
            out.append(hidden[0])
    return out


def by_a_model_of_one_layer(main: transformers.PreTrainedModel) -> Callable[..., torch.Tensor]:
    """`transformers` has no MTP for GLM-5 yet: its prediction layer is a model of that layer alone, fed with the
    projection, whose last norm is the layer's own."""

    def run(number: int, hidden: torch.Tensor, after: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        tensors = load_file(Path(main.config.name_or_path) / "model.safetensors")
        prefix = f"model.layers.{main.config.num_hidden_layers + number}."
        own = {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
        raw = main.config.to_dict() | {"num_hidden_layers": 1, "mlp_layer_types": ["sparse"], "indexer_types": ["full"]}
        config = type(main.config)(**{key: value for key, value in raw.items() if key != "layer_types"})
        with tempfile.TemporaryDirectory() as folder:
            config.save_pretrained(folder)
            block = {f"model.layers.0.{name}": value for name, value in own.items()}
            block["model.norm.weight"] = block.pop("model.layers.0.shared_head.norm.weight")
            block["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"]
            block["lm_head.weight"] = block.pop("model.layers.0.shared_head.head.weight")
            save_file(block, Path(folder) / "model.safetensors", {"format": "pt"})
            model = transformers.AutoModelForCausalLM.from_pretrained(
                folder, attn_implementation="eager", experts_implementation="eager"
            )
        embedded = main.model.embed_tokens(after)
        norm = lambda x, weight: torch.nn.functional.rms_norm(x, x.shape[-1:], weight, main.config.rms_norm_eps)  # noqa: E731
        joined = torch.cat([norm(embedded, own["enorm.weight"]), norm(hidden, own["hnorm.weight"])], dim=-1)
        joined = joined @ own["eh_proj.weight"].T
        return model.model(inputs_embeds=joined, position_ids=positions, use_cache=False).last_hidden_state

    return run


def predicted(model: Model, tokens: list[int]) -> list[torch.Tensor]:
    out = []
    with torch.inference_mode():
        hidden = model(torch.tensor(tokens), Layout([len(tokens)]))
        for number in range(len(model.config.mtp)):
            length = len(tokens) - 1 - number
            layout = Layout([length], positions=torch.arange(number + 1, len(tokens)))
            hidden = model.predict_further(number, hidden[:length], torch.tensor(tokens[number + 1 :]), layout)
            out.append(hidden)
    return out


@pytest.fixture(scope="module", params=CASES, ids=lambda case: f"{case[0]}-{case[1]}")
def made(request: Any, tmp_path_factory: Any) -> tuple[transformers.PreTrainedModel, Model, Path, int]:
    case, count = request.param
    path = tmp_path_factory.mktemp(case) / "model"
    main = checkpoint(case, count, path)
    return main, moesaic.load(path), path, count


TOKENS = torch.randint(3, 97, (19,), generator=torch.Generator().manual_seed(4)).tolist()


def test_predictions_are_those_of_transformers(made):
    main, ours, _, count = made
    assert len(ours.config.mtp) == len(ours.mtp) == count
    with torch.no_grad():
        for mine, theirs in zip(predicted(ours, TOKENS), expected(main, TOKENS, count), strict=True):
            assert (mine - theirs).norm() / theirs.norm() < 1e-4
            torch.testing.assert_close(ours.logits_at(mine), main.lm_head(theirs), rtol=1e-3, atol=1e-3)


def test_cached_predictions_equal_whole_ones(made):
    _, ours, _, count = made
    whole = predicted(ours, TOKENS)
    cache, pages = ours.new_cache(16, page_size=4), [[7, 3, 0, 9, 1, 12, 5, 2]]
    pieces: list[list[torch.Tensor]] = [[] for _ in range(count)]
    with torch.inference_mode():
        done, hidden = 0, torch.empty(0, ours.config.hidden)
        for size in (5, 1, 8, 1, 4):
            new = TOKENS[done : done + size]
            layout = Layout([size], cached=[done], cache=cache, pages=pages)
            hidden = torch.cat([hidden, ours(torch.tensor(new), layout)])
            done += size
        inputs = hidden
        for number in range(count):
            start, made_here = 0, []
            for size in (6, 1, 3, 20):
                size = min(size, len(TOKENS) - 1 - number - start)
                after = torch.tensor(TOKENS[number + 1 + start : number + 1 + start + size])
                layout = Layout(
                    [size],
                    cached=[start],
                    cache=cache,
                    pages=pages,
                    positions=torch.arange(number + 1 + start, number + 1 + start + size),
                )
                made_here.append(ours.predict_further(number, inputs[start : start + size], after, layout))
                start += size
            inputs = torch.cat(made_here)
            pieces[number] = made_here
    for parts, all_at_once in zip(pieces, whole, strict=True):
        torch.testing.assert_close(torch.cat(parts), all_at_once, rtol=1e-4, atol=1e-4)


def test_saved_and_read_again(made, tmp_path):
    main, ours, path, count = made
    directory.save(ours, tmp_path / "saved")
    directory.convert(Checkpoint(path), tmp_path / "converted", life=[])
    original = load_file(path / "model.safetensors")
    for out in ("saved", "converted"):
        written = load_file(tmp_path / out / "model.safetensors")
        assert written.keys() == original.keys()
        assert all(torch.equal(written[name], value) for name, value in original.items())
        reread = moesaic.load(tmp_path / out)
        assert reread.config == ours.config
        assert all(torch.equal(a, b) for a, b in zip(reread.state_dict().values(), ours.state_dict().values()))
        again = read_by_transformers(tmp_path / out, len(ours.config.layers))
        assert torch.equal(oracle.logits(again, TOKENS), oracle.logits(main, TOKENS))
        for a, b in zip(expected(again, TOKENS, count), expected(main, TOKENS, count), strict=True):
            assert torch.equal(a, b)


def test_fused_experts_of_prediction_layers(tmp_path):
    checkpoint("deepseek_v3", 1, tmp_path / "model")
    plain = moesaic.load(tmp_path / "model")
    tensors = load_file(tmp_path / "model" / "model.safetensors")
    for layer in (1, 2, 3):
        experts = f"model.layers.{layer}.mlp.experts"
        take = lambda kind, e=experts: torch.stack([tensors.pop(f"{e}.{n}.{kind}.weight") for n in range(8)])  # noqa: E731
        tensors[f"{experts}.gate_up_proj"] = torch.cat([take("gate_proj"), take("up_proj")], dim=1)
        tensors[f"{experts}.down_proj"] = take("down_proj")
    save_file(tensors, tmp_path / "model" / "model.safetensors")
    for a, b in zip(predicted(moesaic.load(tmp_path / "model"), TOKENS), predicted(plain, TOKENS), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("case", ["glm4_moe", "deepseek_v3", "glm_moe_dsa"])
def test_declared_but_not_shipped(case, tmp_path):
    """As in many a fine-tuned copy: the configuration speaks of prediction layers, the weights have none."""
    theirs = oracle.save(case, tmp_path / "model")
    raw = json.loads((tmp_path / "model" / "config.json").read_text())
    raw["num_nextn_predict_layers"] = 1
    (tmp_path / "model" / "config.json").write_text(json.dumps(raw))
    ours = moesaic.load(tmp_path / "model")
    assert ours.config.mtp == () and len(ours.mtp) == 0
    torch.testing.assert_close(ours.logits([TOKENS])[0], oracle.logits(theirs, TOKENS), rtol=1e-3, atol=1e-3)
    directory.save(ours, tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["num_nextn_predict_layers"] == 0


def test_half_of_a_prediction_layer_is_refused(tmp_path):
    checkpoint("glm4_moe", 1, tmp_path / "model")
    tensors = load_file(tmp_path / "model" / "model.safetensors")
    del tensors["model.layers.3.eh_proj.weight"]
    save_file(tensors, tmp_path / "model" / "model.safetensors")
    with pytest.raises(UserError, match=r"1 tensor missing: model\.layers\.3\.eh_proj\.weight"):
        moesaic.load(tmp_path / "model")
    del tensors["model.layers.3.embed_tokens.weight"]  # a copy, which need not be there
    del tensors["model.layers.3.shared_head.head.weight"]
    tensors["model.layers.3.eh_proj.weight"] = torch.zeros(48, 96)
    save_file(tensors, tmp_path / "model" / "model.safetensors")
    assert len(moesaic.load(tmp_path / "model").mtp) == 1


@pytest.mark.parametrize("count", [0, 2])
def test_copies_for_others_are_no_bits_of_a_weight(
    count: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if count:
        checkpoint("glm4_moe", count, tmp_path)
    else:
        oracle.save("glm4_moe", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    sizes = {name: tensor.nbytes for name, tensor in tensors.items()}
    copies = [
        name for name in sizes if ".layers." in name and name.endswith(("embed_tokens.weight", "head.head.weight"))
    ]
    assert len(copies) == 2 * count
    assert main(["show", str(tmp_path), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    own = shown["disk_bytes"] - sum(sizes[name] for name in copies)
    assert shown["bits_per_weight"] == pytest.approx(own * 8 / shown["parameters"], abs=1e-3)
