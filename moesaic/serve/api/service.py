"""What the routes share: the engine's loop, the names of the model and its adapters, and the limits of this server."""

from __future__ import annotations

import asyncio
import ctypes
import hashlib
import logging
import math
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, TypeVar

import moesaic
from moesaic.errors import UserError
from moesaic.model.tokenizer import Tokenizer
from moesaic.serve.api.errors import ApiError, TooLarge
from moesaic.serve.api.keys import Keys
from moesaic.serve.api.knowledge import Bases
from moesaic.serve.api.logprobs import TokenDecoder
from moesaic.serve.api.metrics import Metrics
from moesaic.serve.api.rate_limits import CALLER, KeyUse
from moesaic.serve.api.responses.store import ResponseStore
from moesaic.serve.core.engine import Engine
from moesaic.serve.core.engine_loop import EngineLoop, OutputStream
from moesaic.serve.core.grammar import special_tokens
from moesaic.serve.core.pooling import Pooling, recommended_pooling
from moesaic.serve.core.request import Request, TooLong
from moesaic.serve.core.sampling_defaults import recommended
from moesaic.serve.parsers import Parser, detect
from moesaic.serve.parsers.plain import Plain

logger = logging.getLogger("moesaic.serve")

Result = TypeVar("Result")

CHARS_PER_TOKEN = 16  # several times what most texts have; a prompt of more characters is not even tokenized
LEAST_CHARS = 65_536  # that are tokenized however short the context is
LARGE_CHARS = 1 << 18  # of a text whose tokenization takes memory that is worth giving back


@dataclass(frozen=True)
class Settings:
    """`max_queue` requests may wait beyond the `max_requests` that the engine runs at once."""

    name: str
    aliases: tuple[str, ...] = ()  # other names of the model
    fingerprint: str = ""  # of its weights; "": of what is known without them
    keys: Keys = field(default_factory=Keys)
    parser: Parser | None = None  # None: by the model's chat template
    chat_template: str | None = None  # instead of the model's own
    trust_request_chat_template: bool = False  # templates are programs, which a client may make slow
    sampling: Mapping[str, Any] = field(default_factory=dict)  # defaults of requests, beside the model's own
    max_prompt: int | None = None  # tokens
    max_queue: int = 256
    max_body: int = 8 << 20  # bytes
    body_seconds: float = 30.0
    request_seconds: float | None = 600.0
    cors_origins: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = ()  # by which names it may be called, beside those of this machine
    log_requests: bool = False
    mcp_origins: tuple[str, ...] = ()  # of MCP servers that the web page may talk to
    metrics_names: Literal["moesaic", "vllm"] = "moesaic"  # vllm: under its names too
    allow_adapters: bool = False  # to be loaded by clients, from any path the server can read
    admin_keys: Keys = field(default_factory=Keys)  # for /admin, which exists only where there are any
    pooling: Pooling | None = None  # of embeddings; None: as the model says
    scoring: Literal["cosine", "generative"] = "cosine"  # of rerank and score, unless a request says otherwise
    response_bytes: int = 64 << 20  # of responses that are kept for clients that come back; 0: none is
    response_seconds: float = 86_400.0  # that one is kept after its last use
    knowledge: Bases = field(default_factory=Bases)  # what answers may be drawn from
    drain_seconds: float = 60.0  # for requests of a worker that is to go, before they are moved


