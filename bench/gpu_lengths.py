"""One block on one GPU over sequences of 16 to 32,768 tokens, beside transformers' block compiled: GQA and MLA.

    python bench/gpu_lengths.py                    three shapes, seven lengths, 32,768 tokens each; the worst ratio
    python bench/gpu_lengths.py --shapes mla --lengths 16 512
    python bench/gpu_lengths.py --tiny             on a CPU: does the program work

Sequences of a row have one length, so that transformers can hold them as a batch without padding. Attention and a small
dense network, random weights, bfloat16; a forward without gradients, and a forward with its gradients.
"""

from __future__ import annotations

import argparse
import gc
import pathlib
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
from bench.measure import record
from bench.random_weights import random_model
from moesaic.model.config import Dense, GroupedQuery, Latent, Layer, ModelConfig, Rope
from moesaic.model.layout import Layout
from moesaic.model.transformer import Model

LENGTHS = (16, 64, 256, 1024, 4096, 16384, 32768)
TOKENS, VOCAB, FFN = 32768, 1024, 1024
SHAPES: dict[str, tuple[int, GroupedQuery | Latent]] = {  # hidden size, attention
    "gqa 32/4": (2048, GroupedQuery(32, 4, 128, qk_norm=True)),
    "gqa 64/8": (7168, GroupedQuery(64, 8, 128, qk_norm=True)),
    "mla": (4096, Latent(128, 512, 128, 64, 128, q_rank=1536)),
}
TINY: dict[str, tuple[int, GroupedQuery | Latent]] = {
    "gqa 32/4": (64, GroupedQuery(4, 2, 16, qk_norm=True)),
    "gqa 64/8": (96, GroupedQuery(4, 1, 16, qk_norm=True)),
    "mla": (64, Latent(4, 32, 16, 8, 16, q_rank=24)),
}


def make_ours(hidden: int, attention: GroupedQuery | Latent, length: int, kind: torch.dtype, device: str) -> Model:
    latent = isinstance(attention, Latent)
    config = ModelConfig(
        family="deepseek_v3" if latent else "qwen3",
        vocab=VOCAB,
        hidden=hidden,
        attention=attention,
        rope=Rope(attention.rope_size if isinstance(attention, Latent) else attention.head_size, interleaved=latent),
        layers=(Layer(Dense(FFN)),),
        context=length,
        dtype=str(kind).removeprefix("torch."),
    )
    return random_model(config, device)


def make_peer(hidden: int, attention: GroupedQuery | Latent, length: int, kind: torch.dtype, device: str) -> Any:
    import transformers

    same = {
        "vocab_size": VOCAB, "hidden_size": hidden, "intermediate_size": FFN, "num_hidden_layers": 1,
        "num_attention_heads": attention.heads, "max_position_embeddings": length, "use_cache": False,
    }  # fmt: skip
    if isinstance(attention, Latent):
        config = transformers.DeepseekV3Config(
            **same, num_key_value_heads=attention.heads, q_lora_rank=attention.q_rank, kv_lora_rank=attention.kv_rank,
            qk_nope_head_dim=attention.plain_size, qk_rope_head_dim=attention.rope_size,
            v_head_dim=attention.value_size, first_k_dense_replace=1,
        )  # fmt: skip
    else:
        config = transformers.Qwen3Config(
            **same, num_key_value_heads=attention.kv_heads, head_dim=attention.head_size
        )  # fmt: skip
    with torch.device(device):
        return transformers.AutoModel.from_config(config, dtype=kind, attn_implementation="sdpa")


def seconds(run: Callable[[], object], times: int) -> float:
    """The median of some runs after two that compile."""
    found = []
    for number in range(times + 2):
        synchronize()
        start = time.perf_counter()
        run()
        synchronize()
        if number > 1:
            found.append(time.perf_counter() - start)
    return statistics.median(found)


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def both(forward: Callable[[], torch.Tensor], times: int) -> tuple[float, float]:
    """Seconds of a forward, and of a forward and its gradients."""

    def learn() -> None:
        forward().square().mean().backward()

    with torch.no_grad():
        alone = seconds(forward, times)
    return alone, seconds(learn, times)


def our_times(given: tuple[Any, ...], ids_ST: torch.Tensor, options: argparse.Namespace) -> tuple[float, float]:
    model = make_ours(*given)
    if not options.tiny:
        for block in model.layers:
            block.compile(dynamic=False)
    layout = Layout([ids_ST.shape[1]] * len(ids_ST), device=ids_ST.device)
    return both(lambda: model(ids_ST.flatten(), layout), options.times)


def peer_times(given: tuple[Any, ...], ids_ST: torch.Tensor, options: argparse.Namespace) -> tuple[float, float]:
    model = make_peer(*given)
    if not options.tiny:
        for layer in model.layers:
            layer.compile(dynamic=False)
    return both(lambda: model(ids_ST).last_hidden_state, options.times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="*", default=list(SHAPES), choices=SHAPES)
    parser.add_argument("--lengths", type=int, nargs="*", default=LENGTHS)
    parser.add_argument("--tokens", type=int, default=TOKENS)
    parser.add_argument("--times", type=int, default=5)
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    device, kind = ("cpu", torch.float32) if options.tiny else ("cuda", torch.bfloat16)
    tokens = 512 if options.tiny else options.tokens
    torch._dynamo.config.recompile_limit = 64
    rows = []
    for name in options.shapes:
        hidden, attention = (TINY if options.tiny else SHAPES)[name]
        for length in [length for length in options.lengths if length <= tokens]:
            given = (hidden, attention, length, kind, device)
            ids_ST = torch.randint(VOCAB, (tokens // length, length), device=device)
            ours, theirs = ([1000 * s for s in times(given, ids_ST, options)] for times in (our_times, peer_times))
            row = {"shape": name, "length": length, "ours_ms": ours, "peer_ms": theirs}
            row["ratios"] = [round(b / a, 3) for a, b in zip(ours, theirs, strict=True)]
            rows.append(row)
            print(name, length, *(f"{ms:.2f}" for ms in [*ours, *theirs]), *row["ratios"], flush=True)
            gc.collect()
            torch._dynamo.reset()
            if device == "cuda":
                torch.cuda.empty_cache()
    worst = [min(rows, key=lambda row: row["ratios"][part]) for part in (0, 1)]
    for part, row in enumerate(worst):
        print(
            f"worst {('forward', 'both')[part]}: {row['ratios'][part]:.2f}x at {row['shape']}, {row['length']} tokens"
        )
    if not options.tiny:
        record("gpu_lengths", rows, tokens=tokens)


if __name__ == "__main__":
    main()
