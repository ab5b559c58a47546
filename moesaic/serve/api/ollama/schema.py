"""Requests of Ollama's API, under its names of fields."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AliasChoices, BeforeValidator, Field

from moesaic.serve.api.schema.sampling import RequestModel, Token
from moesaic.strict import wrong

MAX_LOGPROBS = 20
KeepAlive = str | float | None  # the model stays loaded whatever it says
Format = Literal["json", ""] | dict[str, Any] | None
Think = bool | Literal["low", "medium", "high", "max"] | None


def no_images(given: Any) -> Any:
    if given:
        raise wrong("this model reads text only; leave them out")
    return None


def whole(given: Any) -> Any:
    """A whole number, also if it comes as 40.0, as some clients write all numbers."""
    return int(given) if isinstance(given, float) and given.is_integer() else given


NoImages = Annotated[None, BeforeValidator(no_images)]
Whole = Annotated[int, BeforeValidator(whole)]


class Options(RequestModel):
    """Those that choose tokens. Those that load a model (num_ctx, num_gpu and their kin) are set for the server, and
    named in the response's header like all unknown ones."""

    num_predict: Whole | None = Field(default=None, ge=-2, lt=2**31, description="Below 1: as many as fit.")
    seed: Whole | None = Field(default=None, ge=-(2**63), lt=2**63)
    temperature: float | None = Field(default=None, ge=0, le=100)
    top_k: Whole | None = Field(default=None, ge=-1, lt=2**31)
    top_p: float | None = Field(default=None, ge=0, le=1)
    min_p: float | None = Field(default=None, ge=0, le=1)
    typical_p: float | None = Field(default=None, gt=0, le=1)
    repeat_penalty: float | None = Field(default=None, gt=0, le=100)
    repeat_last_n: Whole | None = Field(default=None, ge=-1, lt=2**31)
    presence_penalty: float | None = Field(default=None, ge=-2, le=2)
    frequency_penalty: float | None = Field(default=None, ge=-2, le=2)
    mirostat: Whole | None = Field(default=None, ge=0, le=2)
    mirostat_tau: float | None = Field(default=None, ge=0, le=100)
    mirostat_eta: float | None = Field(default=None, ge=0, le=100)
    stop: str | Annotated[list[str], Field(max_length=32)] | None = None


class FunctionCall(RequestModel):
    name: str
    arguments: dict[str, Any] = Field(default_factory=dict)
    index: int | None = None


class ToolCall(RequestModel):
    id: str | None = None
    function: FunctionCall


class Message(RequestModel):
    role: str
    content: str | None = ""
    thinking: str | None = None
    images: NoImages = None
    tool_calls: list[ToolCall] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None


class Tool(RequestModel):
    type: str = "function"
    function: dict[str, Any]


class GeneratingRequest(RequestModel):
    """What chat and generate have in common."""

    model: str
    stream: Annotated[bool, BeforeValidator(lambda given: True if given is None else given)] = True
    format: Format = None
    options: Options | None = None
    think: Think = None
    keep_alive: KeepAlive = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    cache_salt: None = None


class ChatRequest(GeneratingRequest):
    messages: list[Message] = Field(default_factory=list)
    truncate: bool | None = Field(
        default=None, description="Leave out the oldest turns if all do not fit; on by default."
    )
    tools: Annotated[list[Tool], Field(max_length=512)] | None = None


def refused(instead: str) -> BeforeValidator:
    def check(given: Any) -> Any:
        if given:
            raise wrong(f"not supported; {instead}")
        return None

    return BeforeValidator(check)


class GenerateRequest(GeneratingRequest):
    prompt: str | None = ""
    suffix: str | None = None
    system: str | None = None
    template: Annotated[None, refused("the model's own is used; send a finished prompt with raw: true")] = None
    context: list[Token] | None = None
    raw: bool | None = False
    images: NoImages = None


class EmbedRequest(RequestModel):
    model: str
    input: str | Annotated[list[str], Field(max_length=2048)]
    truncate: bool | None = True
    dimensions: int | None = Field(default=None, ge=0, lt=2**31)
    options: Options | None = None
    keep_alive: KeepAlive = None


class EmbeddingsRequest(RequestModel):
    """Of an older route."""

    model: str
    prompt: str | None = ""
    options: Options | None = None
    keep_alive: KeepAlive = None


class ShowRequest(RequestModel):
    model: str = Field(validation_alias=AliasChoices("model", "name"))
    verbose: bool | None = None
