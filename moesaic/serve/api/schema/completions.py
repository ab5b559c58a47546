"""/v1/completions: the request and the response."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from moesaic.serve.api.schema.sampling import MAX_LOGPROBS, GenerationRequest
from moesaic.serve.api.schema.tokens import TokenFields, Tokens
from moesaic.serve.api.schema.usage import Completed

# One text, several texts, the tokens of one, the tokens of several.
Text = Annotated[str, Field(json_schema_extra={"minLength": 1})]  # an empty one is refused with its place
Texts = Text | Annotated[list[Text], Field(min_length=1, max_length=2048)]
Prompts = Texts | Tokens | Annotated[list[Tokens], Field(min_length=1, max_length=2048)]


def _either(schema: dict[str, Any]) -> None:
    """The document's word for `take_tokens`."""
    schema["required"].remove("prompt")
    schema["anyOf"] = [{"required": ["prompt"]}, {"required": ["prompt_token_ids"]}]


class CompletionRequest(GenerationRequest, TokenFields):
    model_config = ConfigDict(json_schema_extra=_either)

    prompt: Prompts
    max_tokens: int | None = Field(default=16, ge=0, lt=2**31)
    best_of: int | None = Field(default=None, ge=1, le=128)
    logprobs: int | None = Field(default=None, ge=-1, le=MAX_LOGPROBS, description="-1: the whole vocabulary.")
    echo: bool | None = None
    suffix: str | None = Field(default=None, description="What follows; the model fills in what is between.")

    @model_validator(mode="before")
    @classmethod
    def take_tokens(cls, data: Any) -> Any:
        """Tokens under their own name take the place of the prompt, which clients send because they must."""
        given = data.get("prompt_token_ids") if isinstance(data, dict) else None
        return data if given is None else data | {"prompt": given}


class CompletionLogprobs(BaseModel):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]


class CompletionChoice(BaseModel):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    prompt_logprobs: list[dict[str, Any] | None] | None = None
    prompt_token_ids: list[int] | None = None
    token_ids: list[int] | None = None


class CompletionResponse(Completed[CompletionChoice]):
    object: Literal["text_completion"] = "text_completion"
