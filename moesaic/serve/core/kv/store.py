"""The pages of the KV cache as units that any layer and head of a compact request may use."""

from __future__ import annotations

import string
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from moesaic.errors import UserError
from moesaic.model.config import GroupedQuery
from moesaic.model.layout import PagedCache
from moesaic.model.transformer import Model
from moesaic.serve.core.kv.compact import CompactRequest
from moesaic.serve.core.kv.encoding import Encoding
from moesaic.serve.core.kv.windows import WITHOUT, Windows
from moesaic.serve.core.kv_policies import NEVER, KVPolicy, TokenKinds
from moesaic.serve.core.request import Request

if TYPE_CHECKING:
    from moesaic.serve.core.drafters import Drafter


def takes(size: int, encoding: Encoding | None) -> bool:
    """Whether native code reads rows of so many numbers, and blocks of this encoding (`kernels/native/retained.c`)."""
    if encoding is None:
        return True
    return size % 8 == 0 and encoding.width(size) % 8 == 0 and encoding.values == "token"


class Store:
    """A page holds `page_size` rows of every layer and key head. A unit is those of one layer and head: all layers are
    of one shape, so a request may put rows of any of its heads there."""

    def __init__(self, model: Model, cache: PagedCache, policy: KVPolicy) -> None:
        attention = model.config.attention
        remedy = WITHOUT
        if not isinstance(attention, GroupedQuery):
            raise UserError("--kv-policy", "latent attention caches no keys and values that could be pruned", remedy)
        if attention.sinks:
            raise UserError("--kv-policy", "the model's heads have learned sinks, which no policy here weighs", remedy)
        if cache.layers and next(iter(cache.layers[0].values())).itemsize == 1:
            raise UserError("--kv-policy", "quantizes the cache by itself, and cannot be combined with float8", remedy)
        keys, values = cache.whole.get("keys"), cache.whole.get("values")
        if keys is None or values is None:
            raise UserError("--kv-policy", "the model's layers differ in the shape of their KV cache", remedy)
        self.model, self.policy, self.windows = model, policy, Windows(model.config.layers)
        self.layers, self.heads, self.size = len(model.config.layers), attention.kv_heads, attention.head_size
        self.page_size, self.pages = cache.page_size, cache.pages
        self.query_heads = attention.heads
        self.units = len(cache.layers) * self.heads  # in a page
        self.cache = {"keys": keys[0], "values": values[0]}  # where native code begins to count rows
        self.device = keys.device
        # One flat row index reaches every unit; the same memory as numbers, and as bytes for what is quantized.
        self.keys_XC, self.values_XC = keys.view(-1, self.size), values.view(-1, self.size)
        self.keys_bytes, self.values_bytes = self.keys_XC.view(torch.uint8), self.values_XC.view(torch.uint8)
        self.row_bytes = self.size * keys.itemsize
        self.block_rows = policy.encoding.rows(self.size, self.row_bytes) if policy.encoding is not None else 0
        self.writes_ahead = keys.is_cuda and policy.encoding is None  # rows of tokens that may follow
        self.is_native = keys.is_cpu and keys.dtype == torch.float32 and takes(self.size, policy.encoding)

    def check(self, request: Request) -> None:
        """Refuse what pruning would falsify."""
        reads_prompt = request.embed or request.sampling.prompt_logprobs is not None
        if reads_prompt and self.policy.due(0, len(request.prompt)) < len(request.prompt):
            raise UserError(
                "prompt_logprobs, embeddings",
                "this engine prunes its KV cache during prefill, and would answer for what is left of the prompt",
                "Ask an engine without such a --kv-policy.",
            )

    def begin(self, request: Request) -> CompactRequest:
        return CompactRequest(self, len(request.prompt))

    @cached_property
    def owner_X(self) -> Tensor:
        """A number for every row of the cache, for whoever packs rows; memory that is never written costs nothing."""
        return torch.empty(len(self.keys_XC), dtype=torch.int32, device=self.device)

    @cached_property
    def kinds(self) -> TokenKinds:
        """Read off the tokenizer when a policy first uses it."""
        vocab, tokenizer = self.model.config.vocab, self.model.tokenizer
        special, punctuation = torch.zeros(vocab, dtype=torch.bool), torch.zeros(vocab, dtype=torch.bool)
        if tokenizer is not None:
            added = tokenizer.fast.get_added_tokens_decoder()
            for number in range(min(vocab, len(tokenizer))):
                if number in added:
                    special[number] = added[number].special
                    continue
                text = tokenizer.fast.decode([number]).strip()
                punctuation[number] = bool(text) and all(letter in string.punctuation for letter in text)
        return TokenKinds(special.to(self.device), punctuation.to(self.device))


def store_for(model: Model, cache: PagedCache, policy: KVPolicy | None, drafter: Drafter | None) -> Store | None:
    """None without a policy."""
    if policy is None:
        return None
    if drafter is not None:
        refuse_drafts(policy)
        if len(model.mtp):
            problem = "cannot be combined with --drafter: the model's MTP layers keep rows in pages that a policy packs"
            raise UserError("--kv-policy", problem, "Leave one of them out.")
    return Store(model, cache, policy)


def refuse_drafts(policy: KVPolicy) -> None:
    """Rejected draft tokens are dropped with their rows, but what they have added to scores stays."""
    due = policy.due(1, 1)
    if due != NEVER and policy.score_from(due, 1) < due:
        name = type(policy).__name__.lower()
        problem = f"{name} cannot be combined with --drafter: it scores the attention of generated tokens, rejected too"
        remedy = "Leave one of them out, take a policy that scores the prompt alone (snapkv), or every=0."
        raise UserError("--kv-policy", problem, remedy)
