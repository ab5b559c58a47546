"""POST /v1/chat/completions: the chat template makes a prompt of the messages, and the parser takes the generated text
apart into content, reasoning and tool calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from moesaic.errors import UserError
from moesaic.serve.api.chat_grammar import Speaker, message_form
from moesaic.serve.api.conversation import chat_prompt, with_plain_tools
from moesaic.serve.api.conversation import prompt_text as prompt_text
from moesaic.serve.api.know.sources import Sources, annotation, search_results
from moesaic.serve.api.knowledge import Citation
from moesaic.serve.api.logprobs import Shown, TokenDecoder, check_entries, check_given, prompt_logprobs
from moesaic.serve.api.sampling_params import engine_requests, sampling_params
from moesaic.serve.api.schema.chat import (
    AssistantMessage,
    ChatChoice,
    ChatCompletionRequest,
    ChatCompletionResponse,
    ChatTokenLogprob,
    ChoiceLogprobs,
    GeneratedFunctionCall,
    GeneratedToolCall,
)
from moesaic.serve.api.service import Service, new_id
from moesaic.serve.api.stream import Generation
from moesaic.serve.api.token_ids import TokenIds
from moesaic.serve.core.request import Output, Request
from moesaic.serve.parsers import (
    CallArguments,
    CallBroken,
    CallEnded,
    CallStarted,
    Content,
    Event,
    EventReader,
    Reasoning,
    collect,
    detect,
)

FIELDS = {"prompt": "messages", "stop_tokens": "stop_token_ids"}  # of the engine, and what clients call them


class Chat(Generation):
    """`choices` are by the number of their request."""

    id_prefix = "chatcmpl-"
    chunk_object = "chat.completion.chunk"

    def __init__(
        self,
        service: Service,
        body: ChatCompletionRequest,
        requests: Sequence[Request],
        choices: Sequence[ChoiceBuilder],
    ) -> None:
        super().__init__(service, body, requests)
        self.choices = {request.number: choice for request, choice in zip(requests, choices, strict=True)}

    @classmethod
    def prepare(cls, service: Service, body: ChatCompletionRequest, salt: str, before: Sequence[int] = ()) -> Chat:
        """`before` are tokens that stand before the conversation's own."""
        count = body.n or 1
        service.adapter(body.model)
        service.check_count(count)
        legacy, body = body.functions is not None, with_plain_tools(body)
        parser = service.parser if body.chat_template is None else detect(body.chat_template)
        max_tokens = body.max_completion_tokens or body.max_tokens
        sources: Sources | None = body._sources
        if sources is not None:
            body = sources.in_prompt(service, body, max_tokens)
        begun, prompt = chat_prompt(service, body, parser, max_tokens)
        if sources is not None and max_tokens is not None:  # the passages take of its room
            max_tokens = max(1, min(max_tokens, service.engine.max_length - len(prompt)))
        text = begun.text
        apart = body.separate_reasoning is not False and body.reasoning_format != "none"
        reading = parser if apart else replace(parser, reasoning=False)
        form = message_form(body, text, Speaker(reading, service.tokenizer, service.special_tokens, begun.prefill))
        if body.top_logprobs is not None and not body.logprobs:
            raise UserError("top_logprobs", "needs logprobs: true")
        top = (body.top_logprobs or 0) if body.logprobs else None
        sampling = sampling_params(
            service,
            body,
            max_tokens=max_tokens,
            logprobs=top,
            prompt_logprobs=body.prompt_logprobs,
            logprob_tokens=check_given(body, top, max_tokens),
            grammar=form.grammar,
        )
        sampling = replace(sampling, markers=parser.markers(service.tokenizer, calls=bool(body.function_tools)))
        prompt = [*before, *prompt]
        check_entries(body, sampling, len(prompt), service.engine.model.config.vocab)
        requests = engine_requests(service, body, prompt, sampling, salt=salt, count=count)
        style = ChoiceStyle(
            None if top is None else Shown.of(body, top),
            parallel=body.parallel_tool_calls is not False,
            legacy=legacy,
            reasoning=body.include_reasoning is not False,
            call_id=parser.call_id,
            calls_before=begun.calls,
            echoed=_echoed(body, begun.prefill),
            sources=sources,
        )
        choices = [
            ChoiceBuilder(index, form.reader(), service.token_decoder, style, TokenIds(request, body))
            for index, request in enumerate(requests)
        ]
        return cls(service, body, requests, choices)

    @staticmethod
    def field_name(place: str) -> str:
        return FIELDS.get(place, place)

    @property
    def reasoning_tokens(self) -> int:
        return sum(choice.reasoning_tokens for choice in self.choices.values())

    @property
    def sources(self) -> Sources | None:
        return next(iter(self.choices.values())).style.sources

    def heavy(self, output: Output) -> bool:
        cites = output.finish_reason is not None and self.sources is not None
        return cites or super().heavy(output)

    def first_fields(self) -> dict[str, Any]:
        fields: dict[str, Any] = {}
        if self.body.return_token_ids:
            fields["prompt_token_ids"] = list(self.requests[0].prompt)
        if self.sources is not None:
            fields["search_results"] = search_results(self.sources)
        return fields

    def first_choices(self) -> list[dict[str, Any]]:
        return [
            chunk_choice(choice.index, {"role": "assistant", "content": choice.style.echoed})
            for choice in self.choices.values()
        ]

    def push(self, output: Output) -> list[dict[str, Any]]:
        choice = self.choices[output.request.number]
        events, tokens = choice.push(output)
        delta = choice.delta(events)
        chunks = []
        if delta or tokens:
            logprobs = {"content": [token.model_dump() for token in tokens], "refusal": None} if tokens else None
            chunks.append(chunk_choice(choice.index, delta, logprobs=logprobs, **choice.ids.chunk()))
        if choice.citations and choice.finish_reason is not None:
            chunks.append(chunk_choice(choice.index, {"annotations": choice.annotations()}))
        if choice.finish_reason is not None:
            chunks.append(chunk_choice(choice.index, {}, finish_reason=choice.finish_reason, **choice.ids.chunk()))
        return chunks

    def response(self) -> ChatCompletionResponse:
        response = ChatCompletionResponse(
            id=self.id,
            created=self.created,
            model=self.model,
            choices=[choice.whole() for choice in self.choices.values()],
            usage=self.usage(),
            timings=self.timings(),
            **self.first_fields(),
        )
        response.prompt_logprobs = prompt_logprobs(self.requests[0], self.service.token_decoder)  # as in completions
        return response


