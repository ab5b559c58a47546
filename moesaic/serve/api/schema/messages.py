"""/v1/messages: the request and the response of Anthropic's Messages API, for text and tools."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, Discriminator, Field, PrivateAttr, Tag

from moesaic.serve.api.schema.know import FileSearchTool
from moesaic.serve.api.schema.sampling import ExtraSamplingParams, RequestModel, unsupported
from moesaic.strict import wrong

CacheControl = dict[str, Any] | None  # prefixes are cached without being asked; it only changes how usage counts them


class TextBlock(RequestModel):
    type: Literal["text"]
    text: str
    citations: list[dict[str, Any]] | None = Field(default=None, description="Of an earlier answer: not shown again.")
    cache_control: CacheControl = None


class TextSource(RequestModel):
    type: Literal["text"]
    data: str
    media_type: str | None = None


class BlockSource(RequestModel):
    type: Literal["content"]
    content: str | list[TextBlock]


class DocumentBlock(RequestModel):
    """A document that is text; PDF is refused, as images are."""

    type: Literal["document"]
    source: Annotated[TextSource | BlockSource, Field(discriminator="type")]
    title: str | None = None
    context: str | None = None
    cache_control: CacheControl = None


class SearchResultBlock(RequestModel):
    type: Literal["search_result"]
    source: str
    title: str
    content: list[TextBlock]
    cache_control: CacheControl = None


class ThinkingBlock(RequestModel):
    type: Literal["thinking"]
    thinking: str
    signature: str | None = None


class RedactedThinkingBlock(RequestModel):
    """No model here writes one: it is left out."""

    type: Literal["redacted_thinking"]
    data: str


class ToolUseBlock(RequestModel):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]
    cache_control: CacheControl = None


class ServerToolUseBlock(RequestModel):
    """A search of the server in an earlier turn: the model is not shown it again."""

    type: Literal["server_tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class FileSearchResultBlock(RequestModel):
    type: Literal["file_search_tool_result"]
    tool_use_id: str
    content: list[dict[str, Any]]


def _kind(block: Any) -> Any:
    return block.get("type") if isinstance(block, dict) else getattr(block, "type", None)


def only(*kinds: str) -> BeforeValidator:
    """The types of a block there are here: any other is refused by its name."""

    def check(block: Any) -> Any:
        kind = _kind(block)
        if isinstance(kind, str) and kind not in kinds:
            what = "images are" if kind == "image" else f"a block of type {kind[:64]!r} is"
            raise wrong(f"{what} not supported; send text")
        return block

    return BeforeValidator(check)


Shown = Annotated[
    Annotated[TextBlock, Tag("text")]
    | Annotated[DocumentBlock, Tag("document")]
    | Annotated[SearchResultBlock, Tag("search_result")],
    Discriminator(_kind),
    only("text", "document", "search_result"),
]


class ToolResultBlock(RequestModel):
    type: Literal["tool_result"]
    tool_use_id: str
    content: str | list[Shown] | None = None
    is_error: bool | None = None
    cache_control: CacheControl = None


Block = Annotated[
    Annotated[TextBlock, Tag("text")]
    | Annotated[DocumentBlock, Tag("document")]
    | Annotated[SearchResultBlock, Tag("search_result")]
    | Annotated[ThinkingBlock, Tag("thinking")]
    | Annotated[RedactedThinkingBlock, Tag("redacted_thinking")]
    | Annotated[ToolUseBlock, Tag("tool_use")]
    | Annotated[ToolResultBlock, Tag("tool_result")]
    | Annotated[ServerToolUseBlock, Tag("server_tool_use")]
    | Annotated[FileSearchResultBlock, Tag("file_search_tool_result")],
    Discriminator(_kind),
    only(
        *("text", "document", "search_result", "thinking", "redacted_thinking", "tool_use", "tool_result"),
        *("server_tool_use", "file_search_tool_result"),
    ),
]


class InputMessage(RequestModel):
    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


def _own_tool(tool: Any) -> Any:
    kind = tool.get("type") if isinstance(tool, dict) else None
    if isinstance(kind, str) and kind not in ("custom", "file_search"):
        raise wrong(f"a tool of type {kind[:64]!r} is not supported; give its name and input_schema")
    return tool


def _tool_kind(tool: Any) -> Any:
    return "file_search" if _kind(tool) == "file_search" else "custom"


class Tool(RequestModel):
    """A tool that the client runs; those that Anthropic's servers run, or whose form only its models know, are not."""

    name: str = Field(pattern=r"^[a-zA-Z0-9_.:-]{1,256}$")
    input_schema: dict[str, Any]
    description: str | None = None
    strict: bool | None = None
    type: Literal["custom"] | None = None
    cache_control: CacheControl = None