class Service:
    def __init__(self, loop: EngineLoop, settings: Settings, metrics: Metrics) -> None:
        self.loop = loop
        self.settings = settings
        self.metrics = metrics
        self.engine: Engine = loop.engine
        self.responses = ResponseStore(settings.response_bytes, settings.response_seconds)
        self.draining = False  # for good
        self.held = False  # by an admin, for a while
        self.sleeping = 0  # the level, as vLLM counts them; 0: it is awake
        self.all: Sequence[Service] = (self,)  # of all models of this server
        self.started = int(time.time())
        if settings.chat_template is not None and self.engine.tokenizer is not None:
            self.engine.tokenizer = self.engine.tokenizer.with_template(settings.chat_template)
        template = self.engine.tokenizer.tool_template if self.engine.tokenizer else None
        self.parser = settings.parser or detect(template)
        if settings.parser is None and self.parser == Plain() and template is not None and self.tokenizer.takes_tools:
            logger.warning("the chat template takes tools, and no parser knows its calls; --parser names one")
        self.fingerprint = self.fingerprint_of(settings.fingerprint)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        if self.engine.tokenizer is None:
            raise UserError("model", "has no tokenizer", "Serve it from a directory that holds its tokenizer.json.")
        return self.engine.tokenizer

    @cached_property
    def token_decoder(self) -> TokenDecoder:
        return TokenDecoder(self.tokenizer)

    @cached_property
    def sampling_defaults(self) -> dict[str, Any]:
        """The model's own, from its generation_config.json, and what this server was started with."""
        return recommended(self.engine.tokenizer) | dict(self.settings.sampling)

    @cached_property
    def pooling(self) -> Pooling:
        """Of embeddings, unless a request says otherwise."""
        return self.settings.pooling or recommended_pooling(self.engine.tokenizer)

    @property
    def context(self) -> int:
        return self.engine.model.config.context

    def join(self, services: Sequence[Service], users: Iterable[KeyUse]) -> None:
        """This model is one of several in a server; `users` are those of its keys."""
        self.all = services
        self.responses = services[0].responses  # which are asked for by their ids alone
        self.responses = services[0].responses
        self.metrics.users = tuple(users)
        self.metrics.more_of_all = self.settings.knowledge.metrics

    @property
    def names(self) -> tuple[str, ...]:
        """Of the model itself, its own first."""
        return (self.settings.name, *self.settings.aliases)

    def knows(self, model: str) -> bool:
        return model in self.names or model in self.engine.adapters

    def fingerprint_of(self, weights: str) -> str:
        """Whether two responses came from the same weights, computed in the same way."""
        model = self.engine.model
        parts = (moesaic.__version__, weights, model.config, model.dtype, model.mode)
        return f"fp_{hashlib.blake2b(repr(parts).encode(), digest_size=6).hexdigest()}"

    def special_tokens(self) -> Mapping[str, int]:
        """Those that are no text for a grammar. The first call reads the whole vocabulary."""
        return special_tokens(self.tokenizer, self.engine.model.config.vocab)

    def adapter(self, model: str | None) -> str | None:
        """Which adapter the name in a request means; None is the model itself."""
        if model is None or model in self.names:
            return None
        if model in self.engine.adapters:
            return model
        raise ApiError(404, f"the model {model!r} does not exist", param="model", code="model_not_found")

    async def prepare(
        self,
        make: Callable[[], Result],
        field_name: Callable[[str], str] = lambda place: place,
        *,
        light: bool = False,
    ) -> Result:
        """Work that takes a while (chat templates, tokenization, grammars), beside the event loop; what is `light`, at
        once: of many requests that come together the first is then under way before the last is read. `field_name` is
        what the client calls a field in which an error was found."""

        def guarded() -> Result:
            try:
                return make()
            except UserError as error:
                error.place = field_name(error.place)
                raise
            except Exception:
                raise
            except BaseException as error:  # a panic inside a library: no Exception, but no reason to stop either
                logger.warning("a library panicked at a request: %s", error)
                raise UserError("", "the request cannot be read", "Make it simpler.") from None

        return guarded() if light else await asyncio.to_thread(guarded)

    def tokenize(self, text: str, *, special: bool = True) -> list[int]:
        """The tokens of a prompt, unless it is too large to be one."""
        self.check_size(len(text), "characters")
        tokens = self.tokenizer.encode(text, special=special)
        if len(text) > LARGE_CHARS:
            return_memory()
        return tokens

    @property
    def max_prompt(self) -> int:
        """Tokens of a prompt, and its completion's where the engine sets the limit."""
        return min(self.engine.max_length, self.settings.max_prompt or self.engine.max_length)

    def check_size(self, count: int, what: str, place: str = "prompt") -> None:
        """So many characters, or tokens to detokenize: beyond what any prompt could be, nothing is done with them,
        because it would take seconds and gigabytes."""
        limit = max(CHARS_PER_TOKEN * self.max_prompt, LEAST_CHARS)
        if count > limit:
            problem = f"has {count} {what}, and this server takes {limit} (its prompts have {self.max_prompt} tokens)"
            raise TooLarge(place, problem, "Shorten it.")

    def check_prompt(self, tokens: Sequence[int]) -> None:
        limit = self.settings.max_prompt
        if limit is not None and len(tokens) > limit:
            raise TooLong("prompt", f"has {len(tokens)} tokens, and this server takes {limit}", "Shorten it.")

    def cache_salt(self, state: Any, salt: str | None) -> str:
        """With whom a request shares the prefix cache: with those of the same API key that name the same salt."""
        owner = getattr(state, "owner", "")
        return f"{owner}/{salt}" if salt else owner

    @property
    def max_open(self) -> int:
        return self.engine.scheduler.max_requests + self.settings.max_queue

    def check_count(self, count: int) -> None:
        """Whether so many completions could ever be requested at once."""
        if count > self.max_open:
            message = f"requests {count} completions, and this server holds {self.max_open}"
            raise ApiError(400, message, param="n", code="invalid_value")

    def check_open(self) -> None:
        """Whether requests are taken."""
        again = {"retry-after": "5"}
        if self.draining:
            raise ApiError(503, "the server is shutting down", code="shutting_down", headers=again)
        if self.held:
            raise ApiError(503, "the server takes no requests now", code="draining", headers=again)
        if self.sleeping:
            raise ApiError(503, "the model sleeps; POST /wake_up wakes it", code="sleeping", headers=again)

    def check_ready(self) -> None:
        """Whether a request would be begun with at once."""
        if not self.loop.alive:
            raise ApiError(503, "the server is shutting down", code="shutting_down")
        self.check_open()
        if not self.loop.ready:
            raise ApiError(503, "no worker is ready; requests wait", code="not_ready", headers={"retry-after": "1"})

    def submit(self, requests: Sequence[Request], again: bool = False) -> OutputStream:
        """Hand requests to the engine, unless the queue is full; `again`, for one that has been let in before."""
        if not again:
            self.check_open()
            self.check_count(len(requests))
        if self.loop.open + len(requests) > self.max_open and not again:
            raise ApiError(
                429,
                f"the queue is full ({self.loop.open} requests)",
                code="queue_full",
                headers={"retry-after": str(self.wait_estimate())},
            )
        if (caller := CALLER.get()) is not None:
            self.metrics.charge(requests, caller, again)
        return self.loop.submit(requests, self.settings.request_seconds)

    def wait_estimate(self) -> int:
        """Seconds until some of the queue will be done, by how long requests took so far."""
        stats = self.loop.stats()
        each = stats.busy_seconds / stats.finished if stats.finished else 1.0
        return max(1, min(60, math.ceil(each * self.settings.max_queue / 4)))


def new_id(kind: str) -> str:
    """`kind` is how OpenAI's identifiers of this kind begin; some clients go by it."""
    return f"{kind}{uuid.uuid4().hex}"


def return_memory() -> None:
    """Give free memory back to the system: glibc would keep what a large request took, in case another comes."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:  # not every C library has it
        trim(0)
