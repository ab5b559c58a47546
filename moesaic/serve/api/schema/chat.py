"""/v1/chat/completions: the request and the response."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from moesaic.serve.api.schema.sampling import MAX_LOGPROBS, GenerationRequest, RequestModel, unsupported
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
HAS_CONTENT = {
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
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None


class Function(RequestModel):
    name: str = Field(pattern=r"^[a-zA-Z0-9_.:-]{1,256}$")
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class FunctionType(RequestModel):
    """The one type of tool there is."""

    type: Literal["function"]


class Tool(FunctionType):
    function: Function


class NamedFunction(RequestModel):
    name: str


class NamedTool(FunctionType):
    function: NamedFunction


class ChatCompletionRequest(GenerationRequest):
    messages: list[Message] = Field(min_length=1)
    max_tokens: int | None = Field(default=None, ge=1, lt=2**31)
    max_completion_tokens: int | None = Field(default=None, ge=1, lt=2**31)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    tools: Annotated[list[Tool], Field(max_length=512)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    functions: Annotated[None, unsupported("give them as tools")] = None
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool = True


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


class AssistantMessage(BaseModel):
    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: None = None
    reasoning_content: str | None = None
    tool_calls: list[GeneratedToolCall] | None = None


class ChatChoice(BaseModel):
    index: int
    message: AssistantMessage
    logprobs: ChoiceLogprobs | None
    finish_reason: str


class ChatCompletionResponse(Completed[ChatChoice]):
    object: Literal["chat.completion"] = "chat.completion"
    prompt_logprobs: list[dict[str, Any] | None] | None = None
