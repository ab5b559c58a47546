"""What a pruned or encoded cache costs: long-context scores against the share of the cache that stays, every policy.

    python -m bench.kv_cache score --model out/smollm2 --length 1024 --examples 10          minutes a kind on two cores
    python -m bench.kv_cache score --model out/smollm2 --kinds needle --numbers 10 20       more questions, added up
    python -m bench.kv_cache memory                                                         a minute
    python -m bench.kv_cache speed --lengths 1024 4096 16384                                minutes
    python -m bench.kv_cache table

Until its end every policy reads a prompt alike, so each prompt is read once, with the whole cache, and then handed to
an engine of every policy: that prunes, gives pages back and writes the answer. `score` first checks on a short prompt
that this says what the engine says by itself. Pages are counted when the prompt has been read and pruned.

`memory` serves many requests with each policy in a process of its own, and measures that: a small model with a large
cache, so that what is measured is the cache.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.kv_speed import measured
from bench.measure import RESULTS, machine
from moesaic.evaluate.interval import wilson
from moesaic.evaluate.long_context_tasks import KINDS, Question, question, score
from moesaic.methods import Method, build
from moesaic.model.config import Dense, GroupedQuery, Layer, ModelConfig, Rope
from moesaic.model.directory import load
from moesaic.model.transformer import Model
from moesaic.serve.core.engine import Engine
from moesaic.serve.core.forward_pass import Chunk, ForwardPass
from moesaic.serve.core.kv.compact import CompactRequest
from moesaic.serve.core.kv_policies import AttentionStatistics, KVPolicy, Retained
from moesaic.serve.core.request import Request, Sampling

ENTRIES: dict[str, tuple[str, dict[str, Any]]] = {
    "full": ("", {}),
    **{
        f"{name} {share:.0%}": (name, {"share": share})
        for share in (0.5, 0.25, 0.1)
        for name in ("sinks", "h2o", "snapkv", "fastgen", "lethe", "kvmerger")
    },
    "8 bits": ("quantized", {"bits": 8}),
    "4 bits": ("quantized", {"bits": 4}),
    "2 bits": ("quantized", {"bits": 2}),
    "minikv 50%": ("minikv", {"share": 0.5}),
    "minikv 25%": ("minikv", {"share": 0.25}),
}
FILE = RESULTS / "kv_cache.json"
ONE, SEVERAL = 7, 24  # tokens of an answer: a number of four digits and the end, or three of them
KEY = ("kind", "length", "number", "entry")


def made(entry: str) -> KVPolicy | None:
    name, options = ENTRIES[entry]
    return build(Method(name, options), KVPolicy, entry) if name else None


class Reading(KVPolicy):
    """Reads a prompt, prunes nothing, and keeps what each kind of policy would have watched: from which token on, and
    how scores fade."""

    def __init__(self, prompt: int, policies: list[KVPolicy]) -> None:
        kinds = {(policy.score_from(policy.due(0, prompt), prompt), policy.decay) for policy in policies}
        self.kinds = [kind for kind in kinds if kind[0] < prompt]
        self.first = min((first for first, _ in self.kinds), default=prompt)
        self.queries = max((policy.encoding.queries for policy in policies if policy.encoding is not None), default=0)

    def due(self, computed: int, prompt: int) -> int:
        return prompt if computed < prompt else sys.maxsize

    def score_from(self, due: int, prompt: int) -> int:
        return self.first

    def prune(self, seen: AttentionStatistics) -> Retained | None:
        return None


class Recording(CompactRequest):
    """A compact sequence with as many scores as there are ways to watch."""

    scores: dict[tuple[int, float], list[Tensor]]

    def native(self, heads: int) -> None:
        """Attention weights must pass by."""

    def record_queries(self, layer: int, q_THC: Tensor) -> None:
        if self.computed < self.prompt:
            super().record_queries(layer, q_THC)

    def add_scores(self, layer: int, weights_NTM: Tensor, first: int) -> None:
        assert isinstance(self.policy, Reading)
        if self.computed >= self.prompt:
            return
        position_T = self.computed + first + torch.arange(weights_NTM.shape[1])
        for kind in self.policy.kinds:
            start, decay = kind
            factor_T = torch.where(position_T >= start, decay ** (self.prompt - 1 - position_T).float(), 0.0)
            score_NM = (weights_NTM * factor_T[:, None]).sum(1)
            own = self.scores[kind]
            if layer < len(own):
                score_NM[:, : own[layer].shape[1]] += own[layer]
                own[layer] = score_NM
            else:
                own.append(score_NM)


def read(
    model: Model, prompt: list[int], policies: list[KVPolicy], most: int = ONE
) -> tuple[Recording, Request, Engine]:
    """A prompt with its whole cache; the first of `most` tokens is chosen."""
    reading = Reading(len(prompt), policies)
    engine = Engine(model, kv_policy=reading, cache_bytes=pages_bytes(model, len(prompt)), max_requests=1, seed=0)
    store = engine.page_pool.store
    assert store is not None
    recording = Recording(store, len(prompt))
    recording.recorded_queries = reading.queries
    recording.scores = {kind: [] for kind in reading.kinds}
    request = engine.request(prompt, Sampling(max_tokens=most, temperature=0.0))
    request.compact = recording
    engine.add(request)
    while not request.written and request.finish_reason is None:
        engine.step()
    return recording, request, engine


def handed_over(
    model: Model, recording: Recording, source: Request, policy: KVPolicy
) -> tuple[Engine, Request, dict[str, float]]:
    """An engine with this policy that goes on from a prompt read elsewhere, its request, and what that holds."""
    prompt = list(source.prompt)
    engine = Engine(model, kv_policy=policy, cache_bytes=pages_bytes(model, len(prompt)), max_requests=1, seed=0)
    request = engine.request(prompt, source.sampling)
    engine.add(request)
    store = engine.page_pool.store
    assert store is not None and policy.due(0, len(prompt)) == len(prompt)
    with torch.inference_mode():
        request.compact = compact = store.begin(request)
        assert engine.page_pool.grow(request, len(prompt))
        whole = engine.page_pool.in_use
        compact.begin(len(prompt), request.pages)
        if compact.recorded_queries and recording.queries_LQHC is not None:
            assert compact.recorded_queries == recording.recorded_queries
            compact.room_for_queries(store.query_heads).copy_(recording.queries_LQHC)
        for layer in range(store.layers):
            k_NMC, v_NMC = recording.read(layer)
            compact.extend(layer, k_NMC[:, : len(prompt)].transpose(0, 1), v_NMC[:, : len(prompt)].transpose(0, 1))
            kind = (compact.scored_from, policy.decay)
            if kind in recording.scores:
                compact.scores_LNM[layer] = recording.scores[kind][layer][:, : len(prompt)]
        request.computed = len(prompt)
        engine.page_pool.after_forward(request)
    held = {
        "pages": engine.page_pool.in_use / whole,
        "bookkeeping": compact.bookkeeping_bytes / (whole * page_bytes(engine)),
    }
    return engine, request, held


def written(engine: Engine, request: Request, first: int) -> str:
    """The answer, whose first token is known: it was chosen before anything was pruned."""
    text = request.append(first, engine.stop_tokens)
    while request.finish_reason is None:
        text += "".join(output.text for output in engine.step())
    return text


@torch.inference_mode()
def judged(engine: Engine, request: Request, answer: list[int]) -> tuple[float, bool]:
    """The log-probability of an answer after its first token, and whether greedy decoding would give it."""
    model = engine.model
    request.tokens.extend(answer)
    assert engine.page_pool.grow(request, len(request.tokens))
    forward = ForwardPass(model, [Chunk(request, len(answer) - 1)], engine.cache)
    while not forward.done:
        forward.advance()
    logprobs_TV = model.logits_at(forward.hidden_TD).float().log_softmax(-1)
    wanted_T = torch.tensor(answer[1:])
    return float(logprobs_TV.gather(1, wanted_T[:, None]).sum()), bool((logprobs_TV.argmax(-1) == wanted_T).all())


def page_bytes(engine: Engine) -> int:
    return sum(slab[0].nbytes for layer in engine.cache.layers for slab in layer.values())


def pages_bytes(model: Model, tokens: int) -> int:
    numbers = sum(torch.Size(shape).numel() for layer in model.cache_shapes() for shape in layer.values())
    return numbers * model.dtype.itemsize * (-(-(tokens + SEVERAL) // 16) + 2) * 16


def check(model: Model, entries: list[str]) -> None:
    """What is handed over says what the engine says by itself."""
    assert model.tokenizer is not None
    _, prompt = question("multikey", 256, model.tokenizer, 1, 0)
    policies = {entry: policy for entry in entries if (policy := made(entry)) is not None}
    recording, source, _ = read(model, prompt, list(policies.values()))
    for entry, policy in policies.items():
        engine = Engine(model, kv_policy=policy, cache_bytes=1 << 28, seed=0)
        alone = engine.generate([prompt], max_tokens=ONE, temperature=0.0)[0].text
        other, request, _ = handed_over(model, recording, source, policy)
        assert written(other, request, source.tokens[len(prompt)]) == alone, entry


def answers(model: Model, case: tuple[Question, list[int]], entries: list[str]) -> dict[str, dict[str, float]]:
    """Of each entry the score, the log-probability of the right answer where there is one, and what the cache held."""
    wanted, prompt = case
    policies = {entry: made(entry) for entry in entries}
    several = len(wanted.answers) > 1
    watched = [policy for policy in policies.values() if policy is not None]
    recording, source, engine = read(model, prompt, watched, SEVERAL if several else ONE)
    assert model.tokenizer is not None
    first = source.tokens[len(prompt)]
    answer = model.tokenizer.encode(f" {wanted.answers[0]}", special=False) if not several else []
    found = {}
    for entry, policy in policies.items():
        if policy is not None:
            engine, request, held = handed_over(model, recording, source, policy)
        else:
            engine, request, held = *handed_over(model, recording, source, Reading(len(prompt), []))[:2], {"pages": 1.0}
        if len(answer) > 1:
            logprob, right = judged(engine, request, answer)
            found[entry] = {"score": float(right and first == answer[0]), "logprob": logprob, **held}
        else:
            found[entry] = {"score": score(wanted, written(engine, request, first)), **held}
    return found


def run_score(arguments: argparse.Namespace) -> None:
    model = load(arguments.model)
    assert model.tokenizer is not None
    entries = arguments.only or list(ENTRIES)
    if not arguments.unchecked:
        check(model, [entry for entry in entries if entry != "full"])
    known = recorded("scores") | {"model": arguments.model.name}
    for kind in arguments.kinds:
        for number in range(*arguments.numbers):
            begun = time.perf_counter()
            case = question(kind, arguments.length, model.tokenizer, 0, number)
            for entry, held in answers(model, case, entries).items():
                row = {"kind": kind, "length": arguments.length, "number": number, "entry": entry, **held}
                key = [row[name] for name in KEY]
                known["scores"] = [old for old in known["scores"] if [old[name] for name in KEY] != key] + [row]
            write(known)
            print(f"{kind} {number}: {time.perf_counter() - begun:.1f} s", file=sys.stderr, flush=True)
    table(arguments.length)


def table(length: int) -> None:
    known = json.loads(FILE.read_text())
    rows = [row for row in known["scores"] if row["length"] == length]
    kinds = [kind for kind in KINDS if any(row["kind"] == kind for row in rows)]
    told = f"{'score':>7} {'95 %':>13} {'of full':>8} {'kept':>6} {'log p':>7} {'pages':>7} {'beside':>7}"
    print(f"{'':14}{told}  " + " ".join(f"{k:>11}" for k in kinds))
    full = {(row["kind"], row["number"]): row for row in rows if row["entry"] == "full"}
    for entry in ENTRIES:
        own = [row for row in rows if row["entry"] == entry and (row["kind"], row["number"]) in full]
        if not own:
            continue
        scores = [row["score"] for row in own]
        low, high = wilson(sum(scores), len(scores))
        before = [full[row["kind"], row["number"]] for row in own]  # the same questions, whole cache
        whole = max(mean([was["score"] for was in before]), 1e-9)
        kept = mean([one for one, was in zip(scores, before, strict=True) if was["score"]])
        # How much less likely the right answer has become, where there is one.
        lost = mean([row["logprob"] - was["logprob"] for row, was in zip(own, before, strict=True) if "logprob" in row])
        by_kind = " ".join(f"{mean(scores_of(own, entry, kind)):11.3f}" for kind in kinds)
        pages, beside = mean([row["pages"] for row in own]), mean([row.get("bookkeeping", 0.0) for row in own])
        told = f"{low:6.2f} {high:6.2f} {mean(scores) / whole:8.0%} {kept:6.0%} {lost:7.2f} {pages:7.1%} {beside:7.1%}"
        print(f"{entry:14}{mean(scores):7.3f} {told}  {by_kind}  ({len(own)})")
    for row in [*known["memory"], *known["speed"]]:
        print(row)


def serve_batch(entry: str) -> dict[str, Any]:
    """Twelve prompts read one after the other while all answers go on; what this process then holds."""
    attention = GroupedQuery(heads=8, kv_heads=8, head_size=64)
    config = ModelConfig(
        family="moesaic",
        vocab=512,
        hidden=64,
        attention=attention,
        rope=Rope(size=64),
        layers=(Layer(ffn=Dense(hidden=64)),) * 8,
        context=2048,
    )
    model = Model(config).initialize(0)
    engine = Engine(model, kv_policy=made(entry), cache_bytes=512 << 20, max_requests=12, seed=0)
    wishes = Sampling(max_tokens=48, temperature=0.0, ignore_eos=True)
    draw = random.Random(0)
    engine.generate([[1, 2, 3]], max_tokens=4)  # what is only made once
    before, most_bytes, most_pages = resident(), 0, 0
    requests = [engine.request([draw.randrange(512) for _ in range(1024)], wishes) for _ in range(12)]
    for request in requests:
        engine.add(request)
    while not all(request.written for request in requests):
        engine.step()
        most_bytes, most_pages = max(most_bytes, resident()), max(most_pages, engine.page_pool.in_use)
    assert all(request.finish_reason is None for request in requests)  # all are there at once
    size = page_bytes(engine)
    return {
        "entry": entry,
        "cache_mb": size * engine.page_pool.in_use / 1e6,
        "peak_cache_mb": size * most_pages / 1e6,
        "peak_resident_growth_mb": (most_bytes - before) / 1e6,
        "bookkeeping_mb": sum(one.compact.bookkeeping_bytes for one in requests if one.compact is not None) / 1e6,
    }


def resident() -> int:
    """Bytes of this process in memory (Linux)."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def run_memory(arguments: argparse.Namespace) -> None:
    known = recorded("memory")
    for entry in arguments.only or [name for name in ENTRIES if "50%" not in name or "minikv" in name]:
        words = [sys.executable, "-m", "bench.kv_cache", "batch", "--only", entry]
        row = json.loads(subprocess.run(words, check=True, capture_output=True, text=True).stdout)
        known["memory"] = [old for old in known["memory"] if old["entry"] != entry] + [row]
        write(known)
        print(row, flush=True)


