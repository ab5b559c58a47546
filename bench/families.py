"""The newer families beside `transformers` on the same random weights, float32: how far apart, and at what cost.

    python -m bench.families            about a minute; writes bench/results/families.json
    python -m bench.families qwen3_next             some of them; writes bench/results/families-qwen3_next.json

Error: the norm of the difference of all logits of a prompt, over that of the peer's. Costs are processor seconds of one
thread, medians of turns that alternate; the peer has its grouped experts and, where the family has it, SDPA.
Ratio = peer's time / ours: above 1 we are faster.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.table import Table

import moesaic
from bench.measure import record
from moesaic.model.layout import Layout
from moesaic.model.transformer import Model

SIZES: dict[str, Any] = {
    "vocab_size": 2048, "hidden_size": 192, "num_hidden_layers": 4, "num_attention_heads": 6, "num_key_value_heads": 2,
    "max_position_embeddings": 1024, "initializer_range": 0.1,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "gpt_oss": {"intermediate_size": 192, "num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": 64,
                "head_dim": 32},
    "llama4_text": {"intermediate_size": 192, "intermediate_size_mlp": 384, "num_local_experts": 8,
                    "attention_chunk_size": 64, "floor_scale": 64, "head_dim": 32},
    "qwen2_moe": {"moe_intermediate_size": 192, "shared_expert_intermediate_size": 192, "intermediate_size": 384,
                  "num_experts": 8, "num_experts_per_tok": 2},
    "olmoe": {"intermediate_size": 192, "num_experts": 8, "num_experts_per_tok": 2},
    "minimax_m2": {"intermediate_size": 192, "num_local_experts": 8, "num_experts_per_tok": 2, "head_dim": 32},
    "hunyuan_v1_moe": {"intermediate_size": 192, "num_experts": 8, "moe_topk": 2, "head_dim": 32},
    "dots1": {"intermediate_size": 384, "moe_intermediate_size": 192, "n_routed_experts": 8, "num_experts_per_tok": 2,
              "n_shared_experts": 1, "first_k_dense_replace": 1, "head_dim": 32, "sliding_window": None},
    "qwen3_next": {"intermediate_size": 384, "moe_intermediate_size": 192, "shared_expert_intermediate_size": 192,
                   "num_experts": 8, "num_experts_per_tok": 2, "head_dim": 32, "linear_num_key_heads": 3,
                   "linear_num_value_heads": 6, "linear_key_head_dim": 32, "linear_value_head_dim": 32},
    "qwen3_5_moe_text": {"moe_intermediate_size": 192, "shared_expert_intermediate_size": 192, "num_experts": 8,
                         "num_experts_per_tok": 2, "head_dim": 32, "linear_num_key_heads": 3,
                         "linear_num_value_heads": 6, "linear_key_head_dim": 32, "linear_value_head_dim": 32},
    "glm": {"intermediate_size": 384, "head_dim": 32, "pad_token_id": 0},
    "ernie4_5_moe": {"intermediate_size": 384, "moe_intermediate_size": 192, "moe_num_experts": 8, "moe_k": 2,
                     "pad_token_id": 0},
    "kimi_k2": {"intermediate_size": 384, "moe_intermediate_size": 192, "kv_lora_rank": 64, "q_lora_rank": 96,
                "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32, "n_routed_experts": 8,
                "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
                "num_key_value_heads": 6},
    "qwen3_vl_moe": {"intermediate_size": 384, "moe_intermediate_size": 192, "num_experts": 8,
                     "num_experts_per_tok": 2, "head_dim": 32},
}  # fmt: skip
PEERS = {"kimi_k2": "deepseek_v3"}  # what the peer calls it
EYES = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "patch_size": 4, "out_hidden_size": 192,
        "num_position_embeddings": 16, "deepstack_visual_indexes": [0]}  # fmt: skip
PROMPT, ANSWER, TURNS = 200, 24, 3


def main() -> None:
    torch.set_num_threads(1)
    named = sys.argv[1:]
    rows = [measured(name) for name in named or FAMILIES]
    table = Table("family", "error", "greedy tokens equal", "prompt", "ratio", "token", "ratio")
    for row in rows:
        table.add_row(
            row["family"], f"{row['error']:.1e}", f"{row['equal_tokens']} of {ANSWER}", f"{row['prompt_ms']:.0f} ms",
            f"{row['prompt_ratio']:.2f}", f"{row['token_ms']:.1f} ms", f"{row['token_ratio']:.2f}",
        )  # fmt: skip
    Console().print(table)
    print(
        record("-".join(["families", *named]), rows, prompt=PROMPT, answer=ANSWER, clock="processor time, one thread")
    )


def measured(name: str) -> dict[str, Any]:
    theirs, ours = models(name)
    generator = torch.Generator().manual_seed(1)
    prompt = torch.randint(3, SIZES["vocab_size"], (PROMPT,), generator=generator)
    with torch.inference_mode():
        wanted = theirs(prompt[None], use_cache=False).logits[0]
        error = float((ours.logits([prompt.tolist()])[0] - wanted).norm() / wanted.norm())
        expected = generated(theirs, prompt, ANSWER)
        found = decoded(ours, prompt, ANSWER)
        prefill = turns({"ours": lambda: decoded(ours, prompt, 1), "theirs": lambda: generated(theirs, prompt, 1)})
        whole = turns(
            {"ours": lambda: decoded(ours, prompt, ANSWER), "theirs": lambda: generated(theirs, prompt, ANSWER)}
        )
    token = {who: (whole[who] - prefill[who]) / (ANSWER - 1) for who in whole}
    return {
        "family": name,
        "error": error,
        "equal_tokens": sum(a == b for a, b in zip(found, expected, strict=True)),
        "prompt_ms": 1e3 * prefill["ours"],
        "prompt_ratio": prefill["theirs"] / prefill["ours"],
        "token_ms": 1e3 * token["ours"],
        "token_ratio": token["theirs"] / token["ours"],
    }


def models(name: str) -> tuple[transformers.PreTrainedModel, Model]:
    sizes, kind = SIZES | FAMILIES[name], PEERS.get(name, name)
    sees = name == "qwen3_vl_moe"  # the whole model, which is given text
    given = {"text_config": sizes, "vision_config": EYES} if sees else sizes
    config = transformers.AutoConfig.for_model(kind, **given)
    torch.manual_seed(0)
    auto = transformers.AutoModelForImageTextToText if sees else transformers.AutoModelForCausalLM
    theirs = auto.from_config(config).eval()
    for router in [tensor for tensor in theirs.parameters() if not tensor.any() and tensor.dim() == 2]:
        torch.nn.init.normal_(router, std=SIZES["initializer_range"])  # which some begin with zeros
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / name
        theirs.save_pretrained(place)
        raw = json.loads((place / "config.json").read_text())
        (place / "config.json").write_text(json.dumps(raw | {"model_type": name}))
        return theirs, moesaic.load(place, threads=1)


def generated(model: transformers.PreTrainedModel, prompt: torch.Tensor, count: int) -> list[int]:
    out = model.generate(prompt[None], max_new_tokens=count, do_sample=False, eos_token_id=None, pad_token_id=0)
    tokens: list[int] = out[0, len(prompt) :].tolist()
    return tokens


def decoded(model: Model, prompt: torch.Tensor, count: int) -> list[int]:
    """A plain loop over the paged cache, as bare as the peer's."""
    pages = -(-(PROMPT + ANSWER) // 16)
    cache, tokens, done, new = model.new_cache(pages), [], 0, prompt
    for _ in range(count):
        layout = Layout([len(new)], cached=[done], cache=cache, pages=[list(range(pages))], states=[0])
        hidden_TD = model(new, layout)
        done += len(new)
        new = model.logits_at(hidden_TD, slice(-1, None)).argmax(-1)
        tokens.append(int(new))
    return tokens


def turns(runs: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Median processor seconds."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(TURNS):
        for name, run in runs.items():
            start = time.process_time()
            run()
            times[name].append(time.process_time() - start)
    return {name: statistics.median(all_times) for name, all_times in times.items()}


if __name__ == "__main__":
    main()
