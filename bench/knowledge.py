"""A replaceable knowledge base: facts are exchanged, and answers follow while reasoning stays.

    python -m bench.knowledge                    about two minutes of one core
    python -m bench.knowledge --seeds 0

A fact gives a name a number, a question is a name and a step ("Anna plus three"), and the answer their sum. Asked are
models that read facts in one layer, trained with other facts in every sequence (as the objective `knowledge` does) or
always with the same ones, and a plain model of about the same size that has the facts in its weights alone. Before and
after the facts are exchanged: with names, whose answers need a fact and a step; and with numbers in place of names,
which need the step alone. Writes bench/results/knowledge.json.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from bench.measure import machine, record
from moesaic.model.config import Dense, GroupedQuery, Knowledge, Layer, ModelConfig, Reading, Rope
from moesaic.model.layout import Layout
from moesaic.model.transformer import Model
from moesaic.train.optimizers.adamw import AdamW

NUMBERS, NAMES, KNOWN = 10, 16, 4  # tokens: numbers, then steps, then names; facts of a sequence
STEP, NAME = 2 * NUMBERS, 3 * NUMBERS  # sums are numbers, too
VOCAB = NAME + NAMES
READER = ModelConfig(
    "moesaic",
    VOCAB,
    32,
    GroupedQuery(2, 2, 16),
    Rope(8),
    (Layer(Dense(64)), Layer(Reading(32)), Layer(Dense(128)), Layer(Dense(128))),
    knowledge=Knowledge(2),
    context=8,
    init_std=0.1,
)
PLAIN = replace(READER, knowledge=None, layers=tuple(Layer(Dense(100)) for _ in range(4)))


@dataclass(frozen=True)
class Asked:
    tokens_T: Tensor  # two of each question
    answers_S: Tensor
    facts: list[list[list[int]]]  # of each question


def base(seed: int) -> Tensor:
    """A number for every name."""
    return torch.randint(NUMBERS, (NAMES,), generator=torch.Generator().manual_seed(seed))


def ask(count: int, seed: int, given: Tensor | None = None, numbers: float = 0.3) -> Asked:
    """Questions, so many of them about numbers; about `given` facts, or each about its own."""
    generator = torch.Generator().manual_seed(seed)

    def draw(high: int, *shape: int) -> Tensor:
        return torch.randint(high, shape, generator=generator)

    names_SK = torch.stack([torch.randperm(NAMES, generator=generator)[:KNOWN] for _ in range(count)])
    values_SK = draw(NUMBERS, count, KNOWN) if given is None else given[names_SK]
    steps_S, literal_S = draw(NUMBERS, count), torch.rand(count, generator=generator) < numbers
    chosen_S = draw(NUMBERS, count)
    firsts_S = torch.where(literal_S, chosen_S, names_SK[:, 0] + NAME)
    answers_S = torch.where(literal_S, chosen_S, values_SK[:, 0]) + steps_S
    facts = [
        [[name + NAME, value] for name, value in zip(*pair, strict=True)]
        for pair in zip(names_SK.tolist(), values_SK.tolist(), strict=True)
    ]
    return Asked(torch.stack([firsts_S, steps_S + STEP], 1).flatten(), answers_S, facts)


def logits_SV(model: Model, asked: Asked, own: bool) -> Tensor:
    """Read are the facts of each question, or the model's own base."""
    count = len(asked.answers_S)
    layout = Layout([2] * count, facts=asked.facts if own else None)
    return model.logits_at(model(asked.tokens_T, layout), slice(1, None, 2))


def train(config: ModelConfig, seed: int, steps: int, given: Tensor | None = None) -> Model:
    model = Model(config).initialize(seed)
    optimizer = AdamW(lr=0.004, weight_decay=0.0).build(dict(model.named_parameters()).items())
    for step in range(steps):
        asked = ask(128, 10_000 * seed + step, given)
        model.zero_grad()
        torch.nn.functional.cross_entropy(
            logits_SV(model, asked, config.knowledge is not None), asked.answers_S
        ).backward()
        optimizer.step(min(1.0, (step + 1) / 20) * min(1.0, 2.5 * (1 - step / steps)), clip=1.0)
    return model


@torch.no_grad()
def accuracy(model: Model, facts: Tensor, numbers: float, seed: int = 77) -> float:
    """With the model's own base, which holds facts of all names."""
    if model.knowledge is not None:
        model.knowledge.know([[name + NAME, value] for name, value in enumerate(facts.tolist())])
    asked = ask(1000, seed, facts, numbers)
    return float((logits_SV(model, asked, own=False).argmax(-1) == asked.answers_S).float().mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1])
    parser.add_argument("--steps", type=int, default=300)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for seed in arguments.seeds:
        first, second = base(100 + seed), base(200 + seed)
        variants = {
            "reads, other facts in every sequence": (READER, None),
            "reads, always the same facts": (READER, first),
            "plain, facts in the weights": (PLAIN, first),
        }
        for name, (config, given) in variants.items():
            began = time.process_time()
            model = train(config, seed, arguments.steps, given)
            rows.append(
                {
                    "variant": name,
                    "seed": seed,
                    "parameters": sum(parameter.numel() for parameter in model.parameters()),
                    "first facts": accuracy(model, first, 0.0),
                    "exchanged": accuracy(model, second, 0.0),
                    "step alone, first": accuracy(model, first, 1.0),
                    "step alone, exchanged": accuracy(model, second, 1.0),
                    "seconds": time.process_time() - began,
                }
            )
            print(rows[-1], flush=True)
    record("knowledge", rows, steps=arguments.steps, time="CPU seconds on one thread")
    print(machine())


if __name__ == "__main__":
    main()
