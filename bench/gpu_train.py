"""Whole training steps on one GPU beside transformers compiled layer by layer: same weights, same data, same optimizer.

    python bench/gpu_train.py                     the 5.27 B mixture of the tables, 4 x 4096 tokens a step (3 minutes)
    python bench/gpu_train.py --layers 2          a quick look
    python bench/gpu_train.py --profile           where our time goes, kernel by kernel
    python bench/gpu_train.py --who moesaic --dtype bf16 fp8                   ours with matmuls in float8 too
    python bench/gpu_train.py --glm --layers 5                    GLM-4.5-Air's widths, 9.9 B
    python bench/gpu_train.py --curve 300 --layers 4 --sequences 8 --length 1024   both losses on this repository's text

Forward, backward and a fused AdamW step in bfloat16; with --glm the two have weights of their own. Operations are
counted as 6 per active parameter and token, and causal attention as it is computed. In fp8 the weights, and what AdamW
keeps of them, are bfloat16 as before.
"""

from __future__ import annotations

import argparse
import collections
import gc
import json
import pathlib
import statistics
import sys

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
from bench.measure import record
from bench.random_weights import random_model
from moesaic.kernels.cross_entropy import linear_cross_entropy
from moesaic.kernels.triton.adamw import adamw
from moesaic.model.config import Dense, Experts, GroupedQuery, Layer, ModelConfig, Rope
from moesaic.model.facts import facts
from moesaic.model.flops import training_flops
from moesaic.model.layout import Layout
from moesaic.model.transformer import Model
from moesaic.train.float8 import multiply_in_float8

HIDDEN, EXPERTS, PER_TOKEN, EXPERT_HIDDEN, HEADS, KV_HEADS, HEAD_SIZE, VOCAB = 2048, 64, 8, 768, 32, 4, 128, 32000


def config_of(layers: int, context: int = 8192) -> ModelConfig:
    return ModelConfig(
        family="qwen3_moe",
        vocab=VOCAB,
        hidden=HIDDEN,
        attention=GroupedQuery(HEADS, KV_HEADS, HEAD_SIZE, qk_norm=True),
        rope=Rope(HEAD_SIZE, theta=1e6),
        layers=tuple(Layer(Experts(EXPERTS, PER_TOKEN, EXPERT_HIDDEN)) for _ in range(layers)),
        context=context,
        dtype="bfloat16",
    )


def glm(layers: int) -> ModelConfig:
    """GLM-4.5-Air's widths: a dense layer, then mixtures with a shared expert."""
    mixture = Layer(Experts(128, 8, 1408, score="sigmoid", correction=True, shared_hidden=1408))
    return ModelConfig(
        family="glm4_moe",
        vocab=VOCAB,
        hidden=4096,
        attention=GroupedQuery(96, 8, 128, qkv_bias=True),
        rope=Rope(64, theta=1e6),
        layers=(Layer(Dense(10944)), *[mixture] * (layers - 1)),
        context=8192,
        dtype="bfloat16",
    )


def make_ours(layers: int, seed: int = 0) -> Model:
    return random_model(config_of(layers), seed=seed)


def make_peer(layers: int, ours: Model) -> torch.nn.Module:
    """transformers' model with our weights."""
    import transformers

    config = transformers.Qwen3MoeConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        moe_intermediate_size=EXPERT_HIDDEN,
        num_hidden_layers=layers,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_SIZE,
        num_experts=EXPERTS,
        num_experts_per_tok=PER_TOKEN,
        norm_topk_prob=True,
        max_position_embeddings=8192,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        use_cache=False,
    )
    with torch.device("cuda"):
        peer = transformers.AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16, attn_implementation="sdpa", experts_implementation="grouped_mm"
        )
    state = {
        "model.embed_tokens.weight": ours.embed,
        "lm_head.weight": ours.head,
        "model.norm.weight": ours.norm.weight,
    }
    for number, block in enumerate(ours.layers):
        here = f"model.layers.{number}."
        q, k, v = block.attention.qkv.weight.split([HEADS * HEAD_SIZE, KV_HEADS * HEAD_SIZE, KV_HEADS * HEAD_SIZE])
        state |= {
            here + "self_attn.q_proj.weight": q,
            here + "self_attn.k_proj.weight": k,
            here + "self_attn.v_proj.weight": v,
            here + "self_attn.o_proj.weight": block.attention.out.weight,
            here + "self_attn.q_norm.weight": block.attention.q_norm.weight,
            here + "self_attn.k_norm.weight": block.attention.k_norm.weight,
            here + "input_layernorm.weight": block.attention_norm.weight,
            here + "post_attention_layernorm.weight": block.ffn_norm.weight,
            here + "mlp.gate.weight": block.ffn.router.weight,
            here + "mlp.experts.gate_up_proj": block.ffn.gate_up_EGD,
            here + "mlp.experts.down_proj": block.ffn.down_EDF,
        }
    with torch.no_grad():
        missing, extra = peer.load_state_dict({name: tensor.detach() for name, tensor in state.items()}, strict=False)
    assert not missing and not extra, (missing, extra)
    return peer


