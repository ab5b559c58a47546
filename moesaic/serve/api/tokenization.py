"""POST /tokenize and /detokenize."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter
from pydantic import BaseModel, Field

from moesaic.errors import UserError
from moesaic.serve.api.chat import prompt_text
from moesaic.serve.api.errors import ERRORS
from moesaic.serve.api.schema.chat import ChatCompletionRequest, Message, Tool
from moesaic.serve.api.schema.sampling import RequestModel, Token
from moesaic.serve.api.service import Service


class TokenizeRequest(RequestModel):
    """Either `prompt` or `messages`."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1)] | None = None
    tools: list[Tool] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool = True
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class TokenizeResponse(BaseModel):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeRequest(RequestModel):
    model: str | None = None
    tokens: list[Token]


class DetokenizeResponse(BaseModel):
    prompt: str


def tokenize(service: Service, body: TokenizeRequest) -> TokenizeResponse:
    service.adapter(body.model)
    tokenizer = service.tokenizer
    if (body.prompt is None) == (body.messages is None):
        raise UserError("prompt", "give either prompt or messages")
    if body.messages is not None:
        chat = ChatCompletionRequest(
            messages=body.messages,
            tools=body.tools,
            chat_template_kwargs=body.chat_template_kwargs,
            add_generation_prompt=body.add_generation_prompt,
        )
        tokens = tokenizer.encode(prompt_text(chat, tokenizer), special=bool(body.add_special_tokens))
    else:
        assert body.prompt is not None
        tokens = tokenizer.encode(body.prompt, special=body.add_special_tokens is not False)
    return TokenizeResponse(
        count=len(tokens),
        max_model_len=service.context,
        tokens=tokens,
        token_strs=[service.token_decoder.text(token) for token in tokens] if body.return_token_strs else None,
    )


def detokenize(service: Service, body: DetokenizeRequest) -> DetokenizeResponse:
    service.adapter(body.model)
    vocab = service.engine.model.config.vocab
    if any(token >= vocab for token in body.tokens):
        raise UserError("tokens", f"must be below {vocab}, the size of the vocabulary")
    return DetokenizeResponse(prompt=service.tokenizer.decode(body.tokens, special=True))


def router(service: Service) -> APIRouter:
    routes = APIRouter(tags=["tokens"])

    @routes.post("/tokenize", name="tokenize", responses=ERRORS)
    async def tokenize_route(body: TokenizeRequest) -> TokenizeResponse:
        """A text, or a conversation, as the model's tokens."""
        return await service.prepare(lambda: tokenize(service, body))

    @routes.post("/detokenize", name="detokenize", responses=ERRORS)
    async def detokenize_route(body: DetokenizeRequest) -> DetokenizeResponse:
        """Tokens as text."""
        return await service.prepare(lambda: detokenize(service, body))

    return routes
