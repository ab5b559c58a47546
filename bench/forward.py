"""Flat forward, forward+backward and single-token step on a CPU, against `transformers` on the same weights, float32.

    python -m bench.forward            about five minutes; writes bench/results/forward_cpu.json

The peer runs with its faster attention (SDPA), its faster experts (grouped for many tokens; for one token whichever of
grouped, batched and eager wins), and on a padded batch with a mask, as it must. Ratio = peer's time / ours: above 1 we
are faster.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from rich.console import Console
from rich.table import Table

import moesaic
from bench.measure import machine, record, side_by_side
from moesaic.kernels import hardware
from moesaic.model.layout import Layout
from moesaic.model.transformer import Model

MODELS: dict[str, dict[str, Any]] = {
    "qwen3_moe 12M": {
        "model_type": "qwen3_moe",
        "vocab_size": 4096,
        "hidden_size": 256,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "intermediate_size": 512,
        "moe_intermediate_size": 256,
        "num_experts": 8,
        "num_experts_per_tok": 2,
    },
    "glm4_moe 32M": {
        "model_type": "glm4_moe",
        "vocab_size": 4096,
        "hidden_size": 384,
        "num_hidden_layers": 6,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "intermediate_size": 1024,
        "moe_intermediate_size": 256,
        "n_routed_experts": 16,
        "num_experts_per_tok": 2,
        "num_mtp_layers": 0,
    },
    "SmolLM2 135M": {
        "model_type": "llama",
        "vocab_size": 49152,
        "hidden_size": 576,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "intermediate_size": 1536,
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0},
    },
    "qwen3_moe 238M": {
        "model_type": "qwen3_moe",
        "vocab_size": 32000,
        "hidden_size": 768,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "intermediate_size": 2048,
        "moe_intermediate_size": 384,
        "num_experts": 16,
        "num_experts_per_tok": 2,
    },
}
# The two larger ones are not trained here: a padded step of the peer takes half a minute.
TRAINED = ("qwen3_moe 12M", "glm4_moe 32M")
RAGGED = [256, 31, 180, 77, 12, 140, 9, 64]
SINGLE = [512]


def save_peer(name: str, path: str | Path, **more: Any) -> None:
    settings = dict(MODELS[name], max_position_embeddings=2048, **more)
    config = transformers.AutoConfig.for_model(settings.pop("model_type"), **settings)
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(path)


def pair(name: str) -> tuple[transformers.PreTrainedModel, Model]:
    with tempfile.TemporaryDirectory() as path:
        save_peer(name, path)
        ours = moesaic.load(path)
        theirs = transformers.AutoModelForCausalLM.from_pretrained(path, attn_implementation="sdpa").eval()
    return theirs, ours


def batch(lengths: list[int], vocab: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, vocab, (n,), generator=generator) for n in lengths]


def forward_runs(theirs, ours: Model, lengths: list[int], backward: bool) -> dict[str, Any]:
    sequences = batch(lengths, ours.config.vocab)
    padded = torch.nn.utils.rnn.pad_sequence(sequences, batch_first=True)
    mask = torch.arange(padded.shape[1]) < torch.tensor(lengths)[:, None]
    labels = padded.masked_fill(~mask, -100)
    flat, layout = torch.cat(sequences), Layout(lengths)
    targets = torch.cat([F.pad(tokens[1:], (0, 1), value=-100) for tokens in sequences])
    inputs = {"input_ids": padded, "use_cache": False} | ({"attention_mask": mask} if len(lengths) > 1 else {})

    def peer():
        if not backward:
            with torch.inference_mode():
                return theirs(**inputs).logits
        theirs.zero_grad(set_to_none=True)
        theirs(**inputs, labels=labels).loss.backward()

    def own():
        if not backward:
            with torch.inference_mode():
                return ours.logits_at(ours(flat, layout))
        ours.zero_grad(set_to_none=True)
        F.cross_entropy(ours.logits_at(ours(flat, layout)), targets).backward()

    return {"grouped_mm": peer, "ours": own}


def step_runs(theirs, ours: Model, context: int = 128) -> dict[str, Any]:
    """One token after `context` cached ones."""
    tokens = batch([context + 1], ours.config.vocab)[0]
    pages = [list(range(-(-(context + 1) // 16)))]
    cache = ours.new_cache(len(pages[0]))
    with torch.inference_mode():
        ours(tokens[:context], Layout([context], cached=[0], cache=cache, pages=pages))

    def peer(kind: str):
        choose = theirs.set_experts_implementation if ours.config.has_experts else lambda kind: None
        choose(kind)
        with torch.inference_mode():
            past = theirs(tokens[None, :context], use_cache=True).past_key_values

        def run():
            choose(kind)
            with torch.inference_mode():
                theirs(tokens[None, context:], past_key_values=past, use_cache=True)
                past.crop(-1)

        return run

    def own():
        with torch.inference_mode():
            layout = Layout([1], cached=[context], cache=cache, pages=pages)
            ours.logits_at(ours(tokens[context:], layout))

    kinds = ["grouped_mm", "batched_mm", "eager"] if ours.config.has_experts else ["grouped_mm"]
    return {kind: peer(kind) for kind in kinds} | {"ours": own}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=3.0, help="measuring time per entry")
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--no-record", action="store_true", help="print only")
    arguments = parser.parse_args()
    torch.set_num_threads(hardware.threads())
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    rows = []
    for name in arguments.models:
        theirs, ours = pair(name)
        cases = {
            "ragged forward": forward_runs(theirs, ours, RAGGED, False),
            "ragged forward+backward": forward_runs(theirs, ours, RAGGED, True),
            "single forward": forward_runs(theirs, ours, SINGLE, False),
            "single forward+backward": forward_runs(theirs, ours, SINGLE, True),
            "one-token step": step_runs(theirs, ours),
        }
        for case, runs in cases.items():
            if "backward" in case and name not in TRAINED:
                continue
            times = side_by_side(runs, arguments.seconds)
            own = times.pop("ours")
            kind, peer = min(times.items(), key=lambda item: item[1])
            rows.append(
                {
                    "model": name,
                    "case": case,
                    "peer": kind,
                    "peer_ms": peer * 1e3,
                    "ours_ms": own * 1e3,
                    "ratio": peer / own,
                }
            )
            print({k: round(v, 3) if isinstance(v, float) else v for k, v in rows[-1].items()}, flush=True)
        del theirs, ours
    here = machine()
    table = Table(title=f"float32, {here['cpu']} ({here['cores']} cores), torch {here['torch']}, {here['date']}")
    for column in ("model", "case", "transformers", "ours", "ratio"):
        table.add_column(column, justify="left" if column in ("model", "case") else "right")
    for row in rows:
        table.add_row(
            row["model"], row["case"], f"{row['peer_ms']:.1f} ms", f"{row['ours_ms']:.1f} ms", f"{row['ratio']:.2f}x"
        )
    Console().print(table)
    if not arguments.no_record:
        print(record("forward_cpu", rows, transformers=transformers.__version__))


if __name__ == "__main__":
    main()