def chunk_choice(index: int, delta: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None} | more


def _echoed(body: ChatCompletionRequest, prefill: str) -> str:
    """What stands before the answer, as vLLM has it: the last message, if it is the assistant's."""
    if not body.echo or body.messages[-1].role != "assistant":
        return ""
    content = body.messages[-1].content or ""
    return prefill or (content if isinstance(content, str) else "\n".join(part.text for part in content))


@dataclass(frozen=True)
class ChoiceStyle:
    """How choices are shown. What is `shown` of log-probabilities is reported with each token; None: nothing is.
    Without `parallel` tool calls, those after the first are left out. `legacy`: a call is a function_call."""

    shown: Shown | None = None
    parallel: bool = True
    legacy: bool = False
    reasoning: bool = True
    call_id: Callable[[str, int], str | None] = lambda name, number: None
    calls_before: int = 0
    echoed: str = ""
    sources: Sources | None = None


@dataclass
class ChoiceBuilder:
    """One choice as it is generated."""

    index: int
    reader: EventReader
    decoder: TokenDecoder
    style: ChoiceStyle
    ids: TokenIds
    events: list[Event] = field(default_factory=list)
    logprobs: list[ChatTokenLogprob] = field(default_factory=list)
    call_ids: dict[int, str] = field(default_factory=dict)
    broken: set[int] = field(default_factory=set)  # calls that turned out to be none; they may have been streamed
    first_call: int | None = None  # that has ended
    reasoning_tokens: int = 0
    finish_reason: str | None = None
    citations: list[Citation] = field(default_factory=list)

    def push(self, output: Output) -> tuple[list[Event], list[ChatTokenLogprob]]:
        """The events and the tokens' log-probabilities that an output adds."""
        events = self.reader.push(output.text) if output.text else []
        if self.reader.state == "reasoning":
            self.reasoning_tokens += len(output.tokens)
        if output.finish_reason is not None:
            events += self.reader.finish()
        if not self.style.reasoning:
            events = [event for event in events if not isinstance(event, Reasoning)]
        if not self.style.parallel:
            events = [event for event in events if self._is_first(event)]
        for event in events:
            match event:
                case CallStarted(call, name, written):
                    number = self.style.calls_before + len(self.call_ids)
                    self.call_ids[call] = written or self.style.call_id(name, number) or new_id("call_")
                case CallBroken(call):
                    self.broken.add(call)
        shown = self.style.shown
        logprobs = [self.decoder.logprob(one, shown) for one in output.logprobs] if shown is not None else []
        self.ids.add(output.tokens)
        self.events += events
        self.logprobs += logprobs
        if output.finish_reason is not None:
            called = self.call_ids.keys() - self.broken
            ended = "function_call" if self.style.legacy else "tool_calls"
            self.finish_reason = ended if output.finish_reason == "stop" and called else output.finish_reason
            if self.style.sources is not None:
                self.citations = self.style.sources.citations(self.style.echoed + collect(self.events).content)
        return events, logprobs

    def _is_first(self, event: Event) -> bool:
        """Whether an event is not one of a call after one that has ended."""
        if isinstance(event, CallEnded) and self.first_call is None:
            self.first_call = event.call
        return isinstance(event, Content | Reasoning) or self.first_call is None or event.call <= self.first_call

    def whole(self) -> ChatChoice:
        message = collect(self.events)
        ids = [name for number, name in self.call_ids.items() if number not in self.broken]
        calls = [
            GeneratedToolCall(id=name, function=GeneratedFunctionCall(name=call.name, arguments=call.arguments))
            for name, call in zip(ids, message.calls, strict=True)
        ]
        return ChatChoice(
            index=self.index,
            message=AssistantMessage(
                content=self.style.echoed + message.content or (None if calls else ""),
                annotations=None if self.style.sources is None else self.annotations(),
                reasoning_content=message.reasoning or None,
                tool_calls=None if self.style.legacy else calls or None,
                function_call=calls[0].function if self.style.legacy and calls else None,
            ),
            logprobs=ChoiceLogprobs(content=self.logprobs) if self.style.shown is not None else None,
            finish_reason=self.finish_reason or "stop",
            **self.ids.whole(),
        )

    def annotations(self) -> list[dict[str, Any]]:
        assert self.style.sources is not None
        return [annotation(one, self.style.sources.passages[one.number - 1]) for one in self.citations]

    def delta(self, events: list[Event]) -> dict[str, Any]:
        """Some events as the `delta` of a chunk."""
        delta: dict[str, Any] = {}
        calls: dict[int, dict[str, Any]] = {}  # one entry each: many clients look no further than the first
        for event in events:
            match event:
                case Content(text):
                    delta["content"] = delta.get("content", "") + text
                case Reasoning(text):
                    delta["reasoning_content"] = delta.get("reasoning_content", "") + text
                case CallStarted(call, name):
                    function = {"name": name, "arguments": ""}
                    calls[call] = {"index": call, "id": self.call_ids[call], "type": "function", "function": function}
                case CallArguments(call, text):
                    piece = calls.setdefault(call, {"index": call, "function": {"arguments": ""}})
                    piece["function"]["arguments"] += text
        if calls and self.style.legacy:
            pieces = [call["function"] for call in calls.values()]
            begun = {"name": pieces[0]["name"]} if "name" in pieces[0] else {}
            delta["function_call"] = begun | {"arguments": "".join(piece["arguments"] for piece in pieces)}
        elif calls:
            delta["tool_calls"] = list(calls.values())
        return delta
