"""LoRA steps beside trl's and peft's: DPO on pairs, GRPO on given completions, from the same weights, adapter and data.

    python -m bench.lora_trl [--steps 8] [--seeds 3]
    python -m bench.lora_trl --generation       # what an adapter that is trained costs rollouts: lora_generation.json

Every step is forward, loss, backward, clipping and AdamW; the losses are compared step by step, so that a difference in
a gradient would show in the next one. Both sides have the reference's log-probabilities beforehand. A third run trains
all weights in our trainer, for what an adapter saves. Times are processor seconds on one thread, steps of all sides in
turn; a ratio is of the medians of a seed. Prints a table; results/lora_trl.json keeps it.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import moesaic
from bench.measure import record
from moesaic.align.conversation import Said
from moesaic.align.preference.batch import pack_pairs
from moesaic.align.preference.pairs import Pair
from moesaic.align.preference.reference import answer_logprobs
from moesaic.align.rewards import Judged
from moesaic.align.rollouts.rollout import Sample, as_batch
from moesaic.data.packing import Batch
from moesaic.model.context import Routing
from moesaic.model.lora import FOLDER, Lora
from moesaic.model.transformer import Model
from moesaic.train.objectives import Objective, layout_of
from moesaic.train.objectives.policy import Policy
from moesaic.train.objectives.preference import Preference
from moesaic.train.optimizers import Optimizer
from moesaic.train.optimizers.adamw import AdamW
from tests.align.trl_rows import padded
from tests.random_models import save_random, small_config

VOCABULARY, SEQUENCES, PROMPT = 4096, 8, 24
LENGTHS = {"8 to 160 tokens": (8, 160), "84 tokens each": (84, 84)}  # of completions: trl pads, we pack
RANK, ALPHA, TARGETS = 16, 32.0, ("q_proj", "k_proj", "v_proj", "o_proj")
MODEL = "qwen3_moe, hidden 128, 4 layers, 8 experts of 2, vocabulary 4096"
ADAPTER = f"rank {RANK} on {', '.join(TARGETS)}"
LR, BETAS, EPS, CLIP, BETA = 2e-3, (0.9, 0.95), 1e-8, 1.0, 0.1


def base(place: Path, seed: int) -> Path:
    config = small_config(
        "qwen3_moe", VOCABULARY, hidden=128, ffn=384, layers=4, heads=(4, 2), head_dim=32,
        moe_intermediate_size=128, num_experts=8, num_experts_per_tok=2, eos_token_id=0,
    )  # fmt: skip
    return save_random(config, place, seed=seed)


def drawn_pairs(rng: random.Random, lengths: tuple[int, int]) -> list[Pair]:
    def said(prompt: list[int]) -> Said:
        answer = [rng.randrange(1, VOCABULARY) for _ in range(rng.randint(*lengths))]
        return Said(prompt + answer, [False] * len(prompt) + [True] * len(answer))

    prompts = [[rng.randrange(1, VOCABULARY) for _ in range(PROMPT)] for _ in range(SEQUENCES)]
    return [Pair(number, said(prompt), said(prompt)) for number, prompt in enumerate(prompts)]


def drawn_samples(rng: random.Random, lengths: tuple[int, int]) -> list[Sample]:
    """Completions of prompts, as an engine would have given them; what it held likely is filled in later."""
    found = []
    for number in range(SEQUENCES):
        prompt, tokens = ([rng.randrange(1, VOCABULARY) for _ in range(n)] for n in (PROMPT, rng.randint(*lengths)))
        given = [0.0] * len(tokens), [1] * len(tokens), "", "stop", Judged(0.0, {}, ())
        found.append(Sample(prompt, tokens, *given, advantage=1.0 if number % 2 else -1.0))
    return found


def padded_samples(samples: list[Sample]) -> dict[str, Tensor]:
    longest = max(len(one.tokens) for one in samples)

    def rows(values: Iterable[Sequence[float]], fill: float = 0) -> Tensor:
        return torch.tensor([[*row, *[fill] * (longest - len(row))] for row in values])

    return {
        "prompt_ids": torch.tensor([one.prompt for one in samples]),
        "prompt_mask": torch.ones(len(samples), PROMPT, dtype=torch.long),
        "completion_ids": rows(one.tokens for one in samples).long(),
        "completion_mask": rows([1] * len(one.tokens) for one in samples).long(),
        "advantages": torch.tensor([one.advantage for one in samples]),
        "old_per_token_logps": rows(one.logprobs for one in samples).float(),
    }


def peers(place: Path, adapter: Path) -> tuple[Any, Any]:
    """trl's trainers of a model under an adapter; their data sets only satisfy their constructors."""
    import peft
    import tokenizers
    import transformers
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer

    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<pad>": 0, "a": 1, "b": 2}, unk_token="a"))
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<pad>")

    def model() -> Any:
        plain = transformers.AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32)
        return peft.PeftModel.from_pretrained(plain, adapter, is_trainable=True)

    same: dict[str, Any] = {"report_to": "none", "use_cpu": True, "bf16": False, "gradient_checkpointing": False}
    pairs = Dataset.from_list([{"prompt": "a", "chosen": "b", "rejected": "a"}] * 2)
    dpo_config = DPOConfig(tempfile.mkdtemp(), precompute_ref_log_probs=True, beta=BETA, **same)
    dpo = DPOTrainer(model(), None, dpo_config, train_dataset=pairs, processing_class=tokenizer)
    prompts = Dataset.from_list([{"prompt": "a"}] * 8)
    grpo_config = GRPOConfig(
        tempfile.mkdtemp(), beta=0.0, loss_type="grpo", temperature=1.0, per_device_train_batch_size=SEQUENCES, **same
    )
    grpo = GRPOTrainer(model(), lambda completions, **_: [0.0] * len(completions), grpo_config, prompts,
                       processing_class=tokenizer)  # fmt: skip
    grpo.current_gradient_accumulation_steps = 1
    for trainer in (dpo, grpo):
        trainer.aux_loss_enabled = False  # the routers' balance loss is no part of either
    return dpo, grpo


