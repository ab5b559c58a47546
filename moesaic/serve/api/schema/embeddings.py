"""/v1/embeddings: the request and the response; and what rerank and score have in common with it."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AliasChoices, BaseModel, Field

from moesaic.serve.api.schema.chat import Message
from moesaic.serve.api.schema.completions import Prompts
from moesaic.serve.api.schema.sampling import RequestModel
from moesaic.serve.core.pooling import Pooling


class PoolingRequest(RequestModel):
    """What every request has that computes hidden states, and generates nothing."""

    model: str | None = Field(default=None, description="The model, or one of its adapters. Default: the model.")
    truncate_prompt_tokens: int | None = Field(
        default=None, ge=-1, lt=2**31, description="Keep so many tokens of a longer text; -1: as many as fit."
    )
    truncation_side: Literal["left", "right"] | None = Field(
        default=None, description="Where tokens are cut off; default: right, which keeps the first."
    )
    priority: int | None = Field(default=None, ge=-(2**31), lt=2**31, description="Lower is more urgent.")
    cache_salt: str | None = None
    user: str | None = None


class VectorOptions(PoolingRequest):
    encoding_format: Literal["float", "base64"] | None = "float"
    dimensions: int | None = Field(
        default=None, ge=1, lt=2**31, description="Keep the first so many numbers (Matryoshka embeddings)."
    )
    pooling: Pooling | None = Field(default=None, description="Default: as the model says, or the server's.")
    normalize: bool | None = Field(
        default=None,
        validation_alias=AliasChoices("normalize", "use_activation"),
        description="To length one; default: true, but for the hidden states of single tokens.",
    )
    add_special_tokens: bool | None = None


class EmbeddingRequest(VectorOptions):
    """`input`, or `messages` that the chat template makes a text of."""

    input: Prompts | None = None
    messages: Annotated[list[Message], Field(min_length=1)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool = False


class Embedding(BaseModel):
    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str


class EmbeddingUsage(BaseModel):
    prompt_tokens: int
    total_tokens: int


class EmbeddingResponse(BaseModel):
    id: str
    object: Literal["list"] = "list"
    created: int
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage


class TokenVectors(BaseModel):
    """What /pooling gives for one text: a vector, or one for each token."""

    object: Literal["pooling"] = "pooling"
    index: int
    data: list[float] | list[list[float]] | str


class PoolingResponse(BaseModel):
    id: str
    object: Literal["list"] = "list"
    created: int
    data: list[TokenVectors]
    model: str
    usage: EmbeddingUsage
