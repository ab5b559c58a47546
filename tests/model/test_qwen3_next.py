"""Qwen3-Next beside `transformers`, where equal logits of short texts say too little."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import moesaic
from moesaic.cli import main
from moesaic.errors import UserError
from moesaic.kernels.adapted import AdaptedKernels
from moesaic.model.config import Experts
from moesaic.model.flops import Chunk, forward_flops
from moesaic.model.layout import Layout
from moesaic.model.lora import Lora
from moesaic.model.transformer import Model
from moesaic.serve.core.adapters import load_adapter
from tests.compress.made import add_tokenizer
from tests.model import oracle

TOKENS = [3 + (7 * i + i * i // 5) % 90 for i in range(70)]  # more than a chunk
# Rows of these lie head by head on disk: what is of one head, and how many heads.
HEADS = {"linear_attn.in_proj_qkvz": ([12, 12, 16, 16], 2), "linear_attn.in_proj_ba": ([2, 2], 2)}
PAIRS = {
    "attention.qkvz.weight": "linear_attn.in_proj_qkvz.weight",
    "attention.strength_decay.weight": "linear_attn.in_proj_ba.weight",
    "attention.taps_XW": "linear_attn.conv1d.weight",
    "attention.log_rate": "linear_attn.A_log",
    "attention.shift": "linear_attn.dt_bias",
    "attention.norm.weight": "linear_attn.norm.weight",
    "attention.out.weight": "linear_attn.out_proj.weight",
    "attention_norm.weight": "input_layernorm.weight",
    "ffn.shared_gate.weight": "mlp.shared_expert_gate.weight",
}


@pytest.mark.parametrize("mode", ["fast", "reference", "invariant"])
def test_gradients_of_what_other_families_lack(mode, tmp_path):
    theirs = oracle.save("qwen3_next", tmp_path, max_position_embeddings=128)
    ours = moesaic.load(tmp_path, mode=mode)
    lengths = [70] if mode != "reference" else [20]
    tokens = torch.tensor(TOKENS[: lengths[0]])
    theirs(tokens[None], labels=tokens[None], use_cache=False).loss.backward()
    hidden_TD = ours(tokens, Layout(lengths))
    torch.nn.functional.cross_entropy(ours.logits_at(hidden_TD, slice(0, -1)), tokens[1:]).backward()
    for number in range(3):
        block, other = ours.layers[number], theirs.model.layers[number]
        for here, there in PAIRS.items():
            found, wanted = block.get_parameter(here).grad, other.get_parameter(there).grad
            if there.removesuffix(".weight") in HEADS:
                sizes, heads = HEADS[there.removesuffix(".weight")]
                kinds = wanted.unflatten(0, (heads, -1)).split(sizes, dim=1)
                wanted = torch.cat([kind.flatten(0, 1) for kind in kinds])
            assert float(wanted.abs().max()) > 1e-7, f"layer {number} {there} has nothing to learn"
            error = (found - wanted.view_as(found)).norm() / wanted.norm()
            assert error < 1e-3, f"layer {number} {here}: {error:.1e}"
    wanted = theirs.model.layers[3].self_attn.q_proj.weight.grad.view(4, 2, 16, -1).transpose(0, 1).reshape(128, -1)
    found = ours.layers[3].attention.qkv.weight.grad[:128]
    assert (found - wanted).norm() < 1e-3 * wanted.norm()


def test_long_texts_in_one_batch(tmp_path):
    theirs = oracle.save("qwen3_next-odd", tmp_path, max_position_embeddings=256)
    batch = [TOKENS * 2, TOKENS[:1], TOKENS[3:67], TOKENS[5:]]
    for mode in ("fast", "invariant"):
        ours = moesaic.load(tmp_path, mode=mode)
        for tokens, logits in zip(batch, ours.logits(batch), strict=True):
            wanted = oracle.logits(theirs, tokens)
            assert (logits - wanted).norm() < 1e-4 * wanted.norm()


def test_layers_that_predict_further_are_left_out(tmp_path):
    theirs = oracle.save("qwen3_next", tmp_path)
    file = tmp_path / "model.safetensors"
    save_file(load_file(file) | {"mtp.fc.weight": torch.ones(4, 4)}, file)
    wanted = oracle.logits(theirs, TOKENS[:20])
    assert (moesaic.load(tmp_path).logits([TOKENS[:20]])[0] - wanted).norm() < 1e-4 * wanted.norm()


def test_weights_that_others_quantized_are_refused(tmp_path):
    oracle.save("qwen3_next", tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw | {"quantization_config": {"quant_method": "fp8"}}))
    with pytest.raises(UserError, match="qwen3_next from elsewhere"):
        moesaic.load(tmp_path)


def test_first_weights_and_operations(tmp_path):
    oracle.save("qwen3_next", tmp_path)
    config = moesaic.load(tmp_path).config
    first = Model(config).initialize(7).state_dict()
    assert not first["norm.weight"].any() and not first["layers.3.attention.q_norm.weight"].any()  # one more counts
    assert first["layers.0.attention.norm.weight"].eq(1).all()
    rates = first["layers.0.attention.log_rate"].exp()
    assert rates.min() > 0 and rates.max() <= 16 and rates.std() > 0.1
    # A state costs the same for every token, attention more for later ones.
    early, late = (forward_flops(config, [Chunk(1, cached)], logits=0) for cached in (0, 50))
    assert late - early == 50 * 4 * 4 * 16  # in the one layer with attention
    linear = 3 * 2 * 3 * (4 * 12 * 8)
    ffn = config.layers[0].ffn
    assert isinstance(ffn, Experts)
    matrices = sum(
        parameter.numel()
        for name, parameter in Model(config).named_parameters()
        if name.startswith("layers.") and parameter.dim() > 1
    )
    idle = 4 * (ffn.count - ffn.per_token) * 3 * ffn.hidden * config.hidden
    assert early == 2 * (matrices - idle) + linear + 4 * 4 * 16


@pytest.mark.parametrize("case", ["qwen3_next", "qwen2_moe"])
def test_scales_that_awq_moves_into_norms_leave_the_function(case, tmp_path):
    """Also where norms count from one, and where a shared expert's gate reads them."""
    oracle.save(case, tmp_path / "plain", vocab_size=320, max_position_embeddings=256)
    add_tokenizer(tmp_path / "plain")
    options = ["--samples", "2", "--length", "64", "bits=8", "group=32"]
    out = str(tmp_path / "awq")
    assert main(["compress", str(tmp_path / "plain"), "--method", "awq", "--out", out, *options]) == 0
    plain, compressed = moesaic.load(tmp_path / "plain"), moesaic.load(tmp_path / "awq")
    moved = plain.layers[1].ffn_norm.weight - compressed.layers[1].ffn_norm.weight
    assert float(moved.detach().abs().max()) > 0.05
    found, wanted = (model.logits([TOKENS])[0] for model in (compressed, plain))
    errors_T = (found - wanted).norm(dim=1) / wanted.norm(dim=1)
    assert float(errors_T.median()) < 0.15  # rounding sends some tokens to other experts


