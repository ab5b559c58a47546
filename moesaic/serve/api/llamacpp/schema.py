"""Requests of llama.cpp's server, under its names of fields."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AliasChoices, BeforeValidator, Field

from moesaic.serve.api.schema.sampling import MAX_LOGPROBS, GenerationRequest, RequestModel, Token
from moesaic.serve.core.pooling import Pooling


class PromptObject(RequestModel):
    prompt_string: str
    multimodal_data: Any = None


Mixed = list[str | Token]  # tokens and texts, one after the other
Prompt = str | Mixed | PromptObject
# One prompt or several. A list of texts is several; one in which there are tokens beside texts is one.
Prompts = str | PromptObject | Annotated[list[str | Token | Mixed | PromptObject], Field(min_length=1)]


class AppliedAdapter(RequestModel):
    id: int
    scale: float


def words(given: Any) -> Any:
    """Empty stop strings stop nothing."""
    return [word for word in given if word != ""] if isinstance(given, list) else given


class NativeRequest(GenerationRequest):
    """What `/completion` and `/infill` have in common. The names of sampling params are the server's own already."""

    n_predict: int | None = Field(
        default=None,
        ge=-2,
        lt=2**31,
        validation_alias=AliasChoices("n_predict", "max_tokens", "max_completion_tokens"),
        description="-1 or -2: as many as fit.",
    )
    n: int | None = Field(default=None, ge=1, le=128, validation_alias=AliasChoices("n", "n_cmpl"))
    n_probs: int | None = Field(
        default=None, ge=0, le=MAX_LOGPROBS, validation_alias=AliasChoices("n_probs", "logprobs")
    )
    temperature: float | None = Field(default=None, le=100, description="0 or less: greedy.")
    top_p: float | None = Field(default=None, ge=0, le=1)
    stop: Annotated[str | Annotated[list[str], Field(max_length=32)] | None, BeforeValidator(words)] = None
    cache_prompt: bool | None = None
    return_tokens: bool | None = None
    post_sampling_probs: bool | None = None
    n_indent: int | None = Field(default=None, ge=0, lt=2**31, description="End at a line that is indented less.")
    t_max_predict_ms: int | None = Field(default=None, ge=-1, lt=2**53, description="End then, once there is a line.")
    response_fields: Annotated[list[str], Field(max_length=64)] | None = None
    lora: Annotated[list[AppliedAdapter], Field(max_length=64)] | None = None


class CompletionRequest(NativeRequest):
    prompt: Prompts


class ExtraContext(RequestModel):
    filename: str = "tmp"
    text: str


class InfillRequest(NativeRequest):
    input_prefix: str | Mixed
    input_suffix: str | Mixed
    input_extra: Annotated[list[ExtraContext], Field(max_length=1024)] | None = None
    prompt: str | None = None


class EmbeddingRequest(RequestModel):
    """`content`, or OpenAI's name of it."""

    content: Prompts = Field(validation_alias=AliasChoices("content", "input"))
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = Field(default=None, ge=1, lt=2**31)
    embd_normalize: int | None = Field(default=None, ge=-1, le=64, description="-1: none, 2: Euclidean, ...")
    pooling: Pooling | None = None
