"""gpt-oss on one GPU: generation with graphs and layer by layer, and a training step, beside transformers.

    python bench/gpu_gpt_oss.py                     gpt-oss-20b's widths, 12 of its 24 layers (two minutes)
    python bench/gpu_gpt_oss.py --layers 2 --requests 1

Random weights, bfloat16, greedy, 512 in and 128 out, best of three; layer by layer is how such models ran before their
sinks, biases and gate were in the kernels. The training step is forward and backward of 4 x 2,048 tokens by both,
with the same weights and tokens, layers not compiled; the losses are compared.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import sys

import torch

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
from bench.gpu_decode import generate, parting, peer_alone, prompts_of
from bench.gpu_train import timed
from bench.measure import record
from bench.random_weights import random_model
from moesaic.kernels.cross_entropy import linear_cross_entropy
from moesaic.model.config import Experts, GroupedQuery, Layer, ModelConfig, Rope
from moesaic.model.layout import Layout
from moesaic.model.transformer import Model
from moesaic.serve.core.engine import Engine
from moesaic.serve.core.forward_pass import Runner

HIDDEN, EXPERTS, PER_TOKEN, HEADS, KV_HEADS, HEAD_SIZE, WINDOW = 2880, 32, 4, 64, 8, 64, 128
VOCAB = 201_088


def make(layers: int) -> Model:
    experts = Experts(EXPERTS, PER_TOKEN, HIDDEN, bias=True)
    config = ModelConfig(
        family="gpt_oss",
        vocab=VOCAB,
        hidden=HIDDEN,
        attention=GroupedQuery(HEADS, KV_HEADS, HEAD_SIZE, qkv_bias=True, out_bias=True, sinks=True),
        rope=Rope(HEAD_SIZE, theta=150_000.0),
        layers=tuple(Layer(experts, None if number % 2 else WINDOW) for number in range(layers)),
        context=8192,
        dtype="bfloat16",
        activation="clamped_swiglu",
    )
    model = random_model(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "bias" in name or "sinks" in name:
                parameter.normal_(0, 0.1)
    return model


def make_peer(ours: Model) -> torch.nn.Module:
    """transformers' model with our weights."""
    import transformers

    layers = ours.layers
    config = transformers.GptOssConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=HIDDEN,
        num_hidden_layers=len(layers),
        num_local_experts=EXPERTS,
        num_experts_per_tok=PER_TOKEN,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_SIZE,
        sliding_window=WINDOW,
        max_position_embeddings=8192,
        rope_parameters={"rope_type": "default", "rope_theta": 150_000.0},
    )
    with torch.device("cuda"):
        peer = transformers.AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16, attn_implementation="eager", experts_implementation="grouped_mm"
        )
    state = {
        "model.embed_tokens.weight": ours.embed,
        "lm_head.weight": ours.head,
        "model.norm.weight": ours.norm.weight,
    }
    for number, block in enumerate(layers):
        here, attention, ffn = f"model.layers.{number}.", block.attention, block.ffn
        sizes = [HEADS * HEAD_SIZE, KV_HEADS * HEAD_SIZE, KV_HEADS * HEAD_SIZE]
        for kind in ("weight", "bias"):
            parts = getattr(attention.qkv, kind).split(sizes)
            state |= {f"{here}self_attn.{name}_proj.{kind}": part for name, part in zip("qkv", parts, strict=True)}
            state[f"{here}self_attn.o_proj.{kind}"] = getattr(attention.out, kind)
            state[f"{here}mlp.router.{kind}"] = getattr(ffn.router, kind)
        turns = ffn.gate_up_EGD.unflatten(1, (2, -1)), ffn.bias_EG.unflatten(1, (2, -1))
        state |= {
            here + "self_attn.sinks": attention.sinks,
            here + "mlp.experts.gate_up_proj": turns[0].permute(0, 3, 2, 1).flatten(2),  # gate and up in turns
            here + "mlp.experts.gate_up_proj_bias": turns[1].transpose(1, 2).flatten(1),
            here + "mlp.experts.down_proj": ffn.down_EDF.transpose(1, 2),
            here + "mlp.experts.down_proj_bias": ffn.down_bias_ED,
            here + "input_layernorm.weight": block.attention_norm.weight,
            here + "post_attention_layernorm.weight": block.ffn_norm.weight,
        }
    with torch.no_grad():
        missing, extra = peer.load_state_dict({name: tensor.detach() for name, tensor in state.items()}, strict=False)
    assert not missing and not extra, (missing, extra)
    return peer


