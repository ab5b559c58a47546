"""One replica: an engine in a process of its own, and how requests and outputs are serialized on their way to it."""

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
from moesaic.serve.core.stats import EngineStats


class Replica:
    """The Ray actor. Only plain data is sent to it and back."""

    def __init__(self, directory: str, load_options: dict[str, Any], engine_options: dict[str, Any]) -> None:
        if load_options.get("threads"):  # by the cores of the frontend's machine; this one may have fewer
            load_options = load_options | {"threads": min(load_options["threads"], hardware.cores())}
        self.engine = Engine(load(directory, **load_options), **engine_options)
        self.loop = EngineLoop(self.engine)
        self.started = False
        self.streams: dict[int, OutputStream] = {}

    async def ready(self) -> int:
        """The page size of its KV cache, in tokens."""
        if not self.started:
            self.started = True
            await self.loop.__aenter__()
        return self.engine.page_pool.size

    async def generate(self, number: int, data: dict[str, Any]) -> Any:
        """The outputs of a request, as they come."""
        outputs = self.streams[number] = self.loop.submit([deserialize_request(self.engine, data)])
        try:
            async for output in outputs:
                yield serialize_output(output)
        finally:
            outputs.close()
            del self.streams[number]

    async def abort(self, number: int) -> None:
        """End a request's outputs; nobody reads those still to come."""
        if (outputs := self.streams.get(number)) is not None:
            (request,) = outputs.requests
            self.loop.stop(request)
            outputs.queue.put_nowait(Output(request, [], "", [], "abort"))

    async def load_adapter(self, name: str, path: str) -> None:
        await self.loop.load_adapter(name, path)

    async def unload_adapter(self, name: str) -> None:
        await self.loop.unload_adapter(name)

    async def stats(self) -> EngineStats:
        return self.loop.stats()


def serialize_request(engine: Engine, request: Request) -> dict[str, Any]:
    sampling = {field.name: getattr(request.sampling, field.name) for field in dataclasses.fields(Sampling)}
    sampling["grammar"] = request.sampling.grammar.text if request.sampling.grammar is not None else None
    sampling["stop_tokens"] = sorted(request.sampling.stop_tokens)
    sampling["seed"] = None
    return {
        "prompt": list(request.prompt),
        "sampling": sampling,
        "seed": request.seed,  # also of siblings
        "priority": request.priority,
        "within": None if request.deadline is None else request.deadline - engine.clock(),
        "salt": request.salt,
        "adapter": request.adapter.name if request.adapter is not None else None,
        "embed": request.embed,
    }


def deserialize_request(engine: Engine, data: dict[str, Any]) -> Request:
    sampling = dict(data["sampling"])
    sampling["grammar"] = Grammar(sampling["grammar"]) if sampling["grammar"] is not None else None
    sampling["stop_tokens"] = frozenset(sampling["stop_tokens"])
    request = engine.request(
        data["prompt"],
        Sampling(**sampling),
        priority=data["priority"],
        deadline=None if data["within"] is None else engine.clock() + data["within"],
        salt=data["salt"],
        adapter=data["adapter"],
        embed=data["embed"],
    )
    request.seed = data["seed"]
    return request


def serialize_output(output: Output) -> tuple[Any, ...]:
    """Small, because there is one for every token. What is known only then goes with the first and the last."""
    request, count = output.request, len(output.tokens)
    finished = output.finish_reason is not None
    more = None
    if finished or request.written == count:
        more = {
            "cached": request.cached,
            "preemptions": request.preemptions,
            "prompt_logprobs": [one and tuple(one) for one in request.prompt_logprobs],
            "routes": {layer: torch.cat(rows).tolist() for layer, rows in request.routes.items()} if finished else {},
            "hidden": request.hidden_D.tolist() if finished and request.hidden_D is not None else None,
        }
    logprobs = [tuple(one) for one in output.logprobs]
    versions = request.versions[-count:] if count else []
    return output.tokens, output.text, logprobs, versions, output.finish_reason, more


def deserialize_output(request: Request, data: tuple[Any, ...], now: float) -> Output:
    """Also brings the frontend's request to the state of the replica's."""
    tokens, text, plain, versions, finish_reason, more = data
    logprobs = [TokenLogprob(*one) for one in plain]
    request.tokens.extend(tokens)
    request.logprobs.extend(logprobs)
    request.versions.extend(versions)
    if more is not None:
        request.cached, request.preemptions = more["cached"], more["preemptions"]
        request.prompt_logprobs = [one and TokenLogprob(*one) for one in more["prompt_logprobs"]]
        request.routes = {layer: [torch.tensor(rows)] for layer, rows in more["routes"].items()}
        request.hidden_D = None if more["hidden"] is None else torch.tensor(more["hidden"])
    if request.matcher is not None:  # which tells at the end whether the grammar could be followed
        for token in tokens:
            request.matcher.accept(token)
    request.first_token = now if request.first_token is None else request.first_token
    request.last_token = now
    request.finish_reason = finish_reason
    return Output(request, tokens, text, logprobs, finish_reason)
