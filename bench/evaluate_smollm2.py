"""SmolLM2 evaluated by our engine and by `transformers`: the same prompts, greedy, the same judges.

    python -m bench.evaluate_smollm2 --gsm8k gsm8k_train.jsonl --text wikitext2_valid.txt

Needs out/smollm2 (moesaic convert smollm2 out/smollm2). Four suites: tasks (greatest common divisors), math (GSM8K),
choice (which of four numbers a sum is) and perplexity. Told is each side's number, and of how many answers the text is
the same to the letter.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers

import moesaic
from bench.measure import record
from moesaic.evaluate.backends import Answer, Backend, EngineBackend, OnAnswer
from moesaic.evaluate.questions import QuestionSuite
from moesaic.evaluate.suites import SuiteContext
from moesaic.evaluate.suites.choice import Choice, read
from moesaic.evaluate.suites.math import Math
from moesaic.evaluate.suites.tasks import Tasks
from moesaic.kernels import hardware
from moesaic.model.perplexity import perplexity
from moesaic.serve.core.text import TextStream

MODEL = Path("out/smollm2")


class Theirs(Backend):
    """Tokens from `generate`; turned to text as ours are, so that only the tokens are compared."""

    def __init__(self, model: Any, tokenizer: Any) -> None:
        self.model, self.tokenizer = model, tokenizer

    def answer(self, conversations: Any, max_tokens: int, on_answer: OnAnswer) -> None:
        for number, messages in enumerate(conversations):
            prompt = self.tokenizer.encode(self.tokenizer.chat(list(messages)), special=False)
            with torch.inference_mode():
                out = self.model.generate(
                    torch.tensor([prompt]), max_new_tokens=max_tokens, do_sample=False, pad_token_id=0
                )[0, len(prompt) :].tolist()
            stop = next((i for i, token in enumerate(out) if token in self.tokenizer.stop_tokens), len(out))
            stream = TextStream(self.tokenizer, prompt)
            on_answer(number, Answer("".join(stream.push(token) for token in out[:stop]), min(stop + 1, len(out))))


class Listening(Backend):
    """Keeps what was said."""

    def __init__(self, backend: Backend) -> None:
        self.backend, self.said = backend, {}

    def answer(self, conversations: Any, max_tokens: int, on_answer: OnAnswer) -> None:
        def keep(number: int, said: Answer) -> None:
            self.said[number] = said.text
            on_answer(number, said)

        self.backend.answer(conversations, max_tokens, keep)


def asked(name: str, suite: QuestionSuite, data: Path | None, ours: Any, theirs: Any) -> dict[str, Any]:
    sides = {"ours": Listening(EngineBackend(ours)), "transformers": Listening(Theirs(theirs, ours.tokenizer))}
    found = {side: suite.run(None, SuiteContext(data, backend=backend)) for side, backend in sides.items()}
    one, other = (backend.said for backend in sides.values())
    same = sum(one[number] == other[number] for number in one)
    row = {"suite": name, **{side: told["accuracy"] for side, told in found.items()}, "same": f"{same} of {len(one)}"}
    print(row, flush=True)
    return row


def chosen(ours: Any, theirs: Any, count: int) -> dict[str, Any]:
    rng = random.Random(3)
    lines = []
    for _ in range(count):
        a, b = rng.randint(2, 60), rng.randint(2, 60)
        numbers = rng.sample([n for n in range(a + b - 9, a + b + 10) if n != a + b], 3)
        choices = [str(n) for n in (*numbers, a + b)]
        rng.shuffle(choices)
        lines.append({"question": f"{a} + {b} =", "choices": choices, "answer": str(a + b)})
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "choices.jsonl"
        file.write_text("".join(json.dumps(line) + "\n" for line in lines))
        told = Choice().run(ours, SuiteContext(file))
    right = 0
    for line in lines:
        question, choices, truth = read(line, "")
        sums = []
        for choice in choices:
            before = ours.tokenizer.encode(question)
            tokens = before + ours.tokenizer.encode(f" {choice}", special=False)
            with torch.inference_mode():
                logprobs = theirs(torch.tensor([tokens])).logits[0].log_softmax(-1)
            sums.append(sum(float(logprobs[i - 1, tokens[i]]) for i in range(len(before), len(tokens))))
        right += sums.index(max(sums)) == truth
    row = {"suite": "choice", "ours": told["accuracy"], "transformers": right / count}
    print(row, flush=True)
    return row


def hesitation(ours: Any, theirs: Any, file: Path, count: int = 2048, window: int = 512) -> dict[str, Any]:
    tokens = ours.tokenizer.encode(file.read_text()[: count * 16])[:count]
    found = perplexity(ours, tokens, window, window)
    nats, predicted = 0.0, 0
    for start in range(0, count, window):
        piece = torch.tensor([tokens[start : start + window]])
        with torch.inference_mode():
            loss = theirs(piece, labels=piece).loss
        nats += float(loss) * (piece.shape[1] - 1)
        predicted += piece.shape[1] - 1
    row = {"suite": "perplexity", "ours": found.perplexity, "transformers": math.exp(nats / predicted)}
    print(row, flush=True)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gsm8k", type=Path, required=True)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--examples", type=int, default=16)
    arguments = parser.parse_args()
    torch.set_num_threads(hardware.threads())
    transformers.utils.logging.disable_progress_bar()
    ours = moesaic.load(MODEL)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
    count = arguments.examples
    rows = [
        asked("tasks: gcd", Tasks("gcd", count, 32), None, ours, theirs),
        asked("math: GSM8K", Math(count, 96), arguments.gsm8k, ours, theirs),
        chosen(ours, theirs, 4 * count),
        hesitation(ours, theirs, arguments.text),
    ]
    record("evaluate_smollm2", rows, model="SmolLM2-135M-Instruct")


if __name__ == "__main__":
    main()
