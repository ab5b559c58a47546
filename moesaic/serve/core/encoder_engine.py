"""The engine of an encoder: whole texts at once, no KV cache, no tokens. It takes the same requests as any engine, of
those that ask for hidden states; a cross-encoder's also ask for its scores."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import torch

from moesaic.errors import UserError
from moesaic.model.layout import PagedCache
from moesaic.model.transformer import Model
from moesaic.serve.core.encoding import Encoding, Tokens, encoded
from moesaic.serve.core.engine import Engine
from moesaic.serve.core.pooling import add_rows, pooled
from moesaic.serve.core.request import Output, Request

STEP_TOKENS = 8192  # of one step, between which new requests are looked at
UNBOUNDED = 1 << 60
NO_TEMPLATE = "the model is an encoder: it reads texts and writes none"


def engine_for(model: Model, **options: Any) -> Engine:
    return Engine(model, **options) if model.config.encoder is None else EncoderEngine(model, **options)


class EncoderEngine(Engine):
    generates: ClassVar[bool] = False

    def __init__(self, model: Model, **options: Any) -> None:
        for name in ("drafter", "kv_policy", "frequency"):
            if options.get(name) is not None:
                problem = "is for models that generate, and this one is an encoder"
                raise UserError(f"--{name.replace('_', '-')}", problem, "Leave it out.")
        if model.tokenizer is None:
            raise UserError("model", "has no tokenizer", "Name a directory that holds tokenizer.json.")
        model.tokenizer.no_template = NO_TEMPLATE
        self.encoding = Encoding(model.config, model.tokenizer)
        super().__init__(model, **(options | {"cache_bytes": UNBOUNDED, "cache_dtype": None, "tiers": None}))

    def new_cache(self, pages: int, page_size: int, dtype: torch.dtype, sequences: int) -> PagedCache:
        return PagedCache(self.model.cache_shapes(), pages, page_size, dtype, "meta")  # nothing is ever in it

    @property
    def max_length(self) -> int:
        return self.encoding.settings.max_length

    def load_adapter(self, name: str, path: str | Path) -> None:
        raise UserError("adapter", "an encoder takes no LoRA adapters", "Serve it without them.")

    def warm_up(self) -> None:
        """There is nothing to compile ahead."""

    def add(self, request: Request) -> None:
        self.scheduler.requests[request.number] = request

    @torch.inference_mode()
    def step(self) -> list[Output]:
        self.read_inbox()
        if self.paused or not self.scheduler.requests:
            return []
        start, tokens = self.clock(), 0
        batch: list[Request] = []
        for request in sorted(self.scheduler.requests.values(), key=lambda request: request.urgency):
            if batch and tokens + len(request.prompt) > STEP_TOKENS:
                break
            batch.append(request)
            tokens += len(request.prompt)
        texts = [Tokens(request.prompt, request.token_types) for request in batch]
        for number, hidden_TD in encoded(self.model, texts):
            self._finish_text(batch[number], hidden_TD)
        self.counts.steps += 1
        self.counts.prompt_tokens += tokens
        outputs = [self.record_output(Output(request, [], "", []), self.version) for request in batch]
        for request in batch:
            self.retire(request)
        self.counts.busy_seconds += self.clock() - start
        return outputs

    def _finish_text(self, request: Request, hidden_TD: torch.Tensor) -> None:
        head = self.model.classifier
        if request.classify and head is not None:
            pooling = head.shape.pooling
            kept_D = pooled(pooling, add_rows(pooling, None, hidden_TD), len(hidden_TD))
            request.hidden_D = head(kept_D[None].to(self.model.dtype), self.model.ops)[0].float()
        else:
            request.hidden_D = add_rows(request.pooling, None, hidden_TD)
        request.computed = len(request.prompt)
        request.finish_reason = "stop"
