"""What it costs that trainer and engine agree to the bit: tokens a second in the default mode and in the invariant one.

    python -m bench.align_invariance          under two minutes; writes bench/results/align_invariance.json

Random mixtures of the shapes of Qwen3-MoE (12M parameters) and GLM-4.5 (32M), float32. Rollouts: the engine answers
1, 8 and 32 prompts of 48 tokens with 32 tokens each, at temperature 1. The trainer's step is that of a policy: forward,
log-probabilities, backward over 32 such answers, without the optimizer, which is the same in both modes. The largest
difference between what the engine recorded and what the trainer finds is told too.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from typing import Any

import torch
import transformers

import moesaic
from bench.forward import MODELS
from bench.measure import machine, record, side_by_side
from moesaic.align.rewards import Judged
from moesaic.align.rollouts.rollout import Sample, as_batch
from moesaic.kernels import hardware
from moesaic.model.context import Routing
from moesaic.model.transformer import Model
from moesaic.train.objectives.policy import Policy

SHAPES = ("qwen3_moe 12M", "glm4_moe 32M")
MODES = {"default": "fast", "invariant": "invariant"}
SEQUENCES = (1, 8, 32)
PROMPT, ANSWER = 48, 32


def models(name: str) -> dict[str, Model]:
    """The same weights twice, one for each mode."""
    settings = dict(MODELS[name], max_position_embeddings=512)
    config = transformers.AutoConfig.for_model(settings.pop("model_type"), **settings)
    torch.manual_seed(0)
    found: dict[str, Model] = {}
    with tempfile.TemporaryDirectory() as path:
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(path)
        for told, mode in MODES.items():
            found[told] = moesaic.load(path)
            found[told].mode = mode
    return found


def prompts(count: int, vocab: int) -> list[list[int]]:
    draw = torch.Generator().manual_seed(1)
    return [torch.randint(3, vocab, (PROMPT,), generator=draw).tolist() for _ in range(count)]


def rollouts(model: Model, count: int) -> Callable[[], list[Any]]:
    # Without shared prefixes, so that every turn reads its prompts again.
    engine = moesaic.Engine(model, max_requests=count, reuse_prefixes=False, seed=0)
    asked = prompts(count, model.config.vocab)
    return lambda: engine.generate(asked, max_tokens=ANSWER, temperature=1.0, ignore_eos=True, seed=5)


def step(model: Model, answers: list[Any]) -> Callable[[], float]:
    samples = [
        Sample(asked, done.tokens, [one.logprob for one in done.logprobs], [0] * ANSWER, "", "stop", Judged(0.0, {}))
        for asked, done in zip(prompts(len(answers), model.config.vocab), answers, strict=True)
    ]
    for number, sample in enumerate(samples):
        sample.advantage = 1.0 if number % 2 else -1.0
    batch, objective = as_batch(samples, 0, "token", {}, {}), Policy()

    def once() -> float:
        model.zero_grad()
        loss = objective(model, batch, Routing())
        loss.total.backward()
        return float(loss.notes["mismatch_max"])

    return once


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=5.0, help="measuring time for each number")
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--no-record", action="store_true", help="print only")
    arguments = parser.parse_args()
    torch.set_num_threads(hardware.threads())
    transformers.utils.logging.disable_progress_bar()
    rows: list[dict[str, Any]] = []
    for shape in arguments.shapes:
        both = models(shape)
        measured: dict[str, tuple[dict[str, float], int]] = {}
        for count in SEQUENCES:
            times = side_by_side({m: rollouts(both[m], count) for m in both}, arguments.seconds, least=3)
            measured[f"engine, {count} sequences"] = times, count * ANSWER
        steps = {m: step(both[m], rollouts(both[m], 32)()) for m in both}
        apart = {m: run() for m, run in steps.items()}
        measured["trainer, 32 answers"] = side_by_side(steps, arguments.seconds, least=3), 32 * (PROMPT + ANSWER)
        for what, (times, tokens) in measured.items():
            rate = {m: round(tokens / seconds, 1) for m, seconds in times.items()}
            cost = times["invariant"] / times["default"] - 1.0
            rows.append({"shape": shape, "what": what, "tokens_per_second": rate, "cost": round(cost, 4)})
            print(
                f"{shape:14} {what:22} default {rate['default']:8.0f} tokens/s, invariant {rate['invariant']:8.0f}: "
                f"costs {cost:+.1%}",
                flush=True,
            )
        rows[-1]["mismatch_max"] = apart
        print(
            f"{shape:14} max |Δlogp| of 1,024 tokens: default {apart['default']:.2g}, invariant {apart['invariant']:g}"
        )
    here = machine()
    print(f"float32, {here['cpu']} ({here['cores']} cores), torch {here['torch']}, {here['date']}")
    if not arguments.no_record:
        print(record("align_invariance", rows, prompt=PROMPT, answer=ANSWER))


if __name__ == "__main__":
    main()
