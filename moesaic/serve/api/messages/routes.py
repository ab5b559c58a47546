"""POST /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

from fastapi import APIRouter
from fastapi import Request as HttpRequest
from fastapi.responses import Response

from moesaic.serve.api.conversation import conversation
from moesaic.serve.api.know.finding import find_sources
from moesaic.serve.api.messages.generation import Messages
from moesaic.serve.api.messages.threads import resume
from moesaic.serve.api.messages.translate import as_chat
from moesaic.serve.api.schema.know import FileSearchTool
from moesaic.serve.api.schema.messages import (
    MESSAGES_ERRORS,
    CountTokensRequest,
    MessageResponse,
    MessagesRequest,
    TokenCount,
)
from moesaic.serve.api.service import Service
from moesaic.serve.api.stream import STREAMS, generate


def count_tokens(service: Service, body: CountTokensRequest) -> TokenCount:
    """Of the very prompt that the model would be given."""
    service.adapter(body.model)
    prompt = conversation(as_chat(body), service.tokenizer, service.parser).text
    return TokenCount(input_tokens=len(service.tokenize(prompt, special=False)))


def router(service: Service) -> APIRouter:
    routes = APIRouter(tags=["text"])

    @routes.post("/v1/messages", response_model=MessageResponse, responses=MESSAGES_ERRORS | STREAMS)
    async def messages(body: MessagesRequest, request: HttpRequest) -> Response:
        """The next message of a conversation, in the form of Anthropic's API."""
        whole = resume(service.responses, body, getattr(request.state, "owner", ""))
        if any(isinstance(tool, FileSearchTool) for tool in whole.tools or ()):
            salt = service.cache_salt(request.state, whole.cache_salt)
            whole._sources = await find_sources(service, as_chat(whole), salt)
        return await generate(Messages, service, whole, request)

    @routes.post("/v1/messages/count_tokens", name="count_tokens", responses=MESSAGES_ERRORS)
    async def count_tokens_route(body: CountTokensRequest) -> TokenCount:
        """How many tokens a request would have."""
        return await service.prepare(lambda: count_tokens(service, body), Messages.field_name)

    return routes
