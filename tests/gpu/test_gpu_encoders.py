"""Encoders on a real GPU: hidden states as transformers', in float32 and in half precision.

pytest tests/gpu/test_gpu_encoders.py
"""

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("no CUDA device: these tests run on a GPU", allow_module_level=True)

import transformers

import moesaic
from moesaic.model.layout import Layout
from tests.gpu.models import error

pytestmark = pytest.mark.usefixtures("exact_float32")
SIZES = {"hidden_size": 128, "num_attention_heads": 4, "num_hidden_layers": 4, "intermediate_size": 192}
CONFIGS = {
    "bert": transformers.BertConfig(vocab_size=500, **SIZES),
    "modernbert": transformers.ModernBertConfig(
        vocab_size=500, local_attention=32, pad_token_id=0, bos_token_id=1, eos_token_id=2, cls_token_id=1,
        sep_token_id=2, **SIZES,
    ),
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CONFIGS)
@torch.inference_mode()
def test_hidden_states_equal_transformers(name, dtype, tmp_path):
    torch.manual_seed(0)
    theirs = transformers.AutoModel.from_config(CONFIGS[name]).eval()
    theirs.save_pretrained(tmp_path)
    theirs.to("cuda")
    ours = moesaic.load(tmp_path, dtype=dtype, device="cuda")
    lengths = [70, 1, 300, 33]
    tokens_T = torch.randint(3, 500, (sum(lengths),), device="cuda")
    hidden_TD = ours(tokens_T, Layout(lengths, device="cuda"))
    limit = 1e-4 if dtype == torch.float32 else 3e-2
    for tokens, found in zip(tokens_T.split(lengths), hidden_TD.split(lengths), strict=True):
        assert error(found.float(), theirs(tokens[None]).last_hidden_state[0]) < limit