def run_speed(arguments: argparse.Namespace) -> None:
    """Processor time of a generated token after a prompt of each length, beside the full cache."""
    model = load(arguments.model)
    entries = arguments.only or [entry for entry in ENTRIES if entry == "full" or "25%" in entry or "bits" in entry]
    policies = {entry: made(entry) for entry in ["full", *entries]}
    for length in arguments.lengths:
        rows, known = measured(model, policies, length, arguments.tokens), recorded("speed")
        for row in rows:
            same = [row[key] for key in ("entry", "length")]
            kept = [old for old in known["speed"] if [old["entry"], old.get("length")] != same]
            known["speed"] = [*kept, row]
            print(row, flush=True)
        write(known)


def recorded(part: str) -> dict[str, Any]:
    """What is on file, of which one part is measured here and now."""
    known: dict[str, Any] = json.loads(FILE.read_text()) if FILE.exists() else {"bench": "kv_cache"}
    known = {"scores": [], "memory": [], "speed": [], **known, f"{part}_machine": machine()}
    return {**known, "machine": known.get("machine", machine())}


def write(known: dict[str, Any]) -> None:
    FILE.write_text(json.dumps(known).replace("}, {", "},\n {") + "\n")


def scores_of(rows: list[dict[str, Any]], entry: str, kind: str) -> list[float]:
    return [row["score"] for row in rows if row["entry"] == entry and row["kind"] == kind]


def mean(numbers: list[float]) -> float:
    return sum(numbers) / max(1, len(numbers))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["score", "memory", "batch", "speed", "table"])
    parser.add_argument("--model", type=Path, default=Path("out/smollm2"))
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--kinds", nargs="*", choices=list(KINDS), default=list(KINDS))
    parser.add_argument("--numbers", type=int, nargs=2, default=[0, 10], help="which questions: from, to")
    parser.add_argument("--lengths", type=int, nargs="*", default=[1024, 4096, 16384], help="of the prompts of `speed`")
    parser.add_argument("--tokens", type=int, default=64, help="that `speed` generates after each")
    parser.add_argument("--only", nargs="*", choices=list(ENTRIES))
    parser.add_argument("--unchecked", action="store_true", help="do not compare with the engine first")
    arguments = parser.parse_args()
    if arguments.what == "score":
        run_score(arguments)
    elif arguments.what == "speed":
        run_speed(arguments)
    elif arguments.what == "memory":
        run_memory(arguments)
    elif arguments.what == "batch":
        print(json.dumps(serve_batch(arguments.only[0])))
    else:
        table(arguments.length)


if __name__ == "__main__":
    main()
