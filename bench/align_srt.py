"""SRT: rollouts of the same questions, epoch after epoch, with and without the suffix trees that outlive a request.

    python -m bench.align_srt                     some minutes the first time, then under two minutes
    python -m bench.align_srt --temperature 0.7 --group 4

The tiny mixture is fine-tuned to work out sums of five to seven digits line by line, some 40 tokens, and then trained
by GRPO (Muon), always on the same 48 prompts; the policy of each epoch is kept. Then the rollouts of every epoch
are timed, one question with a group of answers at a time, by the policy of that epoch: the trees of one epoch are what
the next draft tokens from. Since passes of so small a model cost nothing but Python, it is made as large as a model
of 56M parameters by zeros (`bench.widened`); `--plain` leaves it as it is. Answers are equal with and without drafts,
token for token: a draw is a hash of its seed and place, and a draft token is accepted exactly if it is what was drawn.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch

import moesaic
from bench.align_tiny import sft_model, timed
from bench.measure import record
from bench.widened import widened
from moesaic.align.align import align
from moesaic.align.examples import FileExamples, TaskExamples
from moesaic.align.rollouts.rollout import generate
from moesaic.kernels import hardware
from moesaic.model.transformer import Model
from moesaic.recipe import load_recipe
from moesaic.serve.core.drafters.suffix import Suffix
from moesaic.worlds.completions import seed_of

OUT = Path("out/align_srt")
FAMILY = "chain_sum:min_terms=5,max_terms=7,min_digits=1,max_digits=1,worked=1.0"
QUESTIONS, LONGEST = 48, 64
LARGER = {"hidden": 512, "expert_hidden": 768, "layers": 6}


def policies(epochs: int) -> list[Path]:
    """The policy at the beginning of every epoch of RL."""
    initial, _ = sft_model(0)
    found = [OUT / "worked-out"]
    OUT.mkdir(parents=True, exist_ok=True)
    asked = [TaskExamples(FAMILY, "train")[n] for n in range(QUESTIONS)]
    file = OUT / "questions.jsonl"
    file.write_text("".join(json.dumps({"question": e.question, "answer": e.truth}) + "\n" for e in asked))
    sft = {"name": "sft", "steps": 300, "lr": 0.008, "data": [{"path": f"builtin:{FAMILY}"}], "max_tokens": LONGEST}
    sft |= {"batch_tokens": 2048, "evaluate_every": 100, "evaluate": 128, "save_every": 100}
    timed(found[0], lambda: align(recipe(sft), initial, found[0], quiet=True))
    for epoch in range(1, epochs):
        policy = {"name": "policy", "steps": QUESTIONS // 2, "lr": 0.0001, "data": [{"path": str(file)}], "prompts": 2}
        policy |= {"group": 8, "max_tokens": LONGEST, "rewards": [{"name": "numeric"}], "seed": epoch}
        policy |= {"evaluate_every": 0, "record_routes": False}
        found.append(OUT / f"epoch-{epoch + 1}")
        timed(found[-1], lambda: align(recipe(policy), found[-2], found[-1], quiet=True))
    return found


def recipe(stage: dict[str, Any]) -> Any:
    file = OUT / "recipe.yaml"
    told = {"align": {"stages": [stage]}, "optimizer": {"name": "muon", "lr": 0.008, "weight_decay": 0.0}}
    file.write_text(
        json.dumps(told | {"schedule": {"name": "wsd", "decay": 0.4} if stage["name"] == "sft" else "constant"})
    )
    return load_recipe(file)


def rollouts(policies: list[Model], drafts: bool, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Every epoch's, by one engine that takes the weights of each."""
    model = policies[0].__class__(policies[0].config)
    model.tokenizer, model.mode = policies[0].tokenizer, "invariant"
    engine = moesaic.Engine(model, drafter=Suffix() if drafts else None, max_requests=options.group, seed=0)
    examples = FileExamples(OUT / "questions.jsonl", 0)
    sampling = {"max_tokens": LONGEST, "temperature": options.temperature}
    rows: list[dict[str, Any]] = []
    for epoch, policy in enumerate(policies):
        model.load_state_dict(policy.state_dict())
        engine.weights_changed()
        passes, answers, start = 0, [], time.perf_counter()
        for number, example in enumerate(examples.items[: options.questions]):
            rollouts = generate(engine, [example], options.group, sampling, [], [seed_of(epoch, number)])
            passes += rollouts.work.steps
            answers += [sample.tokens for group in rollouts.groups for sample in group]
        rows.append({"seconds": time.perf_counter() - start, "passes": passes, "answers": answers})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--group", type=int, nargs="+", default=[1, 2, 4, 8], help="answers to a question, at once")
    parser.add_argument("--questions", type=int, default=QUESTIONS, help="of those learned from, the first so many")
    parser.add_argument("--temperature", type=float, nargs="+", default=[1.0])
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--plain", action="store_true", help="the tiny model as it is")
    parser.add_argument("--no-record", action="store_true", help="print only")
    arguments = parser.parse_args()
    torch.set_num_threads(hardware.threads())
    models = [moesaic.load(path) for path in policies(arguments.epochs)]
    if not arguments.plain:
        torch.manual_seed(0)
        models = [widened(model, **LARGER) for model in models]
    parameters = sum(weight.numel() for weight in models[0].parameters())
    rows = []
    for temperature in arguments.temperature:
        for group in arguments.group:
            options = argparse.Namespace(questions=arguments.questions, group=group, temperature=temperature)
            rows += compared(models, options, arguments.rounds)
    if not arguments.no_record:
        record("align_srt", rows, parameters=parameters, questions=arguments.questions)


def compared(models: list[Model], options: argparse.Namespace, rounds: int) -> list[dict[str, Any]]:
    runs = [(rollouts(models, False, options), rollouts(models, True, options)) for _ in range(rounds)]
    rows = []
    for epoch in range(len(models)):
        without = min(plain[epoch]["seconds"] for plain, _ in runs)
        with_trees = min(drafted[epoch]["seconds"] for _, drafted in runs)
        plain, drafted = runs[0][0][epoch], runs[0][1][epoch]
        tokens = sum(map(len, plain["answers"]))
        row = {
            "sequences": options.group,
            "temperature": options.temperature,
            "epoch": epoch + 1,
            "tokens": tokens,
            "passes": [plain["passes"], drafted["passes"]],
            "tokens_per_pass_ratio": round(plain["passes"] / drafted["passes"], 2),
            "seconds": [round(without, 3), round(with_trees, 3)],
            "speed_ratio": round(without / with_trees, 2),
            "answers_equal": all(g[epoch]["answers"] == plain["answers"] for _, g in runs),
        }
        print(
            f"{row['sequences']} sequences at {options.temperature:g}, epoch {epoch + 1}: {tokens} tokens in "
            f"{row['passes'][0]} passes, {row['passes'][1]} with trees: {row['tokens_per_pass_ratio']:.2f}x tokens a "
            f"pass; {without:.2f} s, {with_trees:.2f} s: {row['speed_ratio']:.2f}x; equal: {row['answers_equal']}",
            flush=True,
        )
        rows.append(row)
    return rows


if __name__ == "__main__":
    main()
