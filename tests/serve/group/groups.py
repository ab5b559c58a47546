"""Worker groups of real processes (gloo) for tests, and what one process gives for the same requests."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

import moesaic
from moesaic.serve.core.engine import Engine
from moesaic.serve.core.request import Request, Sampling
from moesaic.serve.group.engine import GroupEngine
from moesaic.serve.group.ranks import follow, join, open_engine, serving_layout
from tests.parallel.ranks import start
from tests.random_models import save_random, small_config

VOCABULARY = 97
NUMBERS = itertools.count()
Asked = dict[str, Any]  # what `Engine.request` takes; "sampling" as keys


def model_directory(kind: str, path: Path, tied: bool = False, **more: Any) -> Path:
    """GLM-4.5, Qwen3-MoE, DeepSeek-V3 and dense Qwen3 in small: weights so large that nothing is a near-tie."""
    vocab, hidden, layers = (more.pop(key, size) for key, size in (("vocab", VOCABULARY), ("hidden", 0), ("layers", 3)))
    shared = {"max_position_embeddings": 256, "initializer_range": 0.3, "tie_word_embeddings": tied}
    if kind == "qwen3_moe":
        shared |= {"head_dim": 8, "moe_intermediate_size": 18, "num_experts": 8, "num_experts_per_tok": 3}
        config = small_config(kind, vocab, hidden=hidden or 36, ffn=32, layers=layers, heads=(4, 2), **shared | more)
    elif kind == "glm4_moe":
        shared |= {"head_dim": 8, "moe_intermediate_size": 20, "n_routed_experts": 8, "num_experts_per_tok": 2}
        shared |= {"n_shared_experts": 1, "first_k_dense_replace": 1, "attention_bias": True, "use_qk_norm": True}
        shared |= {"num_nextn_predict_layers": 0}
        config = small_config(kind, vocab, hidden=hidden or 32, ffn=50, layers=layers, heads=(8, 1), **shared | more)
    elif kind == "deepseek_v3":
        shared |= {"q_lora_rank": 24, "kv_lora_rank": 20, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8}
        shared |= {"v_head_dim": 10, "moe_intermediate_size": 16, "n_routed_experts": 8, "num_experts_per_tok": 3}
        shared |= {"n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 2, "topk_group": 1}
        shared |= {"num_nextn_predict_layers": 0}
        config = small_config(kind, vocab, hidden=hidden or 32, ffn=44, layers=layers, heads=(4, 4), **shared | more)
    else:
        config = small_config(
            kind, vocab, hidden=hidden or 36, ffn=40, layers=layers, heads=(4, 2), head_dim=8, **shared | more
        )
    return save_random(config, path, seed=3)


def some_requests(count: int = 10, tokens: int = 6, seed: int = 7) -> list[Asked]:
    """Mixed lengths, many of which begin alike; half greedy, half drawn."""
    generator = torch.Generator().manual_seed(seed)

    def draw(least: int, most: int) -> int:
        return int(torch.randint(least, most + 1, (), generator=generator))

    def text(length: int) -> list[int]:
        return torch.randint(3, VOCABULARY, (length,), generator=generator).tolist()

    starts = [text(40) for _ in range(2)]
    asked = []
    for number in range(count):
        prompt = (starts[number % 2][: draw(5, 40)] if number % 3 else []) + text(draw(1, 12))
        sampling = {"max_tokens": draw(2, tokens), "temperature": float(number % 2), "seed": draw(0, 10**6)}
        asked.append({"prompt": prompt, "sampling": sampling | {"ignore_eos": True, "logprobs": 3}})
    return asked


def answers(engine: Engine, asked: Sequence[Asked]) -> list[Any]:
    """What every request gets, with every bit of its log-probabilities, as JSON can write it."""
    requests = [new_request(engine, one) for one in asked]
    for request in requests:
        engine.add(request)
    while engine.working:
        engine.step()
    return [written(request) for request in requests]


def new_request(engine: Engine, one: Asked) -> Request:
    options = {key: value for key, value in one.items() if key not in ("prompt", "sampling")}
    return engine.request(one["prompt"], Sampling(**one["sampling"]), **options)


def written(request: Request) -> dict[str, Any]:
    found: dict[str, Any] = {
        "tokens": request.tokens[len(request.prompt) :],
        "logprobs": [[bits(each.logprob), [(t, bits(p)) for t, p in each.top]] for each in request.logprobs],
        "reason": request.finish_reason,
    }
    if request.prompt_logprobs:
        found["prompt"] = [each and [bits(each.logprob), each.rank] for each in request.prompt_logprobs]
    if request.routes:
        found["routes"] = {str(layer): torch.cat(parts).tolist() for layer, parts in request.routes.items()}
    if request.hidden_D is not None:
        found["hidden"] = [bits(number) for number in request.hidden_D.tolist()]
    return json.loads(json.dumps(found))


def bits(number: float) -> str:
    return float(number).hex()


def alone(directory: Path, asked: Sequence[Asked], load: dict[str, Any] | None = None, **options: Any) -> list[Any]:
    engine = Engine(moesaic.load(directory, threads=1, **(load or {})), **options)
    return answers(engine, asked)


class Case:
    """A group to be made, and what rank 0 does with its engine: the result goes to a file as JSON."""

    def __init__(
        self,
        layout: str,
        directory: Path,
        work: Callable[..., Any],
        *args: Any,
        load: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        self.layout, self.directory, self.work, self.args = layout, directory, work, args
        self.load, self.options = {"threads": 1, **(load or {})}, options

    def keep(self, engine: GroupEngine, file: Path) -> None:
        found = self.work(engine, *self.args)
        engine.close()
        file.write_text(json.dumps(found))


def in_groups(cases: Sequence[Case], folder: Path) -> list[Any]:
    """What `work(engine, *args)` gives on rank 0 of each group, one group after the other in the same processes."""
    return in_processes(_run, cases, folder, serving_layout)


def in_processes(
    run: Callable[..., None], cases: Sequence[Case], folder: Path, layout_of: Callable[[str], Any], *more: Any
) -> list[Any]:
    """What rank 0 of each case left behind when every rank ran `run(rank, cases, addresses, folder, *more)`."""
    ranks = max(layout_of(case.layout).devices for case in cases)
    start(run, (cases, [meeting_place(folder) for _ in cases], str(folder), *more), ranks)
    return [json.loads((folder / f"{number}.json").read_text()) for number in range(len(cases))]


def meeting_place(folder: Path) -> str:
    return f"file:{folder / f'{next(NUMBERS)}.store'}"


def cases_of(
    rank: int, cases: Sequence[Case], addresses: Sequence[str], layout_of: Callable[[str], Any]
) -> Iterator[tuple[int, Case, str, Any]]:
    """Those that this rank has a part in: number, case, where its ranks meet, layout."""
    torch.set_num_threads(1)
    for number, (case, address) in enumerate(zip(cases, addresses, strict=True)):
        layout = layout_of(case.layout)
        if rank < layout.devices:
            yield number, case, address, layout


def _run(rank: int, cases: Sequence[Case], addresses: Sequence[str], folder: str) -> None:
    for number, case, address, layout in cases_of(rank, cases, addresses, serving_layout):
        group = join(layout, rank, address, stall_seconds=60.0)
        if rank:
            follow(group, case.directory, case.load, case.options)
            continue
        case.keep(open_engine(group, case.directory, case.load, case.options), Path(folder) / f"{number}.json")
