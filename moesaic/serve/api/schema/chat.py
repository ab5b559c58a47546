"""/v1/chat/completions: the request and the response."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr
from pydantic.config import JsonDict

from moesaic.serve.api.schema.know import ChosenSearch, FileSearchTool
from moesaic.serve.api.schema.sampling import MAX_LOGPROBS, GenerationRequest, RequestModel
from moesaic.serve.api.schema.tokens import TokenFields
from moesaic.serve.api.schema.usage import Completed


class TextPart(RequestModel):
    type: Literal["text", "input_text", "output_text"]
    text: str


class RefusalPart(RequestModel):
    """In an assistant's message."""

    type: Literal["refusal"]
    refusal: str

    @property
    def text(self) -> str:
        return self.refusal


Parts = list[Annotated[TextPart | RefusalPart, Field(discriminator="type")]]


class FunctionCall(RequestModel):
    name: str
    arguments: str | dict[str, Any] = ""


class ToolCall(RequestModel):
    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall


# Only an assistant's message may do without.
HAS_CONTENT: JsonDict = {
    "anyOf": [
        {"properties": {"role": {"const": "assistant"}}},
        {"required": ["content"], "properties": {"content": {"not": {"type": "null"}}}},
    ]
}


class Message(RequestModel):
    model_config = ConfigDict(json_schema_extra=HAS_CONTENT)  # beside that of all requests

    role: str
    content: str | Parts | None = None
    refusal: str | None = None
    name: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = Field(default=None, description="As reasoning_content.")
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    function_call: FunctionCall | None = Field(default=None, description="Of earlier versions: one of tool_calls.")


class Function(RequestModel):
    name: str = Field(pattern=r"^[a-zA-Z0-9_.:-]{1,256}$")
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class FunctionType(RequestModel):
    """The type of tool that a client runs."""

    type: Literal["function"]


class Tool(FunctionType):
    function: Function


class NamedFunction(RequestModel):
    name: str


class NamedTool(FunctionType):
    function: NamedFunction


class AllowedTool(FunctionType):
    """By its name, which stands in `function` in chats and beside the type in Responses."""

    function: NamedFunction | None = None
    plain_name: str | None = Field(default=None, alias="name")

    @property
    def name(self) -> str:
        return self.function.name if self.function is not None else self.plain_name or ""


class Allowed(RequestModel):
    mode: Literal["auto", "required"] = "auto"
    tools: Annotated[list[AllowedTool], Field(max_length=512)]


class AllowedTools(RequestModel):
    """Only some of the tools may be called."""

    type: Literal["allowed_tools"]
    allowed_tools: Allowed | None = None
    mode: Literal["auto", "required"] | None = None
    tools: Annotated[list[AllowedTool], Field(max_length=512)] | None = None

    @property
    def allowed(self) -> list[AllowedTool]:
        return self.allowed_tools.tools if self.allowed_tools is not None else self.tools or []

    @property
    def chosen_mode(self) -> str:
        return self.allowed_tools.mode if self.allowed_tools is not None else self.mode or "auto"


class ChatCompletionRequest(GenerationRequest, TokenFields):
    messages: list[Message] = Field(min_length=1)
    max_tokens: int | None = Field(default=None, ge=1, lt=2**31)
    max_completion_tokens: int | None = Field(default=None, ge=1, lt=2**31)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=-1, le=MAX_LOGPROBS, description="-1: the whole vocabulary.")
    tools: (
        Annotated[list[Annotated[Tool | FileSearchTool, Field(discriminator="type")]], Field(max_length=512)] | None
    ) = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | AllowedTools | ChosenSearch | None = None
    parallel_tool_calls: bool | None = None
    functions: Annotated[list[Function], Field(max_length=512)] | None = Field(
        default=None, description="Of earlier versions: tools. The answer has a function_call then."
    )
    function_call: Literal["none", "auto"] | NamedFunction | None = None
    reasoning_effort: str | None = None
    enable_thinking: bool | None = Field(default=None, description="For templates that know it; as in template kwargs.")
    separate_reasoning: bool | None = Field(default=None, description="false: reasoning stays in the content.")
    reasoning_format: Literal["none", "auto", "deepseek", "deepseek-legacy"] | None = None
    include_reasoning: bool | None = Field(default=None, description="false: reasoning is not sent.")
    documents: list[dict[str, Any]] | None = None
    chat_template: Annotated[str, Field(max_length=1 << 20)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool | None = Field(
        default=None, description="Default: where the last message is the assistant's."
    )
    echo: bool | None = Field(default=None, description="The message that is continued comes first in the answer.")

    # What was found for it in the knowledge bases: of the server, not of the body.
    _sources: Any = PrivateAttr(default=None)

    @property
    def function_tools(self) -> list[Tool]:
        return [tool for tool in self.tools or () if isinstance(tool, Tool)]

    @property
    def search_tools(self) -> list[FileSearchTool]:
        return [tool for tool in self.tools or () if isinstance(tool, FileSearchTool)]


class TopLogprob(BaseModel):
    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChoiceLogprobs(BaseModel):
    content: list[ChatTokenLogprob]
    refusal: None = None


class GeneratedFunctionCall(BaseModel):
    name: str
    arguments: str


class GeneratedToolCall(BaseModel):
    id: str
    type: Literal["function"] = "function"
    function: GeneratedFunctionCall


class QuotedCitation(BaseModel):
    """OpenAI's `url_citation`, and what of the passage is quoted: it stands in the source from `quote_start` to
    `quote_end`."""

    start_index: int
    end_index: int
    title: str
    url: str
    number: int
    quote: str
    quote_start: int
    quote_end: int
    supported: bool | None


class Annotation(BaseModel):
    type: Literal["url_citation"] = "url_citation"
    url_citation: QuotedCitation


class SearchResult(BaseModel):
    """What was found for a request, as Perplexity's API lists it."""

    number: int
    title: str
    url: str
    snippet: str
    id: str
    base: str
    start: int
    end: int
    page: int | None
    score: float


class AssistantMessage(BaseModel):
    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: None = None
    annotations: list[Annotation] | None = Field(default=None, exclude_if=lambda value: value is None)
    reasoning_content: str | None = None
    tool_calls: list[GeneratedToolCall] | None = None
    function_call: GeneratedFunctionCall | None = None


class ChatChoice(BaseModel):
    index: int
    message: AssistantMessage
    logprobs: ChoiceLogprobs | None
    finish_reason: str
    token_ids: list[int] | None = None


class ChatCompletionResponse(Completed[ChatChoice]):
    object: Literal["chat.completion"] = "chat.completion"
    prompt_logprobs: list[dict[str, Any] | None] | None = None
    prompt_token_ids: list[int] | None = None
    search_results: list[SearchResult] | None = Field(default=None, exclude_if=lambda value: value is None)


class PromptResponse(BaseModel):
    """Of /apply-template."""

    prompt: str
