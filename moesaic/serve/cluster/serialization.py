"""How requests and outputs travel between the front and an engine: as plain data.

A request that has tokens already travels with them, and goes on where it was: in the engine it is in the state of one
that was preempted. A draw depends on seed and position alone (and the state of mirostat, which goes along), so it
continues with the tokens it would have had.
"""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import torch

from moesaic.serve.core.engine import Engine
from moesaic.serve.core.grammar import Grammar
from moesaic.serve.core.mirostat import follow
from moesaic.serve.core.request import Output, Request, Sampling, TokenLogprob


def serialize_request(engine: Engine, request: Request, adapter: str | None = None) -> dict[str, Any]:
    """`adapter` is what the engine calls the request's."""
    sampling = {field.name: getattr(request.sampling, field.name) for field in dataclasses.fields(Sampling)}
    grammar = request.sampling.grammar
    sampling["grammar"] = dataclasses.asdict(grammar) if grammar is not None else None
    sampling["stop_tokens"] = sorted(request.sampling.stop_tokens)
    sampling["seed"] = None
    return {
        "prompt": list(request.prompt),
        "tokens": request.tokens[len(request.prompt) :],
        "versions": list(request.versions),
        "sampling": sampling,
        "seed": request.seed,  # also of siblings
        "mu": request.mu,
        "breakers": request.breakers,  # to find them takes longer than to send them
        "priority": request.priority,
        "within": None if request.deadline is None else request.deadline - engine.clock(),
        "salt": request.salt,
        "limit": request.limit,
        "age": time.monotonic() - request.arrived,
        "adapter": adapter,
        "embed": request.embed,
        "pooling": request.pooling,
        "classify": request.classify,
        "token_types": None if request.token_types is None else list(request.token_types),
    }


def deserialize_request(engine: Engine, data: dict[str, Any]) -> Request:
    sampling = dict(data["sampling"])
    if (grammar := sampling["grammar"]) is not None:
        sampling["grammar"] = Grammar(**grammar | {"resets": tuple(grammar["resets"])})
    sampling["stop_tokens"] = frozenset(sampling["stop_tokens"])
    request = engine.request(
        data["prompt"],
        Sampling(**sampling),
        priority=data["priority"],
        deadline=None if data["within"] is None else engine.clock() + data["within"],
        salt=data["salt"],
        adapter=data["adapter"],
        embed=data["embed"],
        breakers=data["breakers"],
        pooling=data["pooling"],
        classify=data["classify"],
        token_types=data["token_types"],
        lease=data.get("lease"),
        origin=data.get("origin"),
    )
    request.seed, request.mu = data["seed"], data["mu"]
    request.arrived = time.monotonic() - data["age"]
    request.limit = min(request.limit, data["limit"])
    request.versions = list(data["versions"])
    assert request.lease is None or not data["tokens"], "a request is handed on after its first token"
    for token in data["tokens"]:
        request.append(token, engine.stop_tokens)  # its text has been sent
    assert request.finish_reason is None, "its tokens are those of a request that had finished"
    return request


def serialize_output(output: Output) -> tuple[Any, ...]:
    """Small, because there is one for every token. What is known only then goes with the first and the last."""
    request, count = output.request, len(output.tokens)
    handed = output.finish_reason == "handed"
    first, finished = request.written == count, output.finish_reason is not None and not handed
    more = None
    if first or finished:
        more = {
            "cached": request.cached,
            "preemptions": request.preemptions,
            "transferred": request.transferred,
            "recomputed": request.recomputed,
            "prompt_logprobs": [one and tuple(one) for one in request.prompt_logprobs] if first else [],
            "routes": {layer: torch.cat(rows).tolist() for layer, rows in request.routes.items()} if finished else {},
            "stop_reason": request.stop_reason,
            "hidden": request.hidden_D.tolist() if finished and request.hidden_D is not None else None,
        }
    logprobs = [tuple(one) for one in output.logprobs]
    versions = request.versions[-count:] if count else []
    return output.tokens, output.text, logprobs, versions, None if handed else output.finish_reason, more


def deserialize_output(request: Request, data: tuple[Any, ...], now: float) -> Output:
    """Also brings the front's request to the state of the engine's."""
    tokens, text, plain, versions, finish_reason, more = data
    first = not request.written
    logprobs = [TokenLogprob(*one) for one in plain]
    request.tokens.extend(tokens)
    request.logprobs.extend(logprobs)
    follow(request, (one.drawn for one in logprobs))
    request.versions.extend(versions)
    if more is not None:
        request.preemptions = max(request.preemptions, more["preemptions"])
        request.transferred, request.recomputed = more["transferred"], more["recomputed"]
        if first:  # as it was before its worker died, if one did
            request.cached = more["cached"]
            request.prompt_logprobs = [one and TokenLogprob(*one) for one in more["prompt_logprobs"]]
        request.routes = {layer: [torch.tensor(rows)] for layer, rows in more["routes"].items()}
        request.stop_reason = more["stop_reason"]
        request.hidden_D = None if more["hidden"] is None else torch.tensor(more["hidden"])
    if request.matcher is not None:  # which tells at the end whether the grammar could be followed
        for token in tokens:
            request.matcher.accept(token)
    request.first_token = now if request.first_token is None else request.first_token
    request.last_token = now
    request.finish_reason = finish_reason
    return Output(request, tokens, text, logprobs, finish_reason)
