"""One DPO step beside trl's, on a CPU: the same model, pairs and references; forward, loss and backward.

    python -m bench.align_preference

Pairs are of very different lengths, as real ones are: trl pads all to the longest, we pack without padding. Both have
the references beforehand. Prints seconds and a ratio; results/align_preference.json keeps them.
"""

from __future__ import annotations

import random
import tempfile
from pathlib import Path

import torch

import moesaic
from bench.measure import record, side_by_side
from moesaic.align.conversation import Said
from moesaic.align.preference.batch import pack_pairs
from moesaic.align.preference.pairs import Pair
from moesaic.align.preference.reference import answer_logprobs
from moesaic.model.context import Routing
from moesaic.train.objectives.preference import Preference
from tests.align.trl_rows import padded
from tests.random_models import save_random, small_config

PAIRS, PROMPT = 8, 24
SPREADS = {"equal lengths": (64, 64), "8 to 200 tokens": (8, 200)}


def made(place: Path) -> Path:
    config = small_config(
        "qwen3_moe", 4096, hidden=128, ffn=384, layers=4, heads=(4, 2), head_dim=32,
        moe_intermediate_size=128, num_experts=8, num_experts_per_tok=2, eos_token_id=0,
    )  # fmt: skip
    return save_random(config, place)


def drawn(shortest: int, longest: int) -> list[Pair]:
    rng = random.Random(0)

    def said(prompt: list[int]) -> Said:
        answer = [rng.randrange(1, 4096) for _ in range(rng.randint(shortest, longest))]
        return Said(prompt + answer, [False] * len(prompt) + [True] * len(answer))

    prompts = [[rng.randrange(1, 4096) for _ in range(PROMPT)] for _ in range(PAIRS)]
    return [Pair(number, said(prompt), said(prompt)) for number, prompt in enumerate(prompts)]


def trainer(place: Path) -> object:
    import tokenizers
    import transformers
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<pad>": 0, "a": 1, "b": 2}, unk_token="a"))
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<pad>")
    model = transformers.AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32)
    args = DPOConfig(
        tempfile.mkdtemp(), report_to="none", use_cpu=True, bf16=False, gradient_checkpointing=False,
        precompute_ref_log_probs=True, beta=0.1,
    )  # fmt: skip
    data = Dataset.from_list([{"prompt": "a", "chosen": "b", "rejected": "a"}] * 2)
    peer = DPOTrainer(model, None, args, train_dataset=data, processing_class=tokenizer)
    peer.aux_loss_enabled = False
    return peer


def main() -> None:
    place = made(Path(tempfile.mkdtemp()))
    model, objective = moesaic.load(place), Preference(beta=0.1)
    peer = trainer(place)
    rows = []
    for name, spread in SPREADS.items():
        pairs = drawn(*spread)
        reference_P2 = answer_logprobs(model, [side for pair in pairs for side in pair.sides]).reshape(-1, 2) - 0.5
        references = {"ref_chosen_logps": reference_P2[:, 0], "ref_rejected_logps": reference_P2[:, 1]}
        theirs = padded(pairs) | references

        def ours(pairs: list[Pair] = pairs, reference_P2: torch.Tensor = reference_P2) -> float:
            model.zero_grad()
            loss = objective(model, pack_pairs(pairs, {}, reference_P2), Routing()).total
            loss.backward()
            return float(loss.detach())

        def trl(theirs: dict[str, torch.Tensor] = theirs) -> float:
            peer.model.zero_grad()  # type: ignore[attr-defined]
            loss = peer._compute_loss(peer.model, theirs, return_outputs=False)  # type: ignore[attr-defined]
            loss.backward()
            return float(loss.detach())

        assert abs(ours() - trl()) < 1e-3, "not the same loss"
        found = side_by_side({"ours": ours, "trl": trl})
        ratio = found["trl"] / found["ours"]
        print(f"{name:18} trl {found['trl']:.3f} s   ours {found['ours']:.3f} s   {ratio:.2f}x")
        rows.append({"lengths": name, "pairs": PAIRS, **found, "ratio": ratio})
    record("align_preference", rows, model="qwen3_moe, hidden 128, 4 layers, 8 experts of 2, vocabulary 4096")


if __name__ == "__main__":
    main()