@torch.no_grad()
def test_an_adapter_is_what_peft_takes_it_for(tmp_path):
    """Rows of its matrices lie in files as those of the weights do."""
    theirs = oracle.save("qwen3_next", tmp_path / "plain")
    model = moesaic.load(tmp_path / "plain")
    model.lora = Lora(model, rank=3, alpha=6, targets=("q_proj", "v_proj", "in_proj_qkvz", "in_proj_ba"))
    generator = torch.Generator().manual_seed(1)
    for correction in model.lora.corrections.values():
        for up in correction.ups:
            up.normal_(0, 0.1, generator=generator)
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    for name, content in model.lora.files(model.state_dict(), "plain", []).items():
        (adapter / Path(name).name).write_bytes(content)
    plain, tuned = (one.logits([TOKENS[:20]])[0] for one in (model.beside(None), model))
    assert (tuned - plain).norm() > 0.1 * plain.norm()

    found = load_file(adapter / "adapter_model.safetensors")
    for name in [name for name in found if ".lora_A." in name]:
        module = name.removeprefix("base_model.model.").partition(".lora_A")[0]
        theirs.get_parameter(f"{module}.weight").add_(2 * found[name.replace("lora_A", "lora_B")] @ found[name])
    wanted = oracle.logits(theirs, TOKENS[:20])
    assert (tuned - wanted).norm() < 1e-4 * wanted.norm()

    served = model.beside(None)
    own = load_adapter(served, adapter, "mine")
    ops = AdaptedKernels(served.ops, {own: None})
    again = served.logits_at(served(torch.tensor(TOKENS[:20]), Layout([20]), ops=ops))
    assert (again - wanted).norm() < 1e-4 * wanted.norm()
    model.lora.restore(tmp_path)
    torch.testing.assert_close(model.logits([TOKENS[:20]])[0], tuned)