def speeds(model: Model, count: int, out: int, whole: bool) -> tuple[list[int], float]:
    """(the first text, tokens per second), by graphs or layer by layer."""
    engine = Engine(model, max_requests=count, cache_bytes=(count + 8) * 700 << 15)
    if not whole:
        engine.runner = Runner(engine)
    runs = []
    for number in range(4 if whole else 2):  # the first one captures
        engine.weights_changed()
        runs.append(generate(engine, [[token % VOCAB for token in one] for one in prompts_of(count, 512, 0)], out))
        assert runs[number][0] == runs[0][0], "the same prompts gave another text"
    return runs[0][0][0], count * out / min(seconds for _, seconds in runs[1:])


def step_of(forward, model: torch.nn.Module, length: int):
    def step(number: int) -> torch.Tensor:
        generator = torch.Generator("cuda").manual_seed(number)
        tokens = torch.randint(VOCAB, (4, length + 1), generator=generator, device="cuda")
        loss = forward(tokens)
        loss.backward()
        model.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def our_loss(model: Model, length: int):
    layout = Layout([length] * 4, device="cuda")
    scale_T = torch.full((4 * length,), 1 / (4 * length), device="cuda")

    def forward(tokens: torch.Tensor) -> torch.Tensor:
        hidden_TD = model(tokens[:, :-1].reshape(-1), layout)
        return linear_cross_entropy(hidden_TD, model.output, tokens[:, 1:].reshape(-1), scale_T)[0]

    return forward


def peer_loss(peer: torch.nn.Module):
    def forward(tokens: torch.Tensor) -> torch.Tensor:
        logits = peer(tokens[:, :-1], use_cache=False).logits
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].reshape(-1))

    return forward


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--requests", type=int, nargs="*", default=[1, 64])
    parser.add_argument("--length", type=int, default=2048, help="of each of the four sequences of a training step")
    options = parser.parse_args()
    model = make(options.layers)
    rows: list[dict[str, object]] = []

    def told(**row: object) -> None:
        rows.append(row)
        print(json.dumps(row), flush=True)

    text: list[int] = []
    for count in options.requests:
        found, fast = speeds(model, count, 128, whole=True)
        _, slow = speeds(model, count, 16, whole=False)
        text = text or found
        told(requests=count, graphs=round(fast), layer_by_layer=round(slow), ratio=round(fast / slow, 2))
    ours, losses, memory = timed(step_of(our_loss(model, options.length), model, options.length), 2, 4)
    torch.cuda.empty_cache()
    peer = make_peer(model)
    theirs, peer_losses, peer_memory = timed(step_of(peer_loss(peer), peer, options.length), 1, 3)
    tokens = 4 * options.length
    told(
        training_tokens_per_second=round(tokens / ours),
        transformers=round(tokens / theirs),
        ratio=round(theirs / ours, 2),
        gib=[round(memory, 1), round(peer_memory, 1)],
        losses_apart=round(max(abs(one - other) for one, other in zip(losses, peer_losses)), 5),
    )
    prompt = prompts_of(1, 512, 0)[0]
    peer_text, seconds = peer_alone(peer, prompt, 128)
    told(transformers_alone=round(128 / seconds), **parting(model, prompt, text, peer_text))
    record("gpu_gpt_oss", rows, layers=options.layers)


if __name__ == "__main__":
    main()