class MessagesSearchTool(FileSearchTool):
    name: str | None = Field(default=None, max_length=256)
    cache_control: CacheControl = None


AnyTool = Annotated[
    Annotated[Tool, Tag("custom")] | Annotated[MessagesSearchTool, Tag("file_search")], Discriminator(_tool_kind)
]


class FreeChoice(RequestModel):
    type: Literal["auto", "any", "none"]
    disable_parallel_tool_use: bool | None = None


class NamedChoice(RequestModel):
    type: Literal["tool"]
    name: str
    disable_parallel_tool_use: bool | None = None


class Thinking(RequestModel):
    """`budget_tokens` is told to templates that know `thinking_budget`; nothing enforces it."""

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: int | None = Field(default=None, ge=1, lt=2**31)
    display: Literal["summarized", "omitted"] | None = None


class JsonFormat(RequestModel):
    type: Literal["json_schema"]
    json_schema: dict[str, Any] = Field(alias="schema")


class OutputConfig(RequestModel):
    effort: str | None = None
    format: JsonFormat | None = None


class Metadata(RequestModel):
    user_id: str | None = None


class CreateThread(RequestModel):
    type: Literal["create"]


class ContinueThread(RequestModel):
    type: Literal["continue"]
    previous_message_id: str = Field(max_length=256)


class CountTokensRequest(RequestModel):
    model: str | None = Field(default=None, description="The model, or one of its adapters. Default: the model.")
    messages: list[InputMessage] = Field(min_length=1)
    system: str | list[TextBlock] | None = None
    tools: Annotated[list[Annotated[AnyTool, BeforeValidator(_own_tool)]], Field(max_length=512)] | None = None
    tool_choice: Annotated[FreeChoice | NamedChoice, Field(discriminator="type")] | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: JsonFormat | None = Field(default=None, description="An earlier name of output_config.format.")
    cache_control: CacheControl = None
    chat_template_kwargs: dict[str, Any] | None = None
    mcp_servers: Annotated[None, unsupported("give their tools as tools")] = None
    container: Annotated[None, unsupported("leave it out")] = None

    _sources: Any = PrivateAttr(default=None)  # what was found for it in the knowledge bases: of the server


class MessagesRequest(CountTokensRequest, ExtraSamplingParams):
    max_tokens: int = Field(ge=1, lt=2**31)
    stream: bool | None = False
    stop_sequences: Annotated[list[Annotated[str, Field(min_length=1)]], Field(max_length=32)] | None = None
    temperature: float | None = Field(default=None, ge=0, le=100)
    top_p: float | None = Field(default=None, gt=0, le=1)
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**63)
    metadata: Metadata | None = None
    thread: Annotated[CreateThread | ContinueThread, Field(discriminator="type")] | None = None

    # Of a thread, whose it is and which of the messages are new: of the server, not of the body.
    _owner: str = PrivateAttr(default="")
    _own: list[Any] = PrivateAttr(default_factory=list)


class TokenCount(BaseModel):
    input_tokens: int


class ThinkingTokens(BaseModel):
    thinking_tokens: int


class MessageUsage(BaseModel):
    """A prompt has as many tokens as the first three together."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: ThinkingTokens


class MessageResponse(BaseModel):
    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[dict[str, Any]]
    stop_reason: str | None
    stop_sequence: str | None
    usage: MessageUsage


class ErrorDetail(BaseModel):
    type: str
    message: str


class MessagesError(BaseModel):
    type: Literal["error"] = "error"
    error: ErrorDetail


# The error responses of these routes, for the OpenAPI document.
MESSAGES_ERRORS: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": MessagesError, "description": "An error in the request, with its message."},
    503: {"model": MessagesError, "description": "The server is shutting down."},
}
