"""Tokens in and out: vLLM's fields of requests that generate text, and /tokenize, /detokenize and /tokenizer_info."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from moesaic.serve.api.schema.sampling import RequestModel, Token

Tokens = Annotated[list[Token], Field(min_length=1)]


class TokenFields(RequestModel):
    """Of completions and chats."""

    prompt_token_ids: Tokens | None = Field(default=None, description="The prompt, as tokens; it is not rendered.")
    add_special_tokens: bool | None = Field(
        default=None,
        description="Add what the tokenizer puts around every text. Default: to a prompt, not to a conversation.",
    )
    truncate_prompt_tokens: int | None = Field(
        default=None, ge=-1, lt=2**31, description="Keep so many tokens of the prompt; -1: as many as fit."
    )
    truncation_side: Literal["left", "right"] | None = Field(
        default=None, description="Which side is cut off. Default: left, so that the end of the prompt is kept."
    )
    return_token_ids: bool | None = Field(default=None, description="Add `prompt_token_ids` and `token_ids`.")
    return_tokens_as_token_ids: bool | None = Field(
        default=None, description='In log-probabilities, write tokens as "token_id:123".'
    )
    logprob_token_ids: Annotated[list[Token], Field(max_length=1024)] | None = Field(
        default=None, description="Report the log-probabilities of these instead of the likeliest. Needs logprobs."
    )


class TokenPiece(BaseModel):
    """As llama.cpp's server has it: bytes where it is half a character."""

    id: int
    piece: str | list[int]


class TokenizeResponse(BaseModel):
    count: int | list[int]
    max_model_len: int
    tokens: list[int] | list[list[int]] | list[TokenPiece]
    token_strs: list[str] | None = None


class DetokenizeRequest(RequestModel):
    model: str | None = None
    tokens: list[Token]
    skip_special_tokens: bool = False


class DetokenizeResponse(BaseModel):
    """`prompt` is vLLM's name of it, `content` llama.cpp's."""

    prompt: str
    content: str


class TokenizerInfo(BaseModel):
    """What tokenizer_config.json says, too."""

    model_config = ConfigDict(extra="allow")

    tokenizer_class: str
    vocab_size: int
    model_max_length: int
    chat_template: str | None
