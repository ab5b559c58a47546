"""/v1/responses: the request and the response of OpenAI's Responses API, for text. No state is kept."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Discriminator, Field, Tag

from moesaic.serve.api.schema.chat import Function, FunctionType, NamedFunction, Parts
from moesaic.serve.api.schema.sampling import MAX_LOGPROBS, ExtraSamplingParams, RequestModel, unsupported


class InputMessage(RequestModel):
    type: Literal["message"] = "message"
    role: str
    content: str | Parts


class InputFunctionCall(RequestModel):
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str


class InputFunctionOutput(RequestModel):
    type: Literal["function_call_output"]
    call_id: str
    output: str | Parts


class InputReasoning(RequestModel):
    """Sent back by clients; the model is not shown its earlier reasoning."""

    type: Literal["reasoning"]


def _kind(item: Any) -> Any:
    """The type of an item of the input; a message needs none."""
    return item.get("type", "message") if isinstance(item, dict) else getattr(item, "type", "message")


InputItem = Annotated[
    Annotated[InputMessage, Tag("message")]
    | Annotated[InputFunctionCall, Tag("function_call")]
    | Annotated[InputFunctionOutput, Tag("function_call_output")]
    | Annotated[InputReasoning, Tag("reasoning")],
    Discriminator(_kind),
]


# Tools are those of chat, without a level in between.


class FunctionTool(Function, FunctionType):
    pass


class ChosenTool(NamedFunction, FunctionType):
    pass


class PlainFormat(RequestModel):
    type: Literal["text"]


class ObjectFormat(RequestModel):
    type: Literal["json_object"]


class SchemaFormat(RequestModel):
    type: Literal["json_schema"]
    name: str = "answer"
    json_schema: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class TextOptions(RequestModel):
    format: Annotated[PlainFormat | ObjectFormat | SchemaFormat, Field(discriminator="type")] | None = None


class ReasoningOptions(RequestModel):
    effort: str | None = None


class ResponsesRequest(ExtraSamplingParams):
    model: str | None = None
    input: str | Annotated[list[InputItem], Field(min_length=1)]
    instructions: str | None = None
    stream: bool | None = False
    max_output_tokens: int | None = Field(default=None, ge=1, lt=2**31)
    temperature: float | None = Field(default=None, ge=0, le=100)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    include: list[str] | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    tools: Annotated[list[FunctionTool], Field(max_length=512)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ChosenTool | None = None
    parallel_tool_calls: bool | None = None
    previous_response_id: Annotated[None, unsupported("send the whole conversation")] = Field(
        default=None, description="Not supported: send the whole conversation."
    )
    conversation: Annotated[None, unsupported("send the whole conversation as input")] = None
    prompt: Annotated[None, unsupported("send its text as instructions and input")] = None
    background: Annotated[Literal[False] | None, unsupported("wait for the response")] = None
    metadata: dict[str, str] | None = None
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**63)
    chat_template_kwargs: dict[str, Any] | None = None
    prompt_logprobs: Annotated[None, unsupported("ask for a chat completion")] = None
    user: str | None = None


class InputDetails(BaseModel):
    cached_tokens: int


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
    status: Literal["in_progress", "completed", "incomplete"]
    model: str
    output: list[dict[str, Any]]
    usage: ResponseUsage | None
    instructions: str | None
    incomplete_details: dict[str, str] | None = None
    error: None = None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    tool_choice: Any
    tools: list[dict[str, Any]]
    temperature: float | None
    top_p: float | None
    max_output_tokens: int | None
    previous_response_id: None = None
    top_logprobs: int | None
    reasoning: dict[str, Any] | None
    text: dict[str, Any]
    user: str | None
    truncation: Literal["disabled"] = "disabled"
    store: Literal[False] = False
