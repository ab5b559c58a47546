"""The one model: training, rollouts, evaluation and serving all run this forward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moesaic import kernels
from moesaic.kernels.quantized import QuantizedKernels, QuantizedWeight
from moesaic.model.block import Block, PredictionBlock
from moesaic.model.config import ModelConfig
from moesaic.model.context import ForwardContext, Routing
from moesaic.model.fused_model import FusedModel, run_fused
from moesaic.model.layout import Layout, PagedCache
from moesaic.model.linear import Norm
from moesaic.model.rope import dynamic_frequencies, frequencies
from moesaic.model.value_head import ValueHead

if TYPE_CHECKING:
    from moesaic.model.tokenizer import Tokenizer

# Logits of this many tokens are in memory at a time when only log-probabilities are wanted.
LOGIT_ROWS = 1024


# How a block is run: plainly, again in the backward pass, on some of the tokens, or not at all.
LayerRunner = Callable[[Block, int, Tensor, ForwardContext], Tensor]


def run_plainly(block: Block, number: int, x_TD: Tensor, context: ForwardContext) -> Tensor:
    out_TD: Tensor = block(x_TD, context)
    return out_TD


class Model(nn.Module):
    def __init__(self, config: ModelConfig, mode: kernels.Mode = "fast") -> None:
        super().__init__()
        self.config = config
        self.mode = mode
        self.tokenizer: Tokenizer | None = None
        self.value: ValueHead | None = None  # of a reward model or critic
        self.stack: FusedModel | None = None  # the layers as one piece, when first wanted
        self.embed = nn.Parameter(torch.empty(config.vocab, config.hidden))
        self.layers = nn.ModuleList(Block(config, layer, number) for number, layer in enumerate(config.layers))
        self.norm = Norm(config.hidden, config.norm_eps)
        self.head = None if config.tied else nn.Parameter(torch.empty(config.vocab, config.hidden))
        self.mtp = nn.ModuleList(
            PredictionBlock(config, layer, len(config.layers) + number) for number, layer in enumerate(config.mtp)
        )

    @property
    def device(self) -> torch.device:
        return self.embed.device

    @property
    def dtype(self) -> torch.dtype:
        return self.embed.dtype

    def forward(
        self,
        tokens_T: Tensor,
        layout: Layout,
        routing: Routing | None = None,
        runner: LayerRunner = run_plainly,
        ops: kernels.Kernels | None = None,
    ) -> Tensor:
        """The normalised hidden state after each token; `logits_at` turns rows of it into predictions."""
        context = self.context(layout, routing, ops)
        x_TD = self.embedded(tokens_T)
        if runner is run_plainly and (done_TD := run_fused(self, x_TD, context)) is not None:
            return self.norm(done_TD, context.ops)
        for number, block in enumerate(self.layers):
            assert isinstance(block, Block)
            x_TD = runner(block, number, x_TD, context)
        return self.norm(x_TD, context.ops)

    def embedded(self, tokens_T: Tensor) -> Tensor:
        table: Tensor | QuantizedWeight = self._modules.get("embed") or self.embed  # type: ignore[assignment]
        return table.rows(tokens_T) if isinstance(table, QuantizedWeight) else F.embedding(tokens_T, table)

    def predict_further(
        self, number: int, hidden_TD: Tensor, next_T: Tensor, layout: Layout, routing: Routing | None = None
    ) -> Tensor:
        """Multi-token-prediction layer `number`: from hidden states and the tokens that followed them, the hidden
        states that predict one token further."""
        context = self.context(layout, routing)
        return self.mtp[number](hidden_TD, self.embedded(next_T), context)

    def logits_at(self, hidden_TD: Tensor, rows: Tensor | slice = slice(None)) -> Tensor:
        return self.kernels.linear(hidden_TD[rows], self.output)

    @property
    def output(self) -> Tensor:
        """The matrix that turns hidden states into logits (V, D)."""
        return self.embed if self.head is None else self.head

    def context(
        self, layout: Layout, routing: Routing | None = None, ops: kernels.Kernels | None = None
    ) -> ForwardContext:
        ops = ops or self.kernels
        library = getattr(ops, "library", None)
        absorb = self.mode != "invariant"
        if routing is not None and routing.keep_logits:  # not in a block, which may be compiled
            routing.lengths = [span.new for span in layout.spans]
        return ForwardContext(layout, ops, *self.angles(layout), routing, absorb, library)

    def angles(self, layout: Layout) -> tuple[Tensor, Tensor]:
        """Cosines and sines of every token's rotary angles, float32."""
        rope, context = self.config.rope, self.config.context
        speed_R, factor = frequencies(rope, context, self.device)
        if rope.kind == "dynamic" and max((int(span.total) for span in layout.spans), default=0) > context:
            speed_R = dynamic_frequencies(rope, context, layout.totals_T)
        angle_TR = layout.positions_T[:, None].float() * speed_R
        return angle_TR.cos() * factor, angle_TR.sin() * factor

    @property
    def kernels(self) -> kernels.Kernels:
        chosen = kernels.choose(self.device, self.mode)
        return cast(kernels.Kernels, QuantizedKernels(chosen)) if self.quantized else chosen

    @cached_property
    def quantized(self) -> bool:
        """Whether any matrix is kept in few bits. A model is made so when it is read, and not changed after."""
        return any(isinstance(module, QuantizedWeight) for module in self.modules())

    def cache_shapes(self) -> list[dict[str, tuple[int, ...]]]:
        """What each layer, prediction layers last, keeps per token."""
        blocks = [*self.layers, *(layer.block for layer in self.mtp)]
        return [block.attention.cache_shapes() for block in blocks]

    def new_cache(self, pages: int, page_size: int = 16, dtype: torch.dtype | None = None) -> PagedCache:
        return PagedCache(self.cache_shapes(), pages, page_size, dtype or self.dtype, self.device)

    @torch.inference_mode()
    def logits(self, sequences: Sequence[Sequence[int]]) -> list[Tensor]:
        """Next-token logits after every token of each sequence, from one flat forward: (length, V) float32 each."""
        hidden_TD, layout = self._run(sequences)
        logits_TV = self.logits_at(hidden_TD).float()
        return [logits_TV[span.start : span.stop] for span in layout.spans]

    @torch.inference_mode()
    def logprobs(self, sequences: Sequence[Sequence[int]]) -> list[Tensor]:
        """log p(token | the tokens before it) for every token but the first: (length - 1,) float32 each."""
        hidden_TD, layout = self._run(sequences)
        out = []
        for span, tokens in zip(layout.spans, sequences, strict=True):
            rows = range(span.start, max(span.start, span.stop - 1))
            pieces = [torch.empty(0, device=self.device)]
            for begin in range(rows.start, rows.stop, LOGIT_ROWS):
                end = min(begin + LOGIT_ROWS, rows.stop)
                after = torch.tensor(tokens[begin - span.start + 1 : end - span.start + 1], device=self.device)
                log_TV = self.logits_at(hidden_TD, slice(begin, end)).float().log_softmax(-1)
                pieces.append(log_TV.gather(1, after[:, None]).squeeze(1))
            out.append(torch.cat(pieces))
        return out

    def _run(self, sequences: Sequence[Sequence[int]]) -> tuple[Tensor, Layout]:
        layout = Layout([len(tokens) for tokens in sequences], device=self.device)
        tokens_T = torch.tensor([token for tokens in sequences for token in tokens], device=self.device).long()
        return self(tokens_T, layout), layout

    @torch.no_grad()
    def initialize(self, seed: int = 0) -> Model:
        """Fresh weights for training from scratch: matrices normal, norms one, biases zero."""
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                fresh = torch.empty(parameter.shape).normal_(0, self.config.init_std, generator=generator)
                parameter.copy_(fresh)
            else:
                parameter.fill_(0.0 if name.endswith("bias") else 1.0)
        for name, buffer in self.named_buffers():
            if name.endswith("correction"):
                buffer.zero_()
        return self
