"""POST /tokenize and /detokenize, and GET /tokenizer_info, as vLLM has them.

`/tokenize` takes a text, or the body of a chat as it is: the tokens are then the ones that chat would send the model.
llama.cpp's names of the fields (`content`, `add_special`, `with_pieces`) are taken too.
"""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter
from pydantic import Field

from moesaic.errors import UserError
from moesaic.serve.api.conversation import chat_prompt
from moesaic.serve.api.errors import ERRORS
from moesaic.serve.api.logprobs import BYTE_TEXT
from moesaic.serve.api.schema.chat import ChatCompletionRequest, Message
from moesaic.serve.api.schema.tokens import (
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeResponse,
    TokenizerInfo,
    TokenPiece,
)
from moesaic.serve.api.service import Service
from moesaic.serve.parsers import detect

# Of tokenizer_config.json: what the client sets itself, or where files were on another machine.
HIDDEN = ("vocab_file", "merges_file", "tokenizer_file", "name_or_path", "special_tokens_map_file", "auto_map")


class TokenizeRequest(ChatCompletionRequest):
    """Either `prompt` (or `content`, which is the same) or `messages`, with anything else that a chat has."""

    messages: Annotated[list[Message], Field(min_length=1)] | None = None  # type: ignore[assignment]
    prompt: str | Annotated[list[str], Field(min_length=1, max_length=2048)] | None = None
    content: str | None = None
    add_special: bool | None = None
    parse_special: bool | None = None
    return_token_strs: bool | None = None
    with_pieces: bool | None = None


def tokenize(service: Service, body: TokenizeRequest) -> TokenizeResponse:
    service.adapter(body.model)
    if sum(one is not None for one in (body.prompt, body.messages, body.content)) != 1:
        raise UserError("prompt", "give either prompt (or content) or messages")
    if body.parse_special is False:
        raise UserError("parse_special", "special tokens in a text are always read as such", "Leave it out.")
    if isinstance(body.prompt, list):
        return _several(service, body, body.prompt)
    if body.messages is not None:
        parser = service.parser if body.chat_template is None else detect(body.chat_template)
        _, tokens = chat_prompt(service, body, parser, body.max_completion_tokens or body.max_tokens)
    elif body.content is not None:
        tokens = service.tokenize(body.content, special=bool(body.add_special))
    else:
        assert body.prompt is not None
        tokens = service.tokenize(body.prompt, special=body.add_special_tokens is not False)
    strings = None
    if body.return_token_strs:  # as the vocabulary writes them
        strings = [service.tokenizer.fast.id_to_token(token) or "" for token in tokens]
    shown: list[int] | list[TokenPiece] = tokens
    if body.with_pieces:
        shown = [TokenPiece(id=token, piece=_piece(service, token)) for token in tokens]
    return TokenizeResponse(count=len(tokens), max_model_len=service.context, tokens=shown, token_strs=strings)


def _several(service: Service, body: TokenizeRequest, texts: list[str]) -> TokenizeResponse:
    """SGLang's form: one list for each."""
    service.check_size(sum(map(len, texts)), "characters")
    found = [service.tokenize(text, special=body.add_special_tokens is not False) for text in texts]
    return TokenizeResponse(count=[len(one) for one in found], max_model_len=service.context, tokens=found)


def _piece(service: Service, token: int) -> str | list[int]:
    text = service.token_decoder.text(token)
    return list(service.token_decoder.bytes_of(token)) if text.startswith(BYTE_TEXT) else text


def detokenize(service: Service, body: DetokenizeRequest) -> DetokenizeResponse:
    service.adapter(body.model)
    service.check_size(len(body.tokens), "tokens", "tokens")
    vocab = service.engine.model.config.vocab
    if any(token >= vocab for token in body.tokens):
        raise UserError("tokens", f"must be below {vocab}, the size of the vocabulary")
    text = service.tokenizer.decode(body.tokens, special=not body.skip_special_tokens)
    return DetokenizeResponse(prompt=text, content=text)


def tokenizer_info(service: Service) -> TokenizerInfo:
    tokenizer = service.tokenizer
    known: dict[str, Any] = {name: value for name, value in tokenizer.settings.items() if name not in HIDDEN}
    known.setdefault("tokenizer_class", "PreTrainedTokenizerFast")
    known.setdefault("model_max_length", service.context)
    known["model_max_length"] = max(int(known["model_max_length"]), service.context)
    return TokenizerInfo(**known | {"vocab_size": len(tokenizer), "chat_template": tokenizer.chat_template})


def router(service: Service) -> APIRouter:
    routes = APIRouter(tags=["tokens"])

    @routes.post("/v1/tokenize", include_in_schema=False)
    @routes.post("/tokenize", name="tokenize", responses=ERRORS)
    async def tokenize_route(body: TokenizeRequest) -> TokenizeResponse:
        """A text, or a conversation, as the model's tokens."""
        return await service.prepare(lambda: tokenize(service, body))

    @routes.post("/v1/detokenize", include_in_schema=False)
    @routes.post("/detokenize", name="detokenize", responses=ERRORS)
    async def detokenize_route(body: DetokenizeRequest) -> DetokenizeResponse:
        """Tokens as text."""
        return await service.prepare(lambda: detokenize(service, body))

    @routes.get("/tokenizer_info", name="tokenizer_info", responses=ERRORS)
    async def tokenizer_info_route() -> TokenizerInfo:
        """The tokenizer's own settings, and the chat template."""
        return tokenizer_info(service)

    return routes
