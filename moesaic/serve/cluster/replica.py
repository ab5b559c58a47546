"""One engine of several, in a process of its own, and how requests and outputs travel to it and back: as plain data."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from moesaic.kernels import hardware
from moesaic.model.directory import load
from moesaic.serve.core.engine import Engine
from moesaic.serve.core.engine_loop import EngineLoop, OutputStream
from moesaic.serve.core.grammar import Grammar
from moesaic.serve.core.request import Output, Request, Sampling, TokenLogprob


class Replica:
    """What runs in the other process. Only plain data goes to and fro."""

    def __init__(self, directory: str, weights: dict[str, Any], options: dict[str, Any]) -> None:
        if weights.get("threads"):  # as many as the front's machine has for it; this one may have fewer cores
            weights = weights | {"threads": min(weights["threads"], hardware.cores())}
        self.engine = Engine(load(directory, **weights), **options)
        self.loop = EngineLoop(self.engine)
        self.began = False
        self.answers: dict[int, OutputStream] = {}

    async def ready(self) -> int:
        """Tokens a page of its cache holds."""
        if not self.began:
            self.began = True
            await self.loop.__aenter__()
        return self.engine.page_pool.size

    async def answer(self, number: int, wish: dict[str, Any]) -> Any:
        """All outputs of a request, as they come."""
        answers = self.answers[number] = self.loop.submit([read_wish(self.engine, wish)])
        first = True
        try:
            async for output in answers:
                yield plain_output(output, first)
                first = False
        finally:
            answers.close()
            del self.answers[number]

    async def abort(self, number: int) -> None:
        """End a request's answer; nobody reads what is still to come."""
        if (answers := self.answers.get(number)) is not None:
            (request,) = answers.requests
            self.loop.stop(request)
            answers.queue.put_nowait(Output(request, [], "", [], "abort"))

    async def load_adapter(self, name: str, path: str) -> None:
        await self.loop.load_adapter(name, path)

    async def unload_adapter(self, name: str) -> None:
        await self.loop.unload_adapter(name)

    async def left(self) -> int:
        """Pages in use."""
        return self.engine.page_pool.in_use

    async def facts(self) -> dict[str, Any]:
        """What the front's metrics show of it; read beside the engine's thread, so one step may be missing."""
        page_pool, counts = self.engine.page_pool, self.engine.counts
        return {
            "pages_in_use": page_pool.in_use,
            "pages": page_pool.cache.pages,
            "queries": page_pool.queries,
            "hits": page_pool.hits,
            "preemptions": self.engine.scheduler.preemptions,
            "steps": counts.steps,
            "prompt_tokens": counts.prompt_tokens,
            "drafted_tokens": counts.drafted_tokens,
            "accepted_tokens": counts.accepted_tokens,
            "busy_seconds": counts.busy_seconds,
            "aborted": counts.aborted,
            "experts": self.engine.experts.counts.tolist(),
        }


def plain_wish(engine: Engine, request: Request) -> dict[str, Any]:
    sampling = {field.name: getattr(request.sampling, field.name) for field in dataclasses.fields(Sampling)}
    sampling["grammar"] = request.sampling.grammar.text if request.sampling.grammar is not None else None
    sampling["stop_tokens"] = sorted(request.sampling.stop_tokens)
    sampling["seed"] = None
    return {
        "prompt": list(request.prompt),
        "sampling": sampling,
        "seed": request.seed,  # siblings and all
        "priority": request.priority,
        "within": None if request.deadline is None else request.deadline - engine.clock(),
        "salt": request.salt,
        "adapter": request.adapter.name if request.adapter is not None else None,
        "embed": request.embed,
    }


def read_wish(engine: Engine, wish: dict[str, Any]) -> Request:
    sampling = dict(wish["sampling"])
    sampling["grammar"] = Grammar(sampling["grammar"]) if sampling["grammar"] is not None else None
    sampling["stop_tokens"] = frozenset(sampling["stop_tokens"])
    request = engine.request(
        wish["prompt"],
        Sampling(**sampling),
        priority=wish["priority"],
        deadline=None if wish["within"] is None else engine.clock() + wish["within"],
        salt=wish["salt"],
        adapter=wish["adapter"],
        embed=wish["embed"],
    )
    request.seed = wish["seed"]
    return request


def plain_output(output: Output, first: bool) -> dict[str, Any]:
    request = output.request
    ended = output.finish_reason is not None
    return {
        "tokens": output.tokens,
        "text": output.text,
        "logprobs": [tuple(one) for one in output.logprobs],
        "finish_reason": output.finish_reason,
        "cached": request.cached,
        "versions": request.versions[-len(output.tokens) :] if output.tokens else [],
        "preemptions": request.preemptions,
        "prompt_logprobs": [one and tuple(one) for one in request.prompt_logprobs] if first else [],
        "routes": {layer: torch.cat(rows).tolist() for layer, rows in request.routes.items()} if ended else {},
        "hidden": request.hidden_D.tolist() if ended and request.hidden_D is not None else None,
    }


def read_output(request: Request, told: dict[str, Any], now: float) -> Output:
    """Bring the front's request to where the replica's is."""
    logprobs = [TokenLogprob(*one) for one in told["logprobs"]]
    request.tokens.extend(told["tokens"])
    request.logprobs.extend(logprobs)
    request.versions.extend(told["versions"])
    request.cached, request.preemptions = told["cached"], told["preemptions"]
    request.prompt_logprobs += [one and TokenLogprob(*one) for one in told["prompt_logprobs"]]
    request.routes = {layer: [torch.tensor(rows)] for layer, rows in told["routes"].items()}
    request.hidden_D = None if told["hidden"] is None else torch.tensor(told["hidden"])
    request.first_token = now if request.first_token is None else request.first_token
    request.last_token = now
    request.finish_reason = told["finish_reason"]
    return Output(request, told["tokens"], told["text"], logprobs, told["finish_reason"])
