"""/v1/rerank and /v1/score: the requests and the responses, as Jina, Cohere, TEI, llama.cpp and vLLM have them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AliasChoices, BaseModel, Field

from moesaic.serve.api.schema.embeddings import EmbeddingUsage, PoolingRequest
from moesaic.serve.api.schema.sampling import RequestModel
from moesaic.serve.core.pooling import Pooling

MAX_PAIRS = 2048
ScoringMethod = Literal["cosine", "generative"]


class TextDocument(RequestModel):
    text: str


Document = str | TextDocument
Documents = Annotated[list[Document], Field(min_length=1, max_length=MAX_PAIRS)]


class ScoringRequest(PoolingRequest):
    scoring: ScoringMethod | None = Field(
        default=None,
        description="cosine: of embeddings; generative: how likely the model says yes, not no. Default: the server's.",
    )
    pooling: Pooling | None = None
    labels: Annotated[list[str], Field(min_length=2, max_length=2)] | None = Field(
        default=None, description="The tokens that say a document fits, and that it does not. Default: yes, no."
    )
    instruction: str | None = Field(default=None, description="What is relevant, for generative scoring.")
    chat_template_kwargs: dict[str, Any] | None = None
    max_tokens_per_doc: int | None = Field(default=None, ge=0, lt=2**31, description="A longer document is cut off.")
    max_tokens_per_query: int | None = Field(default=None, ge=0, lt=2**31)


class RerankRequest(ScoringRequest):
    query: Document
    documents: Documents | None = None
    texts: Documents | None = Field(default=None, description="TEI's name of documents, answered in its form.")
    top_n: int | None = Field(default=None, ge=0, lt=2**31, description="0: all.")
    return_documents: bool | None = None
    return_text: bool | None = Field(default=None, description="TEI's name of return_documents.")
    rank_fields: None = None


class ScoreRequest(ScoringRequest):
    text_1: Document | Documents = Field(validation_alias=AliasChoices("text_1", "queries", "data_1"))
    text_2: Document | Documents = Field(validation_alias=AliasChoices("text_2", "documents", "items", "data_2"))


class RerankResult(BaseModel):
    index: int
    relevance_score: float
    document: TextDocument | None = Field(default=None, exclude_if=lambda value: value is None)


class RerankResponse(BaseModel):
    id: str
    object: Literal["list"] = "list"
    model: str
    results: list[RerankResult]
    usage: EmbeddingUsage


class TeiResult(BaseModel):
    index: int
    score: float
    text: str | None = Field(default=None, exclude_if=lambda value: value is None)


class Score(BaseModel):
    index: int
    object: Literal["score"] = "score"
    score: float


class ScoreResponse(BaseModel):
    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[Score]
    usage: EmbeddingUsage
