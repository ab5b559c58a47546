"""gpt-oss beside `transformers`, where equal logits say too little: gradients, MXFP4 as released, refusals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

import moesaic
from moesaic.errors import UserError
from moesaic.kernels import reference
from moesaic.kernels.interface import AttentionCall
from moesaic.kernels.native import kernels
from moesaic.kernels.quantized import QuantizedMatrix
from moesaic.model import directory
from moesaic.model.layout import Layout
from moesaic.serve.core.kv_policies.snapkv import SnapKV
from moesaic.serve.offload.loading import load_served
from tests.model import oracle

TOKENS = [5, 17, 3, 90, 41, 41, 8, 22, 63, 7, 11]
PAIRS = {
    "attention.sinks": "self_attn.sinks",
    "attention.out.bias": "self_attn.o_proj.bias",
    "ffn.router.bias": "mlp.router.bias",
    "ffn.router.weight": "mlp.router.weight",
    "ffn.down_bias_ED": "mlp.experts.down_proj_bias",
    "ffn.bias_EG": "mlp.experts.gate_up_proj_bias",
    "ffn.gate_up_EGD": "mlp.experts.gate_up_proj",
    "ffn.down_EDF": "mlp.experts.down_proj",
}


@pytest.mark.parametrize("mode", ["fast", "reference", "invariant"])
def test_gradients_of_what_other_families_lack(mode, tmp_path):
    theirs = oracle.save("gpt_oss", tmp_path, initializer_range=0.5)
    ours = moesaic.load(tmp_path, mode=mode)
    tokens = torch.tensor(TOKENS)
    theirs(tokens[None], labels=tokens[None], use_cache=False).loss.backward()
    hidden_TD = ours(tokens, Layout([len(tokens)]))
    torch.nn.functional.cross_entropy(ours.logits_at(hidden_TD, slice(0, -1)), tokens[1:]).backward()
    for number, (block, other) in enumerate(zip(ours.layers, theirs.model.layers, strict=True)):
        for here, there in PAIRS.items():
            found, wanted = block.get_parameter(here).grad, other.get_parameter(there).grad
            if here.endswith("EGD"):
                wanted = torch.cat([wanted[..., 0::2], wanted[..., 1::2]], -1).transpose(1, 2)
            elif here.endswith("EDF"):
                wanted = wanted.transpose(1, 2)
            elif here.endswith("EG"):
                wanted = torch.cat([wanted[..., 0::2], wanted[..., 1::2]], -1)
            assert float(wanted.abs().max()) > 1e-6, f"layer {number} {there} has nothing to learn"
            error = (found - wanted).norm() / wanted.norm()
            assert error < 1e-3, f"layer {number} {here}: {error:.1e}"


def released(path: Path, case: str = "gpt_oss") -> transformers.PreTrainedModel:
    """A checkpoint as OpenAI's are: experts in blocks and scales; and the model they stand for."""
    theirs = oracle.save(case, path, hidden_size=64, intermediate_size=32)
    tensors, raw = load_file(path / "model.safetensors"), json.loads((path / "config.json").read_text())
    generator = torch.Generator().manual_seed(3)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = tensors.pop(name).shape
        shape = experts, outputs, inputs // 32
        blocks = torch.randint(0, 256, (*shape, 16), generator=generator, dtype=torch.uint8)
        scales = torch.randint(122, 126, shape, generator=generator, dtype=torch.uint8)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        dense = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
        theirs.get_parameter(name).data.copy_(
            dense.view(experts, inputs, outputs) if dense.shape[1] == inputs else dense
        )
    save_file(tensors, path / "model.safetensors")
    raw["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (path / "config.json").write_text(json.dumps(raw))
    return theirs


def test_released_experts_stay_in_four_bits_and_mean_the_same(tmp_path):
    theirs = released(tmp_path / "released")
    ours = moesaic.load(tmp_path / "released")
    expert = ours.layers[0].ffn.gate_up_EGD[0]
    assert isinstance(expert, QuantizedMatrix) and expert.bits == 5
    wanted = oracle.logits(theirs, TOKENS)
    assert (ours.logits([TOKENS])[0] - wanted).norm() < 2e-3 * wanted.norm()  # rows are rounded to 15 bits
    plain = moesaic.load(tmp_path / "released", mode="reference").logits([TOKENS])[0]
    assert (plain - wanted).norm() < 1e-4 * wanted.norm()
    answer = moesaic.Engine(ours).generate([TOKENS], max_tokens=5, temperature=0.0, ignore_eos=True)[0]
    tokens = list(TOKENS)
    for _ in range(5):
        tokens.append(int(oracle.logits(theirs, tokens)[-1].argmax()))
    assert answer.tokens == tokens[len(TOKENS) :]


def test_released_experts_can_be_made_plain(tmp_path):
    theirs = released(tmp_path / "released")
    source = directory.open_source(tmp_path / "released")
    directory.convert(source, tmp_path / "plain", life=[])
    again = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "plain", attn_implementation="eager", experts_implementation="eager"
    )
    for (name, ours), (_, wanted) in zip(again.state_dict().items(), theirs.state_dict().items(), strict=True):
        assert torch.equal(ours, wanted), name


def test_broken_blocks_are_told(tmp_path):
    released(tmp_path / "m")
    tensors = load_file(tmp_path / "m" / "model.safetensors")
    name = "model.layers.0.mlp.experts.down_proj_scales"
    save_file(tensors | {name: tensors[name][:, :, :0]}, tmp_path / "m" / "model.safetensors")
    with pytest.raises(UserError, match="no MXFP4 experts"):
        moesaic.load(tmp_path / "m")


@pytest.mark.parametrize("window", [None, 5])
def test_a_sink_is_a_key_that_nobody_has(window):
    """Native attention beside the plain one, over a cache in pieces, and with sinks that weigh most."""
    ops = kernels()
    assert ops is not None
    q, k, v = (torch.randn(23, heads, 16) for heads in (6, 2, 2))
    sinks = torch.tensor([0.0, 3.0, -3.0, 60.0, -60.0, 1.0])
    call = AttentionCall(Layout([14, 9]), None, 0.25, window, sinks_H=sinks)
    with torch.no_grad():
        found = ops.attend(q, k, v, call)
    torch.testing.assert_close(found, reference.attend(q, k, v, call), rtol=1e-4, atol=1e-5)
    assert float(found[:, 3].abs().max()) < 1e-6
    without = reference.attend(q, k, v, call._replace(sinks_H=None))
    torch.testing.assert_close(found[:, 4], without[:, 4], rtol=1e-4, atol=1e-5)


def test_what_has_no_kernel_for_it_refuses(tmp_path):
    oracle.save("gpt_oss-tied", tmp_path)
    model = moesaic.load(tmp_path)
    with pytest.raises(UserError, match="learned sinks"):
        moesaic.Engine(model, kv_policy=SnapKV())
    with pytest.raises(UserError, match="experts with biases"):
        load_served(tmp_path, offload="experts")


def test_other_bounds_of_the_gate_are_refused(tmp_path):
    oracle.save("gpt_oss", tmp_path, swiglu_limit=5.0)
    with pytest.raises(UserError, match="swiglu_limit: must be 7, not 5"):
        moesaic.load(tmp_path)
