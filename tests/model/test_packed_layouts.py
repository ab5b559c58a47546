"""GPTQ's and AWQ's layouts are read as they are: the weights they stand for, and still few bits in memory.

pytest tests/model/test_packed_layouts.py
"""

import json
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import moesaic
from moesaic.errors import UserError
from tests.model.oracle import MLA, QWEN_MOE, SMALL
from tests.model.test_float8 import TOKENS, matrices, rewritten, separate

GROUP = 32
SIZES = {"hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 32}
RANKS = {"kv_lora_rank": 32, "q_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16}
KINDS = {
    "qwen3_moe": transformers.Qwen3MoeConfig(**SMALL, **QWEN_MOE | SIZES),
    "deepseek_v3": transformers.DeepseekV3Config(
        **SMALL, **MLA | SIZES | RANKS, num_nextn_predict_layers=0, n_group=1, topk_group=1
    ),
}


@pytest.fixture(scope="module", params=KINDS)
def original(request, tmp_path_factory) -> Path:
    torch.manual_seed(0)
    made = tmp_path_factory.mktemp(request.param)
    transformers.AutoModelForCausalLM.from_config(KINDS[request.param]).save_pretrained(made)
    save_file(separate(load_file(made / "model.safetensors")), made / "model.safetensors", {"format": "pt"})
    return made


def packed(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Rows of codes as rows of words, the first code in the lowest bits: one bit after the other."""
    rows, count = codes.shape
    words = [[0] * (count * bits // 32) for _ in range(rows)]
    for row in range(rows):
        for place, code in enumerate(codes[row].tolist()):
            for bit in range(bits):
                at = place * bits + bit
                words[row][at // 32] |= (code >> bit & 1) << at % 32
    return torch.tensor(words, dtype=torch.int64).to(torch.int32)


def gptq(name: str, codes_OI, zeros_GO, scales_GO, bits: int, less: int) -> dict[str, torch.Tensor]:
    return {
        f"{name}.qweight": packed(codes_OI, bits).T.contiguous(),
        f"{name}.qzeros": packed(zeros_GO - less, bits),
        f"{name}.scales": scales_GO.half(),
        f"{name}.g_idx": torch.arange(codes_OI.shape[1], dtype=torch.int32) // GROUP,
    }


def awq(name: str, codes_OI, zeros_GO, scales_GO, bits: int, less: int) -> dict[str, torch.Tensor]:
    def shuffled(codes_XO: torch.Tensor) -> torch.Tensor:
        order = [8 * word + place for word in range(codes_XO.shape[1] // 8) for place in (0, 2, 4, 6, 1, 3, 5, 7)]
        return packed(codes_XO[:, order], bits)

    return {
        f"{name}.qweight": shuffled(codes_OI.T),
        f"{name}.qzeros": shuffled(zeros_GO),
        f"{name}.scales": scales_GO.half(),
    }


def written(original: Path, to: Path, pack, bits: int, symmetric: bool, settings: dict) -> tuple[Path, Path]:
    """A directory in few bits, and one of the plain weights it stands for."""
    torch.manual_seed(1)
    tensors = load_file(original / "model.safetensors")
    tensors = {name: tensor.float() for name, tensor in tensors.items()}
    plain, few = dict(tensors), dict(tensors)
    for name in matrices(tensors):
        outputs, inputs = tensors[name].shape
        if outputs * bits % 32 or inputs % GROUP:
            continue
        codes_OI = torch.randint(0, 2**bits, (outputs, inputs))
        zeros_GO = torch.full((inputs // GROUP, outputs), 2 ** (bits - 1))
        if not symmetric:
            zeros_GO = torch.randint(1, 2**bits, zeros_GO.shape)
        scales_GO = (torch.rand(zeros_GO.shape) + 0.5).half().float() / 2**bits / 8
        scales_GO = scales_GO.half().float()
        spread = (codes_OI - zeros_GO.T.repeat_interleave(GROUP, 1)) * scales_GO.T.repeat_interleave(GROUP, 1)
        plain[name] = spread
        few.pop(name)
        few |= pack(name.removesuffix(".weight"), codes_OI, zeros_GO, scales_GO, bits, settings.get("less", 0))
    asked = {"bits": bits, "group_size": GROUP, **{key: value for key, value in settings.items() if key != "less"}}
    return rewritten(original, to / "few", few, asked), rewritten(original, to / "plain", plain, None)


CASES = {
    "gptq": (gptq, 4, True, {"quant_method": "gptq", "sym": True, "desc_act": False, "less": 1}),
    "gptq with zeros": (gptq, 4, False, {"quant_method": "gptq", "sym": False, "less": 1}),
    "gptq, second format": (gptq, 4, False, {"quant_method": "gptq", "checkpoint_format": "gptq_v2", "sym": False}),
    "gptq, 3 bits": (gptq, 3, False, {"quant_method": "gptq", "checkpoint_format": "gptq", "less": 1}),
    "gptq, 8 bits": (gptq, 8, True, {"quant_method": "gptq", "sym": True, "less": 1}),
    "awq": (awq, 4, False, {"quant_method": "awq", "version": "gemm", "zero_point": True}),
}


@pytest.mark.parametrize("case", CASES)
def test_the_weights_they_stand_for(original, tmp_path, case):
    few, plain = written(original, tmp_path, *CASES[case])
    model = moesaic.load(few, dtype=torch.float32, device="cpu", mode="reference")
    assert model.quantized and all(layer.ffn.gate_up_EGD[0].bits == CASES[case][1] for layer in model.layers[1:])
    wanted = moesaic.load(plain, dtype=torch.float32, device="cpu", mode="reference").logits(TOKENS)[0]
    for given in (model, moesaic.load(few, dtype=torch.float32, device="cpu")):
        torch.testing.assert_close(given.logits(TOKENS)[0], wanted, rtol=1e-4, atol=1e-4 * wanted.abs().max().item())


def test_inputs_in_another_order_are_refused(original, tmp_path):
    few, _ = written(original, tmp_path, *CASES["gptq"])
    tensors = load_file(few / "model.safetensors")
    name = next(name for name in tensors if name.endswith("g_idx") and tensors[name].max() > 0)
    tensors[name] = tensors[name].flip(0).contiguous()
    save_file(tensors, few / "model.safetensors")
    with pytest.raises(UserError, match="another order"):
        moesaic.load(few, device="cpu")


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"bits": 7}, "7 bits"),
        ({"bits": "4"}, "4 bits"),
        ({"group_size": 48}, "groups of 48"),
        ({"group_size": None}, "groups of None"),
        ({"group_size": 64}, "scales is"),
        ({"checkpoint_format": "marlin"}, "marlin"),
        ({"quant_method": "awq", "version": "gemv"}, "gemv"),
        ({"quant_method": "awq", "bits": 8}, "8 bits"),
        ({"quant_method": "hqq"}, "hqq"),
    ],
)
def test_what_cannot_be_read_is_said(original, tmp_path, changed, words):
    few, _ = written(original, tmp_path, *CASES["gptq"])
    config = json.loads((few / "config.json").read_text())
    config["quantization_config"] |= changed
    (few / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=words):
        moesaic.load(few, device="cpu")
