"""Generalized cross-attention (Guo, Chen 2025): layers that read an explicit knowledge base, which they all share.

    relu(query(x) key(e) / sqrt(C) + threshold(e)) value(e), summed over the entries e of the base

An entry is a fact as text: the embeddings of its first tokens side by side, normed. Query, key, value and threshold are
a layer's own. With a fixed base this is a feed-forward network whose neurons are the entries (`closed_form`), so what
an ordinary model keeps in that network's weights can here be read, exchanged and added to: the facts of a model
directory are the lines of its knowledge.txt (`moesaic convert DIR OUT --knowledge FILE`). Training gives every sequence
facts of its own (`train/objectives/knowledge.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from moesaic.errors import UserError
from moesaic.kernels.interface import Kernels
from moesaic.model.config import Knowledge, ModelConfig, Reading
from moesaic.model.formats.checkpoint import KNOWLEDGE
from moesaic.model.layout import Layout
from moesaic.model.linear import Linear, Norm

if TYPE_CHECKING:
    from moesaic.model.context import ForwardContext
    from moesaic.model.tokenizer import Tokenizer

NOTHING = -1  # behind the end of a short fact


class Facts:
    """What the layers of one forward read: (M, X), each entry for all sequences or for one."""

    def __init__(self, make: Callable[[], Tensor], owner_M: Tensor | None, fixed: object = None) -> None:
        self.make, self.owner_M = make, owner_M
        self.fixed = fixed  # what stays the same from forward to forward, if something does

    @cached_property
    def entries_MX(self) -> Tensor:
        return self.make()

    def hidden_TM(self, layout: Layout) -> Tensor | None:
        """Which entries are another sequence's."""
        if self.owner_M is None:
            return None
        lengths_S = torch.tensor([span.new for span in layout.spans], device=layout.device)
        sequence_T = torch.arange(len(lengths_S), device=layout.device).repeat_interleave(lengths_S)
        return sequence_T[:, None] != self.owner_M


class KnowledgeBase(nn.Module):
    def __init__(self, config: ModelConfig, shape: Knowledge) -> None:
        super().__init__()
        self.words = shape.words
        self.norm = Norm(shape.words * config.hidden, config.norm_eps)
        self.facts: list[list[int]] = []
        self._tokens: Tensor | None = None

    def know(self, facts: Sequence[Sequence[int]]) -> None:
        """From now on these are the model's facts, as tokens."""
        self.facts, self._tokens = [list(fact) for fact in facts], None

    def facts_for(self, layout: Layout, embedded: Callable[[Tensor], Tensor], ops: Kernels) -> Facts:
        if layout.facts is not None:
            own = [(number, fact) for number, facts in enumerate(layout.facts) for fact in facts]
            tokens_MW = self._table([fact for _, fact in own], layout.device)
            owner_M = torch.tensor([number for number, _ in own], device=layout.device)
            return Facts(lambda: self._entries(tokens_MW, embedded, ops), owner_M)
        if self._tokens is None or self._tokens.device != layout.device:
            self._tokens = self._table(self.facts, layout.device)
        known_MW = self._tokens
        return Facts(lambda: self._entries(known_MW, embedded, ops), None, fixed=known_MW)

    def _table(self, facts: Sequence[Sequence[int]], device: torch.device) -> Tensor:
        rows = [[*fact[: self.words], *[NOTHING] * (self.words - len(fact))] for fact in facts]
        return torch.tensor(rows, dtype=torch.int64).view(-1, self.words).to(device)

    def _entries(self, tokens_MW: Tensor, embedded: Callable[[Tensor], Tensor], ops: Kernels) -> Tensor:
        words_XD = embedded(tokens_MW.clamp(min=0).flatten())
        words_XD = words_XD * (tokens_MW != NOTHING).flatten()[:, None]
        return self.norm(words_XD.view(-1, len(self.norm.weight)), ops)


