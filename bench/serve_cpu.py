"""The engine beside `transformers.generate` on a CPU: same weights, same prompts, same run, float32.

python -m bench.serve_cpu              all, a few minutes
python -m bench.serve_cpu --cases a    one stream only

(a) one stream; (b) sixteen requests at once, of equal lengths; (v) sixteen of various lengths, prompts of 16 to 256
tokens and answers of 16 to 128, for which the peer pads to the longest prompt and writes until the longest answer ends,
in one call, and only tokens that were asked for count; (c) thirty-two requests that share a prefix of 1,000 tokens,
with and without the prefix cache. Speculation has a bench of its own (bench/speculation_cpu.py).

`--cases` measures some; what the file of results holds of the others stays.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable

import torch
import transformers

import moesaic
from bench.forward import batch, pair
from bench.measure import RESULTS, record
from moesaic.kernels import hardware
from moesaic.model.transformer import Model
from moesaic.serve.core.request import Sampling

MODEL = "qwen3_moe 238M"
PROMPT, ANSWER = 64, 64
VARIOUS = ((16, 256), (16, 128))  # tokens of prompts, of answers


def turn_about(runs: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Median seconds of each, alternating so that a noisy moment hits all alike. The first round warms up; what was
    more than half again as slow as the quickest of the peer's ways in it is left out."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    first: dict[str, float] = {}
    for number in range(rounds + 1):
        for name, run in runs.items():
            peers = [seconds for other, seconds in first.items() if other != "ours"]
            if number and name != "ours" and first[name] > 1.5 * min(peers):
                continue
            start = time.perf_counter()
            run()
            seconds = time.perf_counter() - start
            if number:
                times[name].append(seconds)
            else:
                first[name] = seconds
    return {name: statistics.median(found) for name, found in times.items() if found}


def theirs_generate(model, prompts: list[torch.Tensor], tokens: list[int], experts: str) -> list[list[int]]:
    width = max(map(len, prompts))
    padded = torch.stack([torch.nn.functional.pad(prompt, (width - len(prompt), 0)) for prompt in prompts])
    mask = torch.stack([torch.arange(width) >= width - len(prompt) for prompt in prompts]).long()
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation(experts)
    most = max(tokens)
    with torch.inference_mode():
        out = model.generate(
            padded, attention_mask=mask, max_new_tokens=most, min_new_tokens=most, do_sample=False, pad_token_id=0
        )[:, width:]
    return [row[:count] for row, count in zip(out.tolist(), tokens, strict=True)]


def ours_generate(engine: moesaic.Engine, prompts: list[torch.Tensor], tokens: list[int]) -> list[list[int]]:
    requests = [
        engine.request(prompt.tolist(), Sampling(max_tokens=count, temperature=0.0, ignore_eos=True))
        for prompt, count in zip(prompts, tokens, strict=True)
    ]
    for request in requests:
        engine.add(request)
    while engine.working:
        engine.step()
    return [request.tokens[len(request.prompt) :] for request in requests]


def against_transformers(name: str, theirs, ours: Model, lengths: list[int], answers: list[int], rounds: int) -> dict:
    """Generated tokens per second, prompts included; of the peer's expert implementations the best one counts."""
    prompts = batch(lengths, ours.config.vocab)
    # `batched_mm` copies its experts' matrices for every token; of long prompts that is more than the memory there is.
    kinds = ["grouped_mm", "batched_mm" if len(prompts) * max(lengths) <= 1024 else "eager"]
    runs: dict[str, Callable[[], object]] = {
        kind: lambda kind=kind: theirs_generate(theirs, prompts, answers, kind) for kind in kinds
    }
    engine = moesaic.Engine(ours, reuse_prefixes=False)  # made once, as the peer's model is
    runs["ours"] = lambda: ours_generate(engine, prompts, answers)
    seconds = turn_about(runs, rounds)
    same = [
        sum(a == b for a, b in zip(mine, other))
        for mine, other in zip(
            ours_generate(engine, prompts, answers), theirs_generate(theirs, prompts, answers, kinds[0])
        )
    ]
    speed = {key: sum(answers) / value for key, value in seconds.items()}
    best = max(speed[kind] for kind in kinds if kind in speed)
    row = {
        "case": name,
        "tokens_per_second": {key: round(value, 1) for key, value in speed.items()},
        "ratio": round(speed["ours"] / best, 2),
        "equal_tokens": f"{sum(same)} of {sum(answers)}",
    }
    print(
        f"{name:28} transformers {best:7.1f} tok/s   ours {speed['ours']:7.1f} tok/s   {row['ratio']:.2f}x"
        f"   equal greedy tokens {row['equal_tokens']}",
        flush=True,
    )
    return row


def shared_prefix(
    ours: Model, count: int = 32, prefix: int = 1000, rest: int = 24, clock: Callable[[], float] = time.perf_counter
) -> dict:
    """Seconds until every request has its first token."""
    common, *tails = batch([prefix] + [rest] * count, ours.config.vocab)
    asked = [torch.cat([common, tail]).tolist() for tail in tails]
    seconds = {}
    for reuse in (False, True):
        engine = moesaic.Engine(ours, reuse_prefixes=reuse)
        requests = [engine.request(prompt, Sampling(max_tokens=1, temperature=0.0)) for prompt in asked]
        start = clock()
        for request in requests:
            engine.add(request)
        while engine.working:
            engine.step()
        seconds[reuse] = clock() - start
    ratio = seconds[False] / seconds[True]
    print(
        f"(c) {count} x {prefix}+{rest} tokens       without {seconds[False]:6.1f} s   "
        f"with the prefix cache {seconds[True]:6.2f} s   {ratio:.1f}x less"
    )
    return {
        "case": "(c) shared prefix",
        "requests": count,
        "shared_tokens": prefix,
        "seconds": {"without": round(seconds[False], 2), "with": round(seconds[True], 2)},
        "ratio": round(ratio, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default="abvc")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--no-record", action="store_true", help="print only")
    arguments = parser.parse_args()
    torch.set_num_threads(hardware.threads())
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    theirs, ours = pair(MODEL)
    rng = random.Random(4)
    prompts, answers = ([rng.randint(*bounds) for _ in range(16)] for bounds in VARIOUS)
    cases: dict[str, Callable[[], dict]] = {
        "(a) one stream": lambda: against("(a) one stream", [PROMPT], [ANSWER]),
        "(b) sixteen, equal": lambda: against("(b) sixteen, equal", [PROMPT] * 16, [ANSWER] * 16),
        "(v) sixteen, various": lambda: against("(v) sixteen, various", prompts, answers),
        "(c) shared prefix": lambda: shared_prefix(ours),
    }

    def against(name: str, lengths: list[int], tokens: list[int]) -> dict:
        return against_transformers(name, theirs, ours, lengths, tokens, arguments.rounds)

    file = RESULTS / "serve_cpu.json"
    before = {row["case"]: row for row in json.loads(file.read_text())["rows"]} if file.exists() else {}
    rows = {name: before[name] for name in cases if name in before}
    for name, measure in cases.items():
        if name[1] in arguments.cases:
            rows[name] = measure()
    if not arguments.no_record:
        ordered = [rows[name] for name in cases if name in rows]
        record("serve_cpu", ordered, model=MODEL, prompt=PROMPT, answer=ANSWER, various=VARIOUS)


if __name__ == "__main__":
    main()
