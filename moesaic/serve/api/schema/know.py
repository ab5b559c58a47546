"""/v1/know and /v1/vector_stores: the requests and the responses; and the tool `file_search` of all dialects."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from moesaic.serve.api.knowledge import MAX_PASSAGES, MAX_QUERY, Found, Passage
from moesaic.serve.api.schema.request_model import RequestModel

Query = Annotated[str, Field(min_length=1, max_length=MAX_QUERY)]
Names = Annotated[list[Annotated[str, Field(max_length=256)]], Field(min_length=1, max_length=16)]
Count = Annotated[int, Field(ge=1, le=MAX_PASSAGES)]
Method = Annotated[str, Field(pattern="^[a-z_]{1,32}$")]


class KnowSearchRequest(RequestModel):
    query: Query
    k: Count = 8
    method: Method = Field(default="auto", description="auto, words, vectors, fusion or mutual, where the base has it.")
    base: str | Names | None = Field(default=None, description="Which base, or which ones. Default: all.")


class PassageShown(BaseModel):
    id: str
    base: str
    document: str
    source: str
    title: str
    text: str
    start: int
    end: int
    page: int | None
    score: float

    @classmethod
    def of(cls, found: Found) -> PassageShown:
        one: Passage = found.passage
        return cls(base=found.base, **{name: getattr(one, name) for name in cls.model_fields if name != "base"})


class KnowSearchResponse(BaseModel):
    object: Literal["list"] = "list"
    query: str
    data: list[PassageShown]


class BaseShown(BaseModel):
    id: str
    object: Literal["knowledge_base"] = "knowledge_base"
    passages: int
    methods: list[str]


class BaseList(BaseModel):
    object: Literal["list"] = "list"
    data: list[BaseShown]


class RankingOptions(RequestModel):
    """`ranker` is a method of search; scores have no bounds here, so that a threshold would mean nothing."""

    ranker: str | None = Field(default=None, max_length=64)
    score_threshold: float | None = Field(default=None, ge=0, le=0, description="Not offered: 0.")


class FileSearchTool(RequestModel):
    """The server searches its knowledge bases, and the model answers from what is found."""

    type: Literal["file_search"]
    vector_store_ids: Names | None = Field(default=None, description="Names of bases. Default: all.")
    max_num_results: Count | None = None
    ranking_options: RankingOptions | None = None
    rewrite_query: bool | None = Field(
        default=None, description="The model writes the query. Default: it is the last message of the user."
    )
    filters: None = Field(default=None, description="Not offered.")

    @property
    def method(self) -> str:
        ranker = self.ranking_options.ranker if self.ranking_options else None
        return "auto" if ranker is None or ranker.startswith("default") or ranker == "none" else ranker


class ChosenSearch(RequestModel):
    type: Literal["file_search"]


class StoreSearchRequest(RequestModel):
    """Of OpenAI's vector stores."""

    query: Query | Annotated[list[Query], Field(min_length=1, max_length=8)]
    max_num_results: Count = 10
    ranking_options: RankingOptions | None = None
    rewrite_query: bool | None = None
    filters: None = None


class StoreText(BaseModel):
    type: Literal["text"] = "text"
    text: str


class StoreResult(BaseModel):
    file_id: str
    filename: str
    score: float
    attributes: dict[str, str | float | bool]
    content: list[StoreText]


class StoreResults(BaseModel):
    object: Literal["vector_store.search_results.page"] = "vector_store.search_results.page"
    search_query: list[str]
    data: list[StoreResult]
    has_more: Literal[False] = False
    next_page: None = None


def attributes(passage: Passage) -> dict[str, Any]:
    found: dict[str, Any] = {"title": passage.title[:512], "start": passage.start, "end": passage.end}
    return found | ({} if passage.page is None else {"page": passage.page})