Step = Callable[[], float]


def their_step(trainer: Any, inputs: dict[str, Tensor]) -> Step:
    trained = [parameter for parameter in trainer.model.parameters() if parameter.requires_grad]
    began = trainer.__dict__.setdefault("began", [parameter.detach().clone() for parameter in trained])
    with torch.no_grad():
        for parameter, value in zip(trained, began, strict=True):
            parameter.copy_(value)
    optimizer = torch.optim.AdamW(trained, lr=LR, betas=BETAS, eps=EPS, weight_decay=0.0, fused=True)

    def step() -> float:
        loss = trainer._compute_loss(trainer.model, inputs) if "advantages" in inputs else trainer._compute_loss(
            trainer.model, inputs, return_outputs=False
        )  # fmt: skip
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, CLIP)
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    return step


def our_optimizer(model: Model) -> Optimizer:
    return AdamW(lr=LR, betas=BETAS, eps=EPS, weight_decay=0.0).build(model.named_parameters())


def our_step(model: Model, optimizer: Optimizer, objective: Objective, batch: Batch) -> Step:
    def step() -> float:
        optimizer.zero_grad()
        loss = objective(model, batch, Routing()).total
        loss.backward()
        optimizer.step(1.0, clip=CLIP)
        return float(loss.detach())

    return step


def bytes_of(tensors: Iterable[Tensor | None]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors if tensor is not None)


def opened(place: Path, lora: bool) -> Model:
    model = moesaic.load(place)
    if lora:
        model.lora = Lora(model, RANK, ALPHA, TARGETS, seed=0)
    return model


def measured(seed: int, steps: int) -> Iterator[dict[str, Any]]:
    place, rng = base(Path(tempfile.mkdtemp()), seed), random.Random(seed)
    first = opened(place, lora=True)
    assert first.lora is not None
    for name, content in first.lora.files(first.state_dict(), str(place), []).items():
        (place / FOLDER).mkdir(exist_ok=True)
        (place / name).write_bytes(content)
    dpo, grpo = peers(place, place / FOLDER)
    for lengths in LENGTHS:
        yield from compared(seed, steps, lengths, first, place, dpo, grpo, rng)


