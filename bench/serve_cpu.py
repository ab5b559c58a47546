"""The engine beside `transformers.generate` on a CPU: same weights, same prompts, same run, float32.

python -m bench.serve_cpu              all, a few minutes
python -m bench.serve_cpu --cases a    one stream only

(a) one stream, (b) sixteen requests at once, (c) thirty-two requests that share a prefix of 1,000 tokens, with and
without the prefix cache. Speculation has a bench of its own (bench/speculation_cpu.py).
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import transformers

import moesaic
from bench.forward import batch, pair
from bench.measure import record
from moesaic.kernels import probe
from moesaic.model.transformer import Model
from moesaic.serve.request import Sampling

MODEL = "qwen3_moe 271M"
PROMPT, ANSWER = 64, 64


def turn_about(runs: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Median seconds of each, alternating so that a noisy moment hits all alike; the first round is not counted."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(rounds + 1):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            if number:
                times[name].append(time.perf_counter() - start)
    return {name: statistics.median(found) for name, found in times.items()}


def theirs_generate(model, prompts: list[torch.Tensor], tokens: int, experts: str):
    width = max(map(len, prompts))
    padded = torch.stack([torch.nn.functional.pad(prompt, (width - len(prompt), 0)) for prompt in prompts])
    mask = torch.stack([torch.arange(width) >= width - len(prompt) for prompt in prompts]).long()
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation(experts)
    with torch.inference_mode():
        return model.generate(
            padded, attention_mask=mask, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False, pad_token_id=0
        )[:, width:]


def ours_generate(engine: moesaic.Engine, prompts: list[torch.Tensor], tokens: int) -> list[list[int]]:
    asked = [prompt.tolist() for prompt in prompts]
    answers = engine.generate(asked, max_tokens=tokens, temperature=0.0, ignore_eos=True)
    return [answer.tokens for answer in answers]


def against_transformers(name: str, theirs, ours: Model, lengths: list[int], rounds: int) -> dict:
    """Generated tokens per second, prompts included; of the peer's expert implementations the best one counts."""
    prompts = batch(lengths, ours.config.vocab)
    kinds = ["grouped_mm", "batched_mm"]
    runs: dict[str, Callable[[], object]] = {
        kind: lambda kind=kind: theirs_generate(theirs, prompts, ANSWER, kind) for kind in kinds
    }
    engine = moesaic.Engine(ours, reuse_prefixes=False)  # made once, as the peer's model is
    runs["ours"] = lambda: ours_generate(engine, prompts, ANSWER)
    seconds = turn_about(runs, rounds)
    same = [
        sum(a == b for a, b in zip(mine, other))
        for mine, other in zip(
            ours_generate(engine, prompts, ANSWER), theirs_generate(theirs, prompts, ANSWER, kinds[0]).tolist()
        )
    ]
    speed = {key: len(lengths) * ANSWER / value for key, value in seconds.items()}
    best = max(speed[kind] for kind in kinds)
    row = {
        "case": name,
        "tokens_per_second": {key: round(value, 1) for key, value in speed.items()},
        "ratio": round(speed["ours"] / best, 2),
        "equal_tokens": f"{sum(same)} of {len(lengths) * ANSWER}",
    }
    print(
        f"{name:28} transformers {best:7.1f} tok/s   ours {speed['ours']:7.1f} tok/s   {row['ratio']:.2f}x"
        f"   equal greedy tokens {row['equal_tokens']}"
    )
    return row


def shared_prefix(ours: Model, count: int = 32, prefix: int = 1000, rest: int = 24) -> dict:
    """Seconds until every request has its first token."""
    common, *tails = batch([prefix] + [rest] * count, ours.config.vocab)
    asked = [torch.cat([common, tail]).tolist() for tail in tails]
    seconds = {}
    for reuse in (False, True):
        engine = moesaic.Engine(ours, reuse_prefixes=reuse)
        requests = [engine.request(prompt, Sampling(max_tokens=1, temperature=0.0)) for prompt in asked]
        start = time.perf_counter()
        for request in requests:
            engine.add(request)
        while engine.working:
            engine.step()
        seconds[reuse] = time.perf_counter() - start
    ratio = seconds[False] / seconds[True]
    print(
        f"(c) {count} x {prefix}+{rest} tokens       without {seconds[False]:6.1f} s   "
        f"with the prefix cache {seconds[True]:6.2f} s   {ratio:.1f}x less"
    )
    return {
        "case": f"(c) {count} requests, {prefix} shared tokens",
        "seconds": {"without": round(seconds[False], 2), "with": round(seconds[True], 2)},
        "ratio": round(ratio, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default="abc")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--no-record", action="store_true", help="print only")
    arguments = parser.parse_args()
    torch.set_num_threads(probe.threads())
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    theirs, ours = pair(MODEL)
    rows = []
    if "a" in arguments.cases:
        rows.append(against_transformers("(a) one stream", theirs, ours, [PROMPT], arguments.rounds))
    if "b" in arguments.cases:
        rows.append(against_transformers("(b) sixteen requests", theirs, ours, [PROMPT] * 16, arguments.rounds))
    if "c" in arguments.cases:
        rows.append(shared_prefix(ours))
    if not arguments.no_record:
        record("serve_cpu", rows, model=MODEL, prompt=PROMPT, answer=ANSWER)


if __name__ == "__main__":
    main()
