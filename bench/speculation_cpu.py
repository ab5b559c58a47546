"""Tokens per second with and without the suffix drafter, on text that repeats itself and on text that does not.

    python -m bench.speculation_cpu                      # needs out/smollm2: moesaic convert smollm2 out/smollm2

One request at a time, as on a laptop. Each round begins with two new engines, so that nothing is remembered from the
round before, and gives them the same prompts in turn; a prompt's reading is not counted. The answers must be equal.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from dataclasses import dataclass, replace
from typing import Any

import torch

import moesaic
from bench.measure import record
from moesaic.model.transformer import Model
from moesaic.serve.core.drafters.suffix import Suffix
from moesaic.serve.core.engine import Engine
from moesaic.serve.core.request import Sampling

CODE = """def total(orders):
    result = 0
    for order in orders:
        if order.paid:
            result += order.price * order.count
    return result


def average(orders):
    result = 0
    number = 0
    for order in orders:
        if order.paid:
            result += order.price * order.count
            number += order.count
    return result / number
"""
BEGUN = CODE.replace("result", "amount").partition("    number = 0")[0]
NOTICE = (
    "The library will be closed on Monday the third of March because the heating is being repaired. Books that are due "
    "on that day can be returned on Tuesday without a fee. The reading room on the second floor opens again at nine "
    "o'clock on Wednesday morning, and the children's section at ten."
)
PEOPLE = [
    ("Ada", 36, "London"),
    ("Emmy", 53, "Erlangen"),
    ("Sofja", 41, "Moscow"),
    ("Hypatia", 45, "Alexandria"),
    ("Maria", 77, "Milan"),
    ("Sophie", 55, "Paris"),
]
TABLE = "\n".join(f"{name},{age},{city}" for name, age, city in PEOPLE)
OBJECTS = "\n".join(f'{{"name": "{name}", "age": {age}, "city": "{city}"}}' for name, age, city in PEOPLE[:2])

# Begun answers, because so small a model follows a pattern better than an order.
REPETITIVE = {
    "rewrite code": f"{CODE}\n\n# The same with amount for result:\n\n" + BEGUN,
    "quote a notice": f'"{NOTICE}"\n\nThe notice again, word for word:\n\n"The library',
    "table to JSON": f"{TABLE}\n\nEach line as a JSON object:\n\n{OBJECTS}\n",
    "list": "Shelf 1: books from A to B\nShelf 2: books from C to D\nShelf 3: books from E to F\n",
}
OTHER = {
    "story": "Tell me a story about a lighthouse keeper who finds a map.",
    "advice": "What should I think about before I adopt a dog?",
    "explain": "Explain how a bicycle stays upright.",
    "letter": "Write a letter to a friend about a journey through the mountains.",
}
CACHE = 1 << 28


@dataclass
class Run:
    """One answer: its tokens, the seconds from the first of them to the last, and what was done for it."""

    tokens: list[int]
    seconds: float
    cpu: float  # seconds of all threads: steadier where the machine has other work
    passes: int
    drafted: int
    accepted: int


def ask(engine: Engine, prompt: str, sampling: Sampling) -> Run:
    request = engine.request(prompt, sampling)
    engine.add(request)
    while request.first_token is None:
        engine.step()
    before, cpu = replace(engine.counts), time.process_time()
    while request.finish_reason is None:
        engine.step()
    assert request.last_token is not None
    after = engine.counts
    return Run(
        request.tokens[len(request.prompt) :],
        request.last_token - request.first_token,
        time.process_time() - cpu,
        after.steps - before.steps,
        after.drafted_tokens - before.drafted_tokens,
        after.accepted_tokens - before.accepted_tokens,
    )


def compare(
    model: Model, kind: str, texts: dict[str, str], sampling: Sampling, rounds: int, seconds: float
) -> list[dict[str, Any]]:
    """At least so many rounds, and more as long as another one fits in the time."""
    runs: dict[tuple[str, str], list[Run]] = {(text, name): [] for text in texts for name in ("plain", "suffix")}
    began, number = time.monotonic(), 0
    while number < rounds or (time.monotonic() - began) * (number + 1) / number < seconds:
        engines = {
            "plain": Engine(model, cache_bytes=CACHE),
            "suffix": Engine(model, cache_bytes=CACHE, drafter=Suffix()),
        }
        for text, question in texts.items():
            for name in sorted(engines, reverse=bool(number % 2)):  # who goes first changes from round to round
                runs[text, name].append(ask(engines[name], question, sampling))
            plain, drafted = runs[text, "plain"][-1], runs[text, "suffix"][-1]
            assert plain.tokens == drafted.tokens, f"{text}: the answers differ"
            took = ", ".join(f"{run.seconds:.1f} s ({run.cpu:.1f} of CPU)" for run in (plain, drafted))
            held = f"{drafted.accepted} of {drafted.drafted} draft tokens accepted, {drafted.passes} passes"
            print(f"{kind}: {text}: {took}, {held}", file=sys.stderr)
        number += 1
    rows = []
    for text in texts:
        without, speculative = (
            statistics.median(run.seconds for run in runs[text, name]) for name in ("plain", "suffix")
        )
        last = runs[text, "suffix"][-1]
        written = len(last.tokens) - 1  # the first comes with the prompt
        rows.append(
            {
                "kind": kind,
                "text": text,
                "tokens": written,
                "plain": written / without,
                "suffix": written / speculative,
                "ratio": without / speculative,
                "cpu_ratio": median_cpu(runs[text, "plain"]) / median_cpu(runs[text, "suffix"]),
                "tokens_per_pass": written / last.passes,
                "drafted": last.drafted,
                "accepted": last.accepted,
                "rounds": number,
            }
        )
    total = sum(row["tokens"] / row["plain"] for row in rows) / sum(row["tokens"] / row["suffix"] for row in rows)
    return [*rows, {"kind": kind, "text": "all", "ratio": total}]


def questions(model: Model) -> dict[str, str]:
    assert model.tokenizer is not None
    return {name: model.tokenizer.chat([{"role": "user", "content": text}]) for name, text in OTHER.items()}


def median_cpu(runs: list[Run]) -> float:
    return statistics.median(run.cpu for run in runs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="out/smollm2")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument(
        "--seconds", type=float, default=100.0, help="for each kind: more rounds, as long as there is time"
    )
    parser.add_argument("--kind", choices=["repetitive", "other"], action="append")
    parser.add_argument("--threads", type=int, help="by default every core; one is steadier beside other work")
    wanted = parser.parse_args()
    model = moesaic.load(wanted.model, dtype="float32", device="cpu", threads=wanted.threads)
    ask(Engine(model, cache_bytes=CACHE), "Hello", Sampling(max_tokens=8))  # first passes are slow
    for kind in wanted.kind or ["repetitive", "other"]:
        # At temperature zero so small a model soon repeats itself, whatever it was asked.
        texts, temperature = (REPETITIVE, 0.0) if kind == "repetitive" else (questions(model), 1.0)
        sampling = Sampling(max_tokens=wanted.tokens, temperature=temperature, seed=1)
        rows = compare(model, kind, texts, sampling, wanted.rounds, wanted.seconds)
        print(f"{kind:20}{'plain':>10}{'suffix':>10}{'ratio':>9}{'of CPU':>9}{'tokens/pass':>13}{'accepted':>12}")
        for row in rows:
            speeds = f"{row['plain']:10.1f}{row['suffix']:10.1f}" if "plain" in row else " " * 20
            rest = (
                f"{row['cpu_ratio']:8.2f}x{row['tokens_per_pass']:13.2f}{row['accepted']:6} /{row['drafted']:4}"
                if "plain" in row
                else ""
            )
            print(f"{row['text']:20}{speeds}{row['ratio']:8.2f}x{rest}")
        print(
            record(
                f"speculation_cpu_{kind}",
                rows,
                model=wanted.model,
                tokens=wanted.tokens,
                threads=torch.get_num_threads(),
            )
        )


if __name__ == "__main__":
    main()
