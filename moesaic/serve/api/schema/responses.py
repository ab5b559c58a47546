"""/v1/responses: the request and the response of OpenAI's Responses API, for text and functions."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, Discriminator, Field, PrivateAttr, Tag

from moesaic.serve.api.schema.chat import Function, FunctionType, NamedFunction, Parts
from moesaic.serve.api.schema.know import ChosenSearch, FileSearchTool
from moesaic.serve.api.schema.sampling import MAX_LOGPROBS, ExtraSamplingParams, RequestModel, unsupported
from moesaic.strict import wrong

Status = Literal["in_progress", "completed", "incomplete"]


class InputMessage(RequestModel):
    type: Literal["message"] = "message"
    id: str | None = None
    status: str | None = None
    role: str
    content: str | Parts


class InputFunctionCall(RequestModel):
    type: Literal["function_call"]
    id: str | None = None
    status: str | None = None
    call_id: str
    name: str
    arguments: str


class InputFunctionOutput(RequestModel):
    type: Literal["function_call_output"]
    id: str | None = None
    status: str | None = None
    call_id: str
    output: str | Parts


class ReasoningPart(RequestModel):
    type: Literal["reasoning_text", "summary_text", "text"]
    text: str


class InputReasoning(RequestModel):
    """What a model thought before, as the client got it; the chat template decides whether the model is shown it."""

    type: Literal["reasoning"]
    id: str | None = None
    status: str | None = None
    summary: list[ReasoningPart] | None = None
    content: list[ReasoningPart] | None = None
    encrypted_content: str | None = None


class InputFileSearch(RequestModel):
    """A search of the server, as the client got it; the model is not shown it again."""

    type: Literal["file_search_call"]
    id: str | None = None
    status: str | None = None
    queries: list[str] | None = None
    results: list[dict[str, Any]] | None = None


class ItemReference(RequestModel):
    """An item of a stored response, by its id."""

    type: Literal["item_reference"] | None = None
    id: str = Field(max_length=256)


def _kind(item: Any) -> Any:
    """The type of an item of the input; a message needs none, nor does an id alone."""
    if not isinstance(item, dict):
        return getattr(item, "type", None) or ("item_reference" if isinstance(item, ItemReference) else "message")
    return item.get("type") or ("item_reference" if "id" in item and "role" not in item else "message")


InputItem = Annotated[
    Annotated[InputMessage, Tag("message")]
    | Annotated[InputFunctionCall, Tag("function_call")]
    | Annotated[InputFunctionOutput, Tag("function_call_output")]
    | Annotated[InputReasoning, Tag("reasoning")]
    | Annotated[InputFileSearch, Tag("file_search_call")]
    | Annotated[ItemReference, Tag("item_reference")],
    Discriminator(_kind),
]


# Tools are those of chat, without a level in between.


class FunctionTool(Function, FunctionType):
    pass


class ChosenTool(NamedFunction, FunctionType):
    pass


class AllowedTools(RequestModel):
    """Some of the tools: the model is shown no others."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: list[ChosenTool] = Field(min_length=1)


def _own_tool(tool: Any) -> Any:
    kind = tool.get("type") if isinstance(tool, dict) else None
    if isinstance(kind, str) and kind not in ("function", "file_search"):
        raise wrong(f"a tool of type {kind[:64]!r} is not supported; give functions, or file_search")
    return tool


def _tool_kind(tool: Any) -> Any:
    kind = tool.get("type") if isinstance(tool, dict) else getattr(tool, "type", None)
    return "file_search" if kind == "file_search" else "function"


AnyTool = Annotated[
    Annotated[FunctionTool, Tag("function")] | Annotated[FileSearchTool, Tag("file_search")], Discriminator(_tool_kind)
]


class PlainFormat(RequestModel):
    type: Literal["text"]


class ObjectFormat(RequestModel):
    type: Literal["json_object"]


class SchemaFormat(RequestModel):
    type: Literal["json_schema"]
    name: str = "answer"
    description: str | None = None
    json_schema: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class TextOptions(RequestModel):
    format: Annotated[PlainFormat | ObjectFormat | SchemaFormat, Field(discriminator="type")] | None = None
    verbosity: str | None = None


class ReasoningOptions(RequestModel):
    """The whole reasoning is given as `content`; there is nothing that would write a `summary`."""

    effort: str | None = None
    summary: str | None = None


class ResponseStreamOptions(RequestModel):
    include_obfuscation: bool | None = None


Include = Literal[
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "file_search_call.results",
    # Of tools that are not offered: there is nothing to include.
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
]


class PromptFields(RequestModel):
    """What the tokens of a prompt depend on."""

    model: str | None = None
    input: str | Annotated[list[InputItem], Field(min_length=1)] | None = None
    instructions: str | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    tools: Annotated[list[Annotated[AnyTool, BeforeValidator(_own_tool)]], Field(max_length=512)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ChosenTool | AllowedTools | ChosenSearch | None = None
    parallel_tool_calls: bool | None = None
    previous_response_id: str | None = Field(default=None, max_length=256)
    truncation: Literal["auto", "disabled"] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    conversation: Annotated[None, unsupported("give a previous_response_id")] = None

    # Who asks, and the items of the responses that this one continues: of the server, not of the body.
    _owner: str = PrivateAttr(default="")
    _before: list[Any] = PrivateAttr(default_factory=list)
    _sources: Any = PrivateAttr(default=None)  # what was found for it in the knowledge bases


class InputTokensRequest(PromptFields):
    pass


class ResponsesRequest(PromptFields, ExtraSamplingParams):
    stream: bool | None = False
    stream_options: ResponseStreamOptions | None = None
    store: bool | None = None
    background: bool | None = None
    max_output_tokens: int | None = Field(default=None, ge=1, lt=2**31)
    max_tool_calls: int | None = Field(default=None, ge=1, lt=2**31, description="Of tools that run on the server.")
    temperature: float | None = Field(default=None, ge=0, le=100)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    stop: str | Annotated[list[str], Field(max_length=32)] | None = None
    include: list[Include] | None = None
    metadata: dict[str, str] | None = None
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**63)
    service_tier: str | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None
    user: str | None = None
    prompt: Annotated[None, unsupported("send its text as instructions and input")] = None
    prompt_logprobs: Annotated[None, unsupported("ask for a chat completion")] = None


class InputDetails(BaseModel):
    cached_tokens: int
    cache_write_tokens: int  # what is computed of a prompt is cached for later ones


class OutputDetails(BaseModel):
    reasoning_tokens: int


class ResponseUsage(BaseModel):
    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class ResponsesResponse(BaseModel):
    id: str
    object: Literal["response"] = "response"
    created_at: int
    completed_at: int | None = None
    status: Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
    background: bool
    model: str
    output: list[dict[str, Any]]
    usage: ResponseUsage | None
    instructions: str | None
    incomplete_details: dict[str, str] | None = None
    error: dict[str, str] | None = None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    tool_choice: Any
    tools: list[dict[str, Any]]
    temperature: float | None
    top_p: float | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    previous_response_id: str | None
    top_logprobs: int | None
    reasoning: dict[str, Any] | None
    text: dict[str, Any]
    user: str | None
    prompt_cache_key: str | None
    safety_identifier: str | None
    service_tier: str = "default"
    truncation: Literal["auto", "disabled"]
    store: bool


class ItemList(BaseModel):
    object: Literal["list"] = "list"
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool


class DeletedResponse(BaseModel):
    id: str
    object: Literal["response"] = "response"
    deleted: Literal[True] = True


class InputTokens(BaseModel):
    object: Literal["response.input_tokens"] = "response.input_tokens"
    input_tokens: int