def glm_peer(layers: int) -> torch.nn.Module:
    """transformers' model of that config."""
    import transformers

    config = transformers.Glm4MoeConfig(
        vocab_size=VOCAB,
        hidden_size=4096,
        intermediate_size=10944,
        moe_intermediate_size=1408,
        num_hidden_layers=layers,
        num_attention_heads=96,
        num_key_value_heads=8,
        head_dim=128,
        attention_bias=True,
        n_routed_experts=128,
        n_shared_experts=1,
        num_experts_per_tok=8,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=1,
        max_position_embeddings=8192,
        use_cache=False,
    )
    with torch.device("cuda"):
        peer: torch.nn.Module = transformers.AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16, attn_implementation="sdpa", experts_implementation="grouped_mm"
        )
    return peer


def data(step: int, sequences: int, length: int) -> torch.Tensor:
    """Tokens with something to learn: each row repeats a short passage of its own."""
    generator = torch.Generator("cuda").manual_seed(1000 + step)
    passages = torch.randint(VOCAB, (sequences, 64), generator=generator, device="cuda")
    return passages.repeat(1, length // 64 + 1)[:, : length + 1]


def text(step: int, sequences: int, length: int, bytes_T: torch.Tensor) -> torch.Tensor:
    """Pieces of a text, whose tokens are its bytes, from places that depend on the step alone."""
    generator = torch.Generator().manual_seed(step)
    starts = torch.randint(len(bytes_T) - length - 1, (sequences,), generator=generator).tolist()
    return torch.stack([bytes_T[start : start + length + 1] for start in starts]).long()


def repository() -> torch.Tensor:
    """The guides and the source of this repository, in the order of their names."""
    root = pathlib.Path(__file__).resolve().parent.parent
    files = sorted([*root.glob("docs/*.md"), *root.glob("moesaic/**/*.py")])
    whole = b"".join(file.read_bytes() for file in files)
    return torch.frombuffer(bytearray(whole), dtype=torch.uint8).to("cuda")


def timed(step, warm: int, steps: int) -> tuple[float, list[float], float]:
    """Median seconds per step after `warm` steps, all losses, peak GiB."""
    losses, times = [], []
    torch.cuda.reset_peak_memory_stats()
    for number in range(warm + steps):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        losses.append(step(number))
        end.record()
        times.append((start, end))
    torch.cuda.synchronize()
    seconds = [start.elapsed_time(end) / 1000 for start, end in times[warm:]]
    return statistics.median(seconds), [loss.item() for loss in losses], torch.cuda.max_memory_allocated() / 2**30


def our_step(model: Model, sequences: int, length: int, read=data, lr: float = 1e-4):
    for block in model.layers:
        block.compile(dynamic=False)
    parameters = list(model.parameters())
    averages, squares = [[torch.zeros_like(parameter) for parameter in parameters] for _ in range(2)]
    counts = [torch.zeros((), device="cuda") for _ in parameters]
    layout = Layout([length] * sequences, device="cuda")
    scale_T = torch.full((sequences * length,), 1 / (sequences * length), device="cuda")

    def step(number: int) -> torch.Tensor:
        tokens = read(number, sequences, length)
        hidden_TD = model(tokens[:, :-1].reshape(-1), layout)
        loss, _ = linear_cross_entropy(hidden_TD, model.output, tokens[:, 1:].reshape(-1), scale_T)
        loss.backward()
        gradients = [parameter.grad for parameter in parameters]
        with torch.no_grad():
            adamw(
                parameters, gradients, averages, squares, counts,
                lr=lr, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.01,
            )  # fmt: skip
        model.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def peer_step(peer: torch.nn.Module, sequences: int, length: int, cudnn: bool):
    for layer in peer.model.layers:
        layer.compile()
    peer.train()
    optimizer = torch.optim.AdamW(peer.parameters(), lr=1e-4, fused=True)

    def step(number: int) -> torch.Tensor:
        tokens = data(number, sequences, length)
        backends = [SDPBackend.CUDNN_ATTENTION] if cudnn else [SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION]
        with sdpa_kernel(backends) if cudnn else torch.enable_grad():
            logits = peer(input_ids=tokens[:, :-1]).logits
            loss = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].reshape(-1))
            loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def profile(step, times: int = 2) -> list[tuple[str, float]]:
    """Milliseconds per step of the kernels that take most."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as found:
        for number in range(times):
            step(number)
        torch.cuda.synchronize()
    total: dict[str, float] = collections.defaultdict(float)
    for event in found.key_averages():
        total[event.key[:110]] += event.self_device_time_total / 1000 / times
    return sorted(total.items(), key=lambda item: -item[1])[:45]


def curves(options: argparse.Namespace) -> None:
    """Losses in both dtypes on a real text, from the same weights over the same pieces."""
    bytes_T, found = repository(), {}
    for dtype in ("bf16", "fp8"):
        model = make_ours(options.layers)
        if dtype == "fp8":
            multiply_in_float8(model)

        def read(step: int, sequences: int, length: int) -> torch.Tensor:
            return text(step, sequences, length, bytes_T)

        step = our_step(model, options.sequences, options.length, read, lr=3e-4)
        found[dtype] = torch.stack([step(number) for number in range(options.curve)]).tolist()
        del model, step
        gc.collect()
        torch.cuda.empty_cache()
    for first in range(0, options.curve, max(1, options.curve // 10)):
        means = {dtype: statistics.mean(losses[first : first + 10]) for dtype, losses in found.items()}
        print(f"steps {first + 1:4} to {first + 10:4}", {name: round(mean, 4) for name, mean in means.items()})
    last = {dtype: statistics.mean(losses[-50:]) for dtype, losses in found.items()}
    print(f"the last 50 steps: bf16 {last['bf16']:.4f}, fp8 {last['fp8']:.4f}", flush=True)
    rows = [{"dtype": dtype, "losses": [round(loss, 4) for loss in losses]} for dtype, losses in found.items()]
    sizes = {"layers": options.layers, "sequences": options.sequences, "length": options.length}
    record("gpu_train_curve", rows, **sizes, text_bytes=len(bytes_T))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--sequences", type=int, default=4)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--warm", type=int, default=6)
    parser.add_argument("--who", nargs="*", default=["transformers", "transformers, cuDNN attention", "moesaic"])
    parser.add_argument("--dtype", nargs="*", default=["bf16"], choices=["bf16", "fp8"], help="of our matmuls")
    parser.add_argument("--glm", action="store_true", help="another model")
    parser.add_argument("--curve", type=int, help="steps on a real text in both dtypes, and nothing else")
    parser.add_argument("--profile", action="store_true")
    options = parser.parse_args()
    torch._dynamo.config.recompile_limit = 64
    torch.backends.cuda.matmul.allow_tf32 = (
        True  # the peer compiles with it; our router's products are exact either way
    )
    if options.curve:
        curves(options)
        return
    rows = []
    ours = ["moesaic" if dtype == "bf16" else f"moesaic {dtype}" for dtype in options.dtype]
    for who in [name for asked in options.who for name in (ours if asked == "moesaic" else [asked])]:
        config = glm(options.layers) if options.glm else config_of(options.layers)
        size, operations = facts(config), training_flops(config, [options.length] * options.sequences)
        if who in ours:
            model = random_model(config)
            if who.endswith("fp8"):
                multiply_in_float8(model)
            step = our_step(model, options.sequences, options.length)
            del model
        else:
            peer = glm_peer(options.layers) if options.glm else make_peer(options.layers, random_model(config))
            step = peer_step(peer, options.sequences, options.length, "cuDNN" in who)
            del peer
        gc.collect()
        seconds, losses, gib = timed(step, options.warm, options.steps)
        tokens = options.sequences * options.length
        row = {
            "who": who,
            "tokens_per_second": round(tokens / seconds),
            "ms": round(seconds * 1000, 2),
            "tflops": round(operations / seconds / 1e12, 1),
            "peak_gib": round(gib, 1),
            "losses": [round(loss, 4) for loss in losses],
            "parameters": size.parameters,
            "active": size.active_parameters,
        }
        rows.append(row)
        print(json.dumps(row), flush=True)
        if options.profile:
            for name, ms in profile(step):
                print(f"{ms:9.3f} ms  {name}", flush=True)
        del step
        gc.collect()
        torch.cuda.empty_cache()
        torch._dynamo.reset()
    best = {row["who"]: row["tokens_per_second"] for row in rows}
    if "moesaic" in best and "transformers" in best:
        print(f"ratio {best['moesaic'] / best['transformers']:.3f}x transformers compiled layer by layer", flush=True)
    name = "gpu_train_glm" if options.glm else "gpu_train" if options.dtype == ["bf16"] else "gpu_train_fp8"
    record(name, rows, layers=options.layers, sequences=options.sequences, length=options.length)


if __name__ == "__main__":
    main()
