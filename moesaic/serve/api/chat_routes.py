"""POST /v1/chat/completions and /apply-template."""

from __future__ import annotations

from fastapi import APIRouter
from fastapi import Request as HttpRequest
from fastapi.responses import Response

from moesaic.serve.api.chat import Chat
from moesaic.serve.api.conversation import conversation
from moesaic.serve.api.errors import ERRORS
from moesaic.serve.api.know.finding import find_sources
from moesaic.serve.api.schema.chat import ChatCompletionRequest, ChatCompletionResponse, PromptResponse
from moesaic.serve.api.service import Service
from moesaic.serve.api.stream import STREAMS, generate


def router(service: Service) -> APIRouter:
    routes = APIRouter()

    @routes.post(
        "/v1/chat/completions", response_model=ChatCompletionResponse, responses=ERRORS | STREAMS, tags=["text"]
    )
    async def chat_completions(body: ChatCompletionRequest, request: HttpRequest) -> Response:
        """The next message of a conversation."""
        body._sources = await find_sources(service, body, service.cache_salt(request.state, body.cache_salt))
        return await generate(Chat, service, body, request)

    @routes.post("/apply-template", responses=ERRORS, tags=["tokens"])
    async def apply_template(body: ChatCompletionRequest) -> PromptResponse:
        """The prompt that the chat template makes of a conversation."""
        trust = service.settings.trust_request_chat_template
        made = await service.prepare(
            lambda: conversation(body, service.tokenizer, None, trust_template=trust), Chat.field_name
        )
        return PromptResponse(prompt=made.text)

    return routes
