"""How well two texts fit: by the cosine of their embeddings; generatively, by how much likelier a model that was asked
about the pair answers yes than no (as Qwen3-Reranker was trained to); or by a cross-encoder, which reads both together
and has a head for the answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from moesaic.errors import UserError
from moesaic.model.config import Classifier
from moesaic.serve.api import vectors
from moesaic.serve.api.chat import prompt_text
from moesaic.serve.api.errors import translated
from moesaic.serve.api.label_scores import probabilities
from moesaic.serve.api.prompts import tokens_of
from moesaic.serve.api.schema.chat import ChatCompletionRequest
from moesaic.serve.api.schema.embeddings import EmbeddingUsage, VectorOptions
from moesaic.serve.api.schema.scoring import ScoringRequest
from moesaic.serve.api.service import Service
from moesaic.serve.core.encoder_engine import EncoderEngine
from moesaic.serve.core.request import Request, Sampling

LABELS = ("yes", "no")
# The form Qwen3-Reranker was trained on: these words are part of the model.
SYSTEM = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct provided. "
    'Note that the answer can only be "yes" or "no".'
)
INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"


@dataclass(frozen=True)
class Text:
    """A text and its place in the request, which errors name."""

    place: str
    text: str


Pair = tuple[Text, Text]  # a query and a document


class Scorer(Protocol):
    """The pairs of one request, prepared; `requests` are run, and then there are scores, one for each pair."""

    requests: list[Request]

    def scores(self) -> list[float]: ...

    def usage(self) -> EmbeddingUsage: ...


def scorer(service: Service, pairs: Sequence[Pair], body: ScoringRequest, salt: str) -> Scorer:
    encoder = service.engine.model.config.encoder
    if encoder is not None and encoder.classifier is not None and encoder.classifier.labels and body.scoring is None:
        return CrossEncoderScorer(service, pairs, body, salt, encoder.classifier)
    kind = body.scoring or service.settings.scoring
    if kind == "generative":
        return GenerativeScorer(service, pairs, body, salt)
    for name in ("labels", "instruction", "chat_template_kwargs"):
        if getattr(body, name):
            raise UserError(name, "is for generative scoring", 'Add "scoring": "generative", or leave it out.')
    return CosineScorer(service, pairs, body, salt)


class CosineScorer:
    """Each text is embedded once, however many pairs it is in."""

    def __init__(self, service: Service, pairs: Sequence[Pair], body: ScoringRequest, salt: str) -> None:
        vectors.check_embeds(service)
        pooling = body.pooling or service.pooling
        if pooling == "none":
            raise UserError("pooling", "none is one vector for each token, and texts are compared by one each")
        cuts = (body.max_tokens_per_query, body.max_tokens_per_doc)
        found: dict[tuple[str, int | None], int] = {}
        texts: list[tuple[str, str | Sequence[int]]] = []
        self.pairs: list[list[int]] = []  # numbers of their requests
        for pair in pairs:
            self.pairs.append([])
            for one, cut in zip(pair, cuts):
                if (key := (one.text, cut or None)) not in found:
                    found[key] = len(texts)
                    text: str | Sequence[int] = one.text
                    if cut:
                        text = tokens_of(service, one.text, cut, left=False, special=True)
                    texts.append((one.place, text))
                self.pairs[-1].append(found[key])
        self.requests = vectors.embedding_requests(service, texts, body, salt, pooling)

    def scores(self) -> list[float]:
        found = [vectors.vector(request, VectorOptions()) for request in self.requests]
        return [float(found[one] @ found[two]) for one, two in self.pairs]

    def usage(self) -> EmbeddingUsage:
        return vectors.usage(self.requests)


class GenerativeScorer:
    """The score is how likely the one of two tokens is that says yes, as if there were no others."""

    def __init__(self, service: Service, pairs: Sequence[Pair], body: ScoringRequest, salt: str) -> None:
        if body.pooling is not None:
            raise UserError("pooling", "is for embeddings", 'Add "scoring": "cosine", or leave it out.')
        self.labels = [_one_token(service, word) for word in body.labels or LABELS]
        if len(set(self.labels)) < len(self.labels):
            raise UserError("labels", "must be two different tokens")
        sampling = Sampling(max_tokens=1, temperature=0.0, logprob_tokens=tuple(self.labels))
        texts: vectors.Texts = [(pair[1].place, self._prompt(service, pair, body)) for pair in pairs]
        self.requests = vectors.pooling_requests(service, texts, body, salt, sampling)

    def _prompt(self, service: Service, pair: Pair, body: ScoringRequest) -> list[int]:
        query, document = pair
        extra: dict[str, Any] = {"enable_thinking": False} | (body.chat_template_kwargs or {})
        instruction = extra.pop("instruction", None) or body.instruction or INSTRUCTION
        cut = [
            service.tokenizer.decode(tokens_of(service, one.text, limit, left=False, special=False))
            if limit
            else one.text
            for one, limit in ((query, body.max_tokens_per_query), (document, body.max_tokens_per_doc))
        ]
        asked = f"<Instruct>: {instruction}\n<Query>: {cut[0]}\n<Document>: {cut[1]}"
        messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": asked}]
        fields: dict[str, Any] = {"messages": messages, "chat_template_kwargs": extra}
        text = prompt_text(translated(ChatCompletionRequest, fields), service.tokenizer)
        try:
            return service.tokenize(text, special=False)
        except UserError as error:
            error.place = document.place
            raise

    def scores(self) -> list[float]:
        return [probabilities(request, self.labels, among_labels=True)[0] for request in self.requests]

    def usage(self) -> EmbeddingUsage:
        return vectors.usage(self.requests)


class CrossEncoderScorer:
    """The one logit of the head, as sentence-transformers' CrossEncoder reports it: through a sigmoid, or as it is."""

    def __init__(
        self, service: Service, pairs: Sequence[Pair], body: ScoringRequest, salt: str, head: Classifier
    ) -> None:
        if head.labels != 1:
            problem = f"has {head.labels} labels, and a score is one number"
            raise UserError("model", problem, 'Take a model with one label, or ask for "scoring": "cosine".')
        for name in ("pooling", "labels", "instruction", "chat_template_kwargs"):
            if getattr(body, name):
                raise UserError(name, "is not for cross-encoders", "Leave it out.")
        engine = service.engine
        assert isinstance(engine, EncoderEngine)
        self.score = head.score
        limits = (body.max_tokens_per_query, body.max_tokens_per_doc)
        texts = []
        for pair in pairs:
            for one in pair:
                service.check_size(len(one.text), "characters", one.place)
            texts.append(tuple(_cut(service, one.text, limit) for one, limit in zip(pair, limits, strict=True)))
        options: dict[str, Any] = {"salt": salt, "priority": body.priority or 0, "embed": True, "classify": True}
        service.adapter(body.model)  # which there is none of, but a wrong name is refused
        tokens = engine.encoding.pairs([(one, two) for one, two in texts])
        vectors.check_total(sum(len(each.ids) for each in tokens), "documents")
        self.requests = [
            engine.request(each.ids, Sampling(max_tokens=1), token_types=each.types, **options) for each in tokens
        ]

    def scores(self) -> list[float]:
        logits = torch.stack([request.hidden_D[0] for request in self.requests if request.hidden_D is not None])
        found: list[float] = (logits.sigmoid() if self.score == "sigmoid" else logits).tolist()
        return found

    def usage(self) -> EmbeddingUsage:
        return vectors.usage(self.requests)


def _cut(service: Service, text: str, limit: int | None) -> str:
    if not limit:
        return text
    return service.tokenizer.decode(tokens_of(service, text, limit, left=False, special=False))


def _one_token(service: Service, word: str) -> int:
    tokens = service.tokenizer.encode(word, special=False)
    if len(tokens) != 1:
        problem = f"this model's tokenizer has no single token for {word!r}"
        raise UserError("labels", problem, 'Give two that are one token each, or ask for "cosine" scoring.')
    return tokens[0]
