"""POST /tokenize and /detokenize."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter
from pydantic import BaseModel, Field

from moesaic.errors import UserError
from moesaic.serve.api.conversation import prompt_text
from moesaic.serve.api.openapi import ERRORS
from moesaic.serve.api.schema.chat import ChatRequest, Message, Tool
from moesaic.serve.api.schema.sampling import Form, Token
from moesaic.serve.api.service import Service


class TokenizeRequest(Form):
    """Either `prompt` or `messages`."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1)] | None = None
    tools: list[Tool] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool = True
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class TokenizeAnswer(BaseModel):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeRequest(Form):
    model: str | None = None
    tokens: list[Token]


class DetokenizeAnswer(BaseModel):
    prompt: str


def tokenize(service: Service, form: TokenizeRequest) -> TokenizeAnswer:
    service.adapter(form.model)
    tokenizer = service.tokenizer
    if (form.prompt is None) == (form.messages is None):
        raise UserError("prompt", "this or messages is needed, and not both")
    if form.messages is not None:
        chat = ChatRequest(
            messages=form.messages,
            tools=form.tools,
            chat_template_kwargs=form.chat_template_kwargs,
            add_generation_prompt=form.add_generation_prompt,
        )
        tokens = tokenizer.encode(prompt_text(chat, tokenizer), special=bool(form.add_special_tokens))
    else:
        assert form.prompt is not None
        tokens = tokenizer.encode(form.prompt, special=form.add_special_tokens is not False)
    return TokenizeAnswer(
        count=len(tokens),
        max_model_len=service.context,
        tokens=tokens,
        token_strs=[service.texts.text(token) for token in tokens] if form.return_token_strs else None,
    )


def detokenize(service: Service, form: DetokenizeRequest) -> DetokenizeAnswer:
    service.adapter(form.model)
    vocab = service.engine.model.config.vocab
    if any(token >= vocab for token in form.tokens):
        raise UserError("tokens", f"hold a token outside the vocabulary of {vocab}")
    return DetokenizeAnswer(prompt=service.tokenizer.decode(form.tokens, special=True))


def router(service: Service) -> APIRouter:
    routes = APIRouter(tags=["tokens"])

    @routes.post("/tokenize", name="tokenize", responses=ERRORS)
    async def tokenize_route(form: TokenizeRequest) -> TokenizeAnswer:
        """A text, or a conversation, as the model's tokens."""
        return await service.prepare(lambda: tokenize(service, form))

    @routes.post("/detokenize", name="detokenize", responses=ERRORS)
    async def detokenize_route(form: DetokenizeRequest) -> DetokenizeAnswer:
        """Tokens as text."""
        return await service.prepare(lambda: detokenize(service, form))

    return routes
