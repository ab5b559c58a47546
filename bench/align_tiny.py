"""A very small mixture model that half knows how to add, and questions of several difficulties: what benches of
alignment begin with. Made once in a folder, in about a minute on one core."""

from __future__ import annotations

import json
import random
from pathlib import Path

import torch

from moesaic.align.align import align
from moesaic.data.tokenizer_training import train_tokenizer, write_tokenizer
from moesaic.recipe import load_recipe

# Sources: name, largest number, terms. The first is known after fine-tuning, the second half known, the third hopeless.
SOURCES = {"easy": (9, 2), "middle": (49, 2), "hard": (999, 4)}
HELD_OUT = 5  # one question in so many is never learned from


def question(name: str, draw: random.Random) -> dict[str, str]:
    most, terms = SOURCES[name]
    numbers = [draw.randint(0, most) for _ in range(terms)]
    return {"question": " + ".join(map(str, numbers)), "answer": str(sum(numbers))}


def questions(name: str, count: int, held_out: bool) -> list[dict[str, str]]:
    """Different ones, the same each time; a question is held out or not by what it says."""
    draw, found = random.Random(name), dict[str, dict[str, str]]()
    for _ in range(50 * count):
        made = question(name, draw)
        if (sum(made["question"].encode()) % HELD_OUT == 0) == held_out:
            found[made["question"]] = made
        if len(found) == count:
            break
    return list(found.values())


def write_files(folder: Path, counts: dict[str, int]) -> None:
    for name, count in counts.items():
        lines = [json.dumps(one) for one in questions(name, count, held_out=False)]
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")


def base(folder: Path, steps: int) -> Path:
    """The model after `steps` of supervised fine-tuning."""
    done = folder / f"sft-{steps}"
    if (done / "config.json").exists() and not (done / "config.json").is_symlink():
        return done
    import transformers

    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    texts = [f"{one['question']} = {one['answer']}\n" for name in SOURCES for one in questions(name, 40, False)]
    blank = folder / "blank"
    config = transformers.Qwen3MoeConfig(
        vocab_size=288,
        hidden_size=64,
        intermediate_size=128,
        moe_intermediate_size=64,
        num_experts=4,
        num_experts_per_tok=2,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=16,
        max_position_embeddings=64,
        eos_token_id=0,
    )
    transformers.Qwen3MoeForCausalLM(config).save_pretrained(blank)
    write_tokenizer(train_tokenizer(texts, 288), blank)
    write_files(folder, {"easy": 60, "middle": 1500, "hard": 500})
    file = folder / "sft.yaml"
    file.write_text(
        f"""
align:
  stages:
    - {{name: sft, steps: {steps}, lr: 0.003, batch_tokens: 1024, longest: 64, save_every: {steps}, evaluate_every: 0,
        data: [{{path: {folder}/easy.jsonl}}, {{path: {folder}/middle.jsonl, weight: 4}},
               {{path: {folder}/hard.jsonl}}]}}
optimizer: {{name: adamw, lr: 0.003, betas: [0.9, 0.95], weight_decay: 0.0}}
schedule: constant
"""
    )
    align(load_recipe(file, []), blank, done, quiet=True)
    return done