class ClosedForm(NamedTuple):
    """A feed-forward network with a neuron for each entry: relu(x up + bias) down."""

    up_MD: Tensor
    bias_M: Tensor
    down_DM: Tensor


class KnowledgeReading(nn.Module):
    site = ""

    def __init__(self, config: ModelConfig, reading: Reading) -> None:
        super().__init__()
        assert config.knowledge is not None
        size = config.knowledge.words * config.hidden
        # What is read comes into a stream as small as the embeddings are at first: the matrix itself is not as small,
        # or the first steps would undo what it begins as.
        self.scale, self.share = reading.hidden**-0.5, config.init_std
        self.query = Linear(config.hidden, reading.hidden)
        self.key = Linear(size, reading.hidden)
        self.key_norm = Norm(reading.hidden, config.norm_eps)
        self.value = Linear(size, config.hidden)
        self.threshold = Linear(size, 1, bias=True)
        self._kept: tuple[object, list[int], tuple[Tensor, Tensor, Tensor]] | None = None

    def forward(self, x_TD: Tensor, context: ForwardContext) -> Tensor:
        assert context.facts is not None
        ops, hidden_TM = context.ops, context.facts.hidden_TM(context.layout)
        key_MC, value_DM, threshold_M = self.projected(context.facts, ops)
        if not len(key_MC):
            return 0 * x_TD
        scores_TM = ops.linear(self.query(x_TD, ops), key_MC, threshold_M, f"{self.site}.keys")
        weights_TM = scores_TM.relu()
        if hidden_TM is not None:
            weights_TM = weights_TM.masked_fill(hidden_TM, 0)
        return ops.linear(weights_TM, value_DM, None, f"{self.site}.values")

    def projected(self, facts: Facts, ops: Kernels) -> tuple[Tensor, Tensor, Tensor]:
        """Keys, scaled, values and thresholds of the entries. Those of a fixed base are kept while the weights stay."""
        keeps = facts.fixed is not None and not torch.is_grad_enabled()
        weights = [self.key.weight, self.value.weight, self.threshold.weight] if keeps else []
        versions = [
            weight._version if isinstance(weight, Tensor) and not weight.is_inference() else 0 for weight in weights
        ]
        if keeps and self._kept is not None and self._kept[0] is facts.fixed and self._kept[1] == versions:
            return self._kept[2]
        entries_MX = facts.entries_MX
        made = (
            self.key_norm(self.key(entries_MX, ops), ops) * self.scale,
            (self.share * self.value(entries_MX, ops)).t().contiguous(),
            self.threshold(entries_MX, ops).squeeze(1),
        )
        if keeps:
            self._kept = (facts.fixed, versions, made)
        return made

    def closed_form(self, facts: Facts, ops: Kernels) -> ClosedForm:
        """The paper's equivalence: the same as a feed-forward network, for these facts."""
        key_MC, value_DM, threshold_M = self.projected(facts, ops)
        return ClosedForm(key_MC @ self.query.weight, threshold_M, value_DM)


def facts_of(text: str, tokenizer: Tokenizer, words: int, place: object) -> list[list[int]]:
    """The facts of a text, one in each line that is not empty, as tokens."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    facts = [tokenizer.encode(f" {line}", special=False) for line in lines]  # words as they are within a sentence
    for number, fact in enumerate(facts):
        if len(fact) > words:
            problem = f"fact {number + 1} ({lines[number][:40]!r}) has {len(fact)} tokens, and {words} are read"
            raise UserError(place, problem, "Write it shorter, or train with a larger model.knowledge.words.")
    return facts


def learn_directory(base: KnowledgeBase, tokenizer: Tokenizer | None, place: object) -> None:
    """The facts that a model directory holds."""
    if tokenizer is not None and KNOWLEDGE in tokenizer.files:
        text = tokenizer.files[KNOWLEDGE].decode("utf-8", "replace")
        base.know(facts_of(text, tokenizer, base.words, f"{place}/{KNOWLEDGE}"))
