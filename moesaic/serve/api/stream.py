"""How generated text reaches a client: as one JSON response, or chunk by chunk as server-sent events. Whatever is being
done for a client that disconnects is cancelled."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from typing import Any, ClassVar, TypeVar

from fastapi import Request as HttpRequest
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel
from starlette.types import Receive, Scope, Send

from moesaic.errors import UserError
from moesaic.serve.api.beam_search import BeamOutputs
from moesaic.serve.api.branched import BranchOutputs
from moesaic.serve.api.errors import ApiError, api_error
from moesaic.serve.api.large_json import large_json
from moesaic.serve.api.schema.structured import StructuredFields
from moesaic.serve.api.schema.usage import Completed, CompletionDetails, PromptDetails, Usage
from moesaic.serve.api.service import Service, new_id
from moesaic.serve.api.timings import Timings, timings
from moesaic.serve.core.engine_loop import OutputStream
from moesaic.serve.core.grammar import reason
from moesaic.serve.core.request import Output, Request

Result = TypeVar("Result")

ENCODE = json.JSONEncoder(check_circular=False).encode

JSON = "application/json"
DONE = "data: [DONE]\n\n"
HEADERS = {"cache-control": "no-store", "x-accel-buffering": "no"}  # no proxy shall buffer the events

HEAVY = 1000  # log-probabilities, which are then written on a thread
LIGHT_BYTES = 4096  # of a request's body
HEAVY_FIELDS = (
    *StructuredFields.model_fields,
    *("response_format", "tools", "text", "chat_template", "format", "previous_response_id", "output_config"),
    *("dry_multiplier", "bad_words"),
)

# For the OpenAPI document.
EVENTS: dict[str, Any] = {
    "text/event-stream": {
        "itemSchema": {
            "type": "object",
            "properties": {"event": {"type": "string"}, "data": {"type": "string"}},
            "required": ["data"],
        }
    }
}
STREAMS: dict[int | str, dict[str, Any]] = {200: {"content": EVENTS, "description": "The response."}}


Outputs = OutputStream | BeamOutputs | BranchOutputs


class Generation:
    """The text generated for one HTTP request. A subclass for each route makes the engine's `requests` from the body,
    and chunks and a response from their outputs."""

    id_prefix: ClassVar[str]
    chunk_object: ClassVar[str]
    ending: ClassVar[str] = DONE  # of a stream
    media_type: ClassVar[str] = "text/event-stream"

    prompts = 1  # `requests` are those of the first prompt, then those of the second, and so on
    discarded_tokens = 0  # of each request: generated, and not sent

    def __init__(self, service: Service, body: Any, requests: Sequence[Request]) -> None:
        self.service = service
        self.body = body
        self.requests = requests
        self.id = new_id(self.id_prefix)
        self.created = int(time.time())

    @classmethod
    def prepare(cls, service: Service, body: Any, salt: str) -> Generation:
        """Everything that can be wrong with a request shows here."""
        raise NotImplementedError

    @staticmethod
    def field_name(place: str) -> str:
        """What the client calls a field in which an error was found."""
        return place

    def failed(self, error: ApiError) -> str:
        """What a stream ends with when something fails on the way."""
        return event(error.body)

    def first_fields(self) -> dict[str, Any]:
        """What the first chunk of a stream has that the others have not."""
        return {}

    def first_choices(self) -> list[dict[str, Any]]:
        """What a stream begins with."""
        return []

    def push(self, output: Output) -> list[dict[str, Any]]:
        """Take an output of the engine; the choices to stream, one in each chunk."""
        raise NotImplementedError

    def response(self) -> BaseModel:
        """When all outputs have been pushed."""
        raise NotImplementedError

    @property
    def model(self) -> str:
        return self.body.model or self.service.settings.name

    @property
    def reasoning_tokens(self) -> int:
        return 0

    def usage(self) -> Usage:
        """As OpenAI counts it: a prompt once, however many choices it has."""
        first = self.requests[:: max(1, len(self.requests) // self.prompts)]
        prompt = sum(len(request.prompt) for request in first)
        generated = sum(max(0, request.written - self.discarded_tokens) for request in self.requests)
        return Usage(
            prompt_tokens=prompt,
            completion_tokens=generated,
            total_tokens=prompt + generated,
            prompt_tokens_details=PromptDetails(
                cached_tokens=sum(request.cached for request in first),
                transferred_tokens=sum(request.transferred for request in self.requests),
                recomputed_tokens=sum(request.recomputed for request in self.requests),
            ),
            completion_tokens_details=CompletionDetails(reasoning_tokens=self.reasoning_tokens),
        )

    def timings(self) -> Timings | None:
        """Where the client asked for them."""
        wanted = getattr(self.body, "timings_per_token", None)
        return timings(self.requests, self.prompts, self.discarded_tokens) if wanted else None

    def take(self, output: Output) -> list[dict[str, Any]]:
        if output.finish_reason is not None and output.request.matcher is not None:
            self._check_grammar(output.request)
        return self.push(output)

    def heavy(self, output: Output) -> bool:
        """Whether an output brings so many log-probabilities that writing them would hold up the event loop."""
        return sum(len(one.top) for one in output.logprobs) > HEAVY

    @staticmethod
    def logprob_count(request: Request) -> int:
        shown = [*request.logprobs, *request.prompt_logprobs]
        return sum(1 + len(one.top) for one in shown if one is not None)

    async def beside(self, work: Callable[[Output], Result], output: Output) -> Result:
        """What is heavy, on a thread."""
        return await asyncio.to_thread(work, output) if self.heavy(output) else work(output)

    async def collect(self, outputs: Outputs) -> BaseModel | bytes:
        """The response; as JSON already, where there is so much of it that others would wait."""
        async for batch in outputs.batches():
            for output in batch:
                await self.beside(self.take, output)
        large = any(self.logprob_count(request) > HEAVY for request in self.requests)
        response = await asyncio.to_thread(self.response) if large else self.response()
        if isinstance(response, Completed):
            response.system_fingerprint = self.service.fingerprint
        return await asyncio.to_thread(large_json, response) if large else response

    async def events(self, outputs: Outputs) -> AsyncIterator[str]:
        options = self.body.stream_options
        with_usage = options is not None and options.include_usage
        continuous = options is not None and options.continuous_usage_stats
        frame = {"id": self.id, "object": self.chunk_object, "created": self.created, "model": self.model}
        frame["system_fingerprint"] = self.service.fingerprint
        head = f'data: {json.dumps(frame)[:-1]}, "choices": ['  # the same in every chunk

        first = self.first_fields()

        def chunk(choice: dict[str, Any] | None, usage: bool) -> str:
            nonlocal first
            shown = f', "usage": {json.dumps(self.usage().model_dump() if usage else None)}' if with_usage else ""
            if (took := self.timings()) is not None:
                shown += f', "timings": {took.model_dump_json()}'
            shown, first = shown + "".join(f', "{name}": {ENCODE(value)}' for name, value in first.items()), {}
            return f"{head}{ENCODE(choice) if choice is not None else ''}]{shown}}}\n\n"

        def chunks_of(output: Output) -> str:
            return "".join(chunk(choice, continuous) for choice in self.take(output))

        for choice in self.first_choices():
            yield chunk(choice, continuous)
        async for batch in outputs.batches():
            if text := "".join([await self.beside(chunks_of, output) for output in batch]):
                yield text
        if with_usage:
            yield chunk(None, True)

    def _check_grammar(self, request: Request) -> None:
        """Some grammars turn out to be more than their library will follow only in the middle of a completion."""
        grammar, matcher = request.sampling.grammar, request.matcher
        if grammar is not None and matcher.inner.is_error():
            problem = f"the grammar cannot be followed ({reason(matcher.inner.get_error())})"
            raise UserError(self.field_name(grammar.place), problem, "Make it simpler.")


async def generate(kind: type[Generation], service: Service, body: Any, http: HttpRequest) -> Response:
    """What every route that generates text does."""
    if getattr(body, "stream_options", None) is not None and not body.stream:
        raise UserError("stream_options", "needs stream: true", "Leave it out, or stream.")
    salt = service.cache_salt(http.state, body.cache_salt)
    light = is_light(body, int(http.headers.get("content-length", LIGHT_BYTES + 1)))
    generation = await service.prepare(lambda: kind.prepare(service, body, salt), kind.field_name, light=light)
    if getattr(body, "use_beam_search", None) and not getattr(body, "parallel_branches", None):
        return await collected(http, generation, BeamOutputs(service, body, generation.requests, generation.prompts))
    outputs: Outputs = (
        BranchOutputs(service, body, generation.requests)
        if getattr(body, "parallel_branches", None)
        else service.submit(generation.requests)
    )
    if body.stream:
        stream = EventStream(generation.events(outputs), kind.ending, outputs.close, generation.failed)
        stream.headers["content-type"] = kind.media_type
        return stream
    return await collected(http, generation, outputs)


async def collected(http: HttpRequest, generation: Generation, outputs: Outputs) -> Response:
    try:
        return await while_connected(http, generation.collect(outputs))
    finally:
        outputs.close()


def is_light(body: Any, size: int) -> bool:
    """Whether a request is prepared in less time than a thread takes to answer: no grammar to compile, and no more than
    a page of text to tokenize."""
    prompt = getattr(body, "prompt", None)
    tokens = isinstance(prompt, list) and isinstance(prompt[0], int)
    return (size <= LIGHT_BYTES or tokens) and all(getattr(body, name, None) is None for name in HEAVY_FIELDS)


def event(data: BaseModel | dict[str, Any], name: str | None = None) -> str:
    """One server-sent event."""
    text = data.model_dump_json(exclude_unset=True) if isinstance(data, BaseModel) else json.dumps(data)
    return f"event: {name}\ndata: {text}\n\n" if name else f"data: {text}\n\n"


class Stalled(Exception):
    """The client does not read what it requested."""


class EventStream(Response):
    """Sends events as they are made. An error on the way is the last event; a client that disconnects, or does not read
    an event for `stall_seconds`, ends it all."""

    media_type = "text/event-stream"
    stall_seconds = 60.0

    def __init__(
        self,
        events: AsyncIterator[str],
        ending: str = "",
        close: Callable[[], None] | None = None,
        failed: Callable[[ApiError], str] = lambda error: event(error.body),
    ) -> None:
        self.events = events
        self.close = close
        self.failed = failed
        self.ending = ending
        self.status_code = 200
        self.background = None
        self.init_headers(HEADERS)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await unless_disconnected(receive, self._send(send))
        except Stalled:
            pass  # left unfinished, the connection is closed by the server
        finally:
            if self.close is not None:
                self.close()

    async def _send(self, send: Send) -> None:
        """One timer looks after all events: one for each would cost as much as sending it."""
        events = asyncio.get_running_loop()
        since: float | None = None  # when the event was made that is being sent
        timer: asyncio.TimerHandle | None = None

        async def put(text: str, more: bool = True) -> None:
            nonlocal since
            since = events.time()
            await send({"type": "http.response.body", "body": text.encode(), "more_body": more})
            since = None

        def watch() -> None:
            nonlocal timer
            now = events.time()
            if since is not None and since + self.stall_seconds <= now:
                patience.reschedule(now)
            else:
                timer = events.call_at((now if since is None else since) + self.stall_seconds, watch)

        try:
            async with asyncio.timeout(None) as patience:
                watch()
                await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                try:
                    async for text in self.events:
                        await put(text)
                except Exception as error:
                    await put(self.failed(api_error(error)))
                await put(self.ending, more=False)
        except TimeoutError:
            raise Stalled from None
        finally:
            if timer is not None:
                timer.cancel()


async def while_connected(http: HttpRequest, work: Coroutine[Any, Any, BaseModel | bytes]) -> Response:
    """The result of some work as JSON; the work is cancelled if the client disconnects."""
    result = await unless_disconnected(http.receive, work)
    if result is None:
        return Response(status_code=499)
    return JSONResponse(result.model_dump()) if isinstance(result, BaseModel) else Response(result, media_type=JSON)


async def unless_disconnected(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result | None:
    """The result of some work; None, and the work is cancelled, if the client disconnects before."""
    working = asyncio.create_task(work)
    watching = asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        for task in (working, watching):
            task.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
