"""Whole texts through a model at once, without a KV cache: flat batches of texts of about one length, no padding.

for number, hidden_TD in encoded(model, [[101, 7592, 102], [101, 102]]): ...
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tokenizers import Tokenizer as FastTokenizer
from torch import Tensor

from moesaic.errors import UserError
from moesaic.json_files import object_or_empty
from moesaic.model.config import ModelConfig
from moesaic.model.layout import Layout
from moesaic.model.tokenizer import Tokenizer
from moesaic.model.transformer import Model

# Tokens of a batch, where no single text has more. On a CPU the native call divides it further, to fit caches.
CPU_TOKENS, GPU_TOKENS = 4096, 32_768
LEAST_LENGTH = 8  # a file that asks for shorter texts is mistaken
SETTINGS, PROMPTS = "sentence_bert_config.json", "config_sentence_transformers.json"


@dataclass(frozen=True)
class Tokens:
    """A text, or a pair of them, of which `types` says which token is of which."""

    ids: Sequence[int]
    types: Sequence[int] | None = None


@dataclass(frozen=True)
class EncodingSettings:
    """What sentence-transformers notes beside a model: how long a text may be, and what stands before it."""

    max_length: int
    lower_case: bool = False
    query_prompt: str = ""
    passage_prompt: str = ""

    @classmethod
    def of(cls, config: ModelConfig, tokenizer: Tokenizer) -> EncodingSettings:
        notes = object_or_empty(tokenizer.files.get(SETTINGS))
        told = (notes.get("max_seq_length"), tokenizer.settings.get("model_max_length"))
        limits = [limit for limit in told if isinstance(limit, int) and limit >= LEAST_LENGTH]
        settings = cls(min(config.context, *limits) if limits else config.context, notes.get("do_lower_case") is True)
        content = object_or_empty(tokenizer.files.get(PROMPTS))
        prompts = content.get("prompts")
        if not isinstance(prompts, dict):
            return settings
        names = {"query_prompt": ("query",), "passage_prompt": ("document", "passage", "corpus")}
        found: dict[str, Any] = {
            field: next((text for name in wanted if (text := prompts.get(name)) and isinstance(text, str)), "")
            for field, wanted in names.items()
        }
        return dataclasses.replace(settings, **found)


class Encoding:
    """A model's tokenizer, which cuts texts to the length that the model was made for."""

    def __init__(self, config: ModelConfig, tokenizer: Tokenizer) -> None:
        self.settings = EncodingSettings.of(config, tokenizer)
        self._fast = FastTokenizer.from_str(tokenizer.files["tokenizer.json"].decode())
        self._fast.no_padding()
        self._fast.enable_truncation(self.settings.max_length)

    def texts(self, texts: Sequence[str], prompt: str = "") -> list[Tokens]:
        return [Tokens(found.ids) for found in self._encoded([self._lower(prompt + text) for text in texts])]

    def pairs(self, pairs: Sequence[tuple[str, str]]) -> list[Tokens]:
        """As cross-encoders read them; the longer text of a pair is cut first."""
        lowered = [(self._lower(one), self._lower(two)) for one, two in pairs]
        return [Tokens(found.ids, found.type_ids) for found in self._encoded(lowered)]

    def _lower(self, text: str) -> str:
        return text.lower() if self.settings.lower_case else text

    def _encoded(self, inputs: Sequence[Any]) -> list[Any]:
        try:
            return list(self._fast.encode_batch_fast(inputs))
        except TypeError:
            raise UserError("text", "is not Unicode (it holds half of a surrogate pair)", "Correct it.") from None


def batches(lengths: Sequence[int], most: int) -> Iterator[list[int]]:
    """Numbers of texts, longest first; those of a batch have at most so many tokens together, unless one has more."""
    batch: list[int] = []
    total = 0
    for number in sorted(range(len(lengths)), key=lambda number: (-lengths[number], number)):
        if batch and total + lengths[number] > most:
            yield batch
            batch, total = [], 0
        batch.append(number)
        total += lengths[number]
    if batch:
        yield batch


@torch.inference_mode()
def encoded(model: Model, texts: Sequence[Tokens]) -> Iterator[tuple[int, Tensor]]:
    """The number of every text and the hidden states of its tokens, batch by batch. On a CPU with native kernels they
    are the same to the bit whatever else is in a text's batch."""
    most = CPU_TOKENS if model.device.type == "cpu" else GPU_TOKENS
    for batch in batches([len(text.ids) for text in texts], most):
        layout = Layout(
            [len(texts[number].ids) for number in batch], token_types=_types(model, texts, batch), device=model.device
        )
        tokens_T = torch.tensor([token for number in batch for token in texts[number].ids], dtype=torch.int64)
        hidden_TD = model(tokens_T.to(model.device), layout)
        for number, span in zip(batch, layout.spans, strict=True):
            yield number, hidden_TD[span.start : span.stop]


def _types(model: Model, texts: Sequence[Tokens], batch: Sequence[int]) -> Tensor | None:
    encoder = model.config.encoder
    if encoder is None or not encoder.token_types or all(texts[number].types is None for number in batch):
        return None
    kinds = [kind for number in batch for kind in (texts[number].types or [0] * len(texts[number].ids))]
    return torch.tensor(kinds, dtype=torch.int64).clamp_(max=encoder.token_types - 1).to(model.device)