def compared(
    seed: int, steps: int, lengths: str, first: Model, place: Path, dpo: Any, grpo: Any, rng: random.Random
) -> Iterator[dict[str, Any]]:
    pairs, samples = drawn_pairs(rng, LENGTHS[lengths]), drawn_samples(rng, LENGTHS[lengths])
    reference_P2 = answer_logprobs(first, [side for pair in pairs for side in pair.sides]).reshape(-1, 2)
    _hold_likely(first, samples)
    cases: list[tuple[str, Any, dict[str, Tensor], Objective, Callable[[], Batch]]] = [
        ("DPO", dpo, padded(pairs) | {"ref_chosen_logps": reference_P2[:, 0], "ref_rejected_logps": reference_P2[:, 1]},
         Preference(beta=BETA), lambda: pack_pairs(pairs, {}, reference_P2)),
        ("GRPO", grpo, padded_samples(samples), Policy(), lambda: as_batch(samples, 1, "sequence", {}, {})),
    ]  # fmt: skip
    for name, trainer, theirs, objective, batch in cases:
        model, whole = opened(place, lora=True), opened(place, lora=False)
        model.mode = whole.mode = "invariant" if name == "GRPO" else "fast"
        optimizers = {"ours": our_optimizer(model), "ours, all weights": our_optimizer(whole)}
        sides = {
            "trl": their_step(trainer, theirs),
            "ours": our_step(model, optimizers["ours"], objective, batch()),
            "ours, all weights": our_step(whole, optimizers["ours, all weights"], objective, batch()),
        }
        losses: dict[str, list[float]] = {side: [] for side in sides}
        seconds: dict[str, list[float]] = {side: [] for side in sides}
        for _ in range(steps):
            for side, step in sides.items():
                began = time.process_time()
                losses[side].append(step())
                seconds[side].append(time.process_time() - began)
        medians = {side: statistics.median(spent[1:]) for side, spent in seconds.items()}
        kept = {
            side: {
                "gradients": bytes_of(slot.parameter.grad for slot in optimizers[side].slots),
                "optimizer": bytes_of(optimizers[side].state_dict().values()),
            }
            for side in optimizers
        }
        row = {
            "method": name,
            "lengths": lengths,
            "seed": seed,
            "losses": {side: losses[side] for side in ("trl", "ours")},
            "largest_difference": max(abs(a - b) for a, b in zip(losses["trl"], losses["ours"], strict=True)),
            "processor_seconds": medians,
            "trl_over_ours": medians["trl"] / medians["ours"],
            "all_weights_over_adapter": medians["ours, all weights"] / medians["ours"],
            "bytes": kept,
            "bytes_of_weights": bytes_of(whole.parameters()),
            "bytes_of_adapter": bytes_of(model.lora.parameters() if model.lora is not None else ()),
        }
        print(name, lengths, seed, medians, row["largest_difference"], flush=True)
        yield row


@torch.no_grad()
def _hold_likely(model: Model, samples: list[Sample]) -> None:
    """What the policy itself holds completions to be before the first step, as an engine records it."""
    model.mode = "invariant"
    batch = as_batch(samples, 1, "sequence", {}, {})
    logprobs_T, _ = model.token_logprobs(model(batch.tokens_T, layout_of(batch)), batch.targets_T)
    for sample, own_T in zip(samples, logprobs_T.split(batch.lengths), strict=True):
        sample.logprobs = own_T[len(sample.prompt) - 1 : -1].tolist()
    model.mode = "fast"


def generated(seeds: int, turns: int = 5) -> list[dict[str, Any]]:
    """Processor seconds of the same rollouts, 16 of 32 tokens, with an adapter that is being trained and without."""
    rows = []
    for seed in range(seeds):
        place = base(Path(tempfile.mkdtemp()), seed)
        engines = {}
        for name in ("adapter", "none"):
            model = opened(place, lora=name == "adapter")
            model.mode = "invariant"
            engines[name] = moesaic.Engine(model, max_requests=16)
        seconds: dict[str, list[float]] = {name: [] for name in engines}
        for turn in range(turns + 1):
            prompts = [
                [1 + (turn * 97 + seed * 31 + n * 7 + m) % (VOCABULARY - 1) for m in range(24)] for n in range(16)
            ]
            for name, engine in engines.items():
                began = time.process_time()
                engine.generate(prompts, max_tokens=32, temperature=1.0, ignore_eos=True)
                seconds[name].append(time.process_time() - began)
        medians = {name: statistics.median(spent[1:]) for name, spent in seconds.items()}
        ratio = medians["adapter"] / medians["none"]
        rows.append({"seed": seed, "processor_seconds": medians, "adapter_over_none": ratio})
        print(rows[-1], flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--generation", action="store_true", help="what an adapter costs rollouts, and nothing else")
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.generation:
        record("lora_generation", generated(given.seeds), model=MODEL, adapter=ADAPTER)
        return
    rows = [row for seed in range(given.seeds) for row in measured(seed, given.steps)]
    for method, lengths in ((method, lengths) for method in ("DPO", "GRPO") for lengths in LENGTHS):
        mine = [row for row in rows if (row["method"], row["lengths"]) == (method, lengths)]
        name = f"{method:5} {lengths:16}"
        for key in ("trl_over_ours", "all_weights_over_adapter"):
            ratios = sorted(row[key] for row in mine)
            print(f"{name} {key:26} {statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})")
        print(f"{name} largest difference of losses {max(row['largest_difference'] for row in mine):.1e}")
        print(f"{name} bytes {mine[0]['bytes']}")
    record(
        "lora_trl", rows, model=MODEL, adapter=ADAPTER, steps=given.steps,
    )  # fmt: skip


if __name__ == "__main__":
    main()
