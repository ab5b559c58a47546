"""The one model: training, rollouts, evaluation and serving all run this forward.

It is three parts, which whoever stops between layers, holds only some of them or brings rows of its own calls one by
one: `begin` (tokens to hidden states), `run_layers` over a range, `finish` (the last norm); `logits_at` on demand.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from moesaic import kernels
from moesaic.kernels.adapted import AdaptedKernels
from moesaic.kernels.interface import EncoderStack, Kernels, LayerStack, Mode, RopeAngles
from moesaic.kernels.logprobs import token_logprobs
from moesaic.kernels.quantized import QuantizedKernels, QuantizedWeight
from moesaic.kernels.wrapped import for_batch
from moesaic.model.block import Block, PredictionBlock, make_block
from moesaic.model.config import ModelConfig, Rope
from moesaic.model.context import ForwardContext, Routing
from moesaic.model.encoder import ClassifierHead, EncoderBlock, Entry, last_norm, refuse_encoder
from moesaic.model.encoder import run_layers as run_encoder
from moesaic.model.first_weights import first_parameter
from moesaic.model.knowledge import KnowledgeBase
from moesaic.model.layout import Layout, PagedCache, SequenceStates
from moesaic.model.linear import Norm, name_sites
from moesaic.model.rope import rope_of, table_angles
from moesaic.model.value_head import ValueHead

if TYPE_CHECKING:
    from moesaic.model.lora import Lora
    from moesaic.model.tokenizer import Tokenizer

# Logits of this many tokens are in memory at a time when only log-probabilities are wanted.
LOGIT_ROWS = 1024


# How a layer is run: plainly, recomputed in the backward pass, on some of the tokens, or not at all.
LayerRunner = Callable[[Block, int, Tensor, ForwardContext], Tensor]


def run_plainly(block: Block, number: int, x_TD: Tensor, context: ForwardContext) -> Tensor:
    out_TD: Tensor = block(x_TD, context)
    return out_TD


class Model(nn.Module):
    """`ops` are the kernels that every forward runs on. They are chosen by device and mode, and can be set: kernels
    that record, shard or correct what flows through a call site stand in for the plain ones there."""

    def __init__(self, config: ModelConfig, mode: Mode = "fast") -> None:
        super().__init__()
        self.config = config
        self.mode = mode
        self.tokenizer: Tokenizer | None = None
        self.value: ValueHead | None = None  # of a reward model or critic
        self.lora: Lora | None = None  # an adapter that is being trained
        self._ops: Kernels | None = None
        self._chosen: tuple[torch.device, Mode, Lora | None, Kernels] | None = None
        self._stack: LayerStack | None = None  # of all layers, when first wanted
        self._encoder: EncoderStack | None = None  # the same of an encoder
        self.embed = nn.Parameter(torch.empty(config.vocab, config.hidden))
        encoder = config.encoder
        kind = make_block if encoder is None else EncoderBlock
        self.layers = nn.ModuleList(kind(config, layer, number) for number, layer in enumerate(config.layers))
        last = Norm(config.hidden, config.norm_eps, config.norm_offset)
        self.norm = last if encoder is None else last_norm(config)
        self.knowledge = None if config.knowledge is None else KnowledgeBase(config, config.knowledge)
        self.entry = None if encoder is None else Entry(config)
        self.classifier = ClassifierHead(config, encoder.classifier) if encoder and encoder.classifier else None
        self.head = None if config.tied or encoder else nn.Parameter(torch.empty(config.vocab, config.hidden))
        self.mtp = nn.ModuleList(
            PredictionBlock(config, layer, len(config.layers) + number) for number, layer in enumerate(config.mtp)
        )
        name_sites(self)

    @property
    def device(self) -> torch.device:
        return self.embed.device

    @property
    def dtype(self) -> torch.dtype:
        return self.embed.dtype

    def forward(
        self,
        inputs: Tensor,
        layout: Layout,
        routing: Routing | None = None,
        runner: LayerRunner = run_plainly,
        ops: Kernels | None = None,
    ) -> Tensor:
        """The normalised hidden state after each token; `logits_at` turns rows of it into predictions."""
        x_TD, context = self.begin(inputs, layout, routing, ops)
        return self.finish(self.run_layers(x_TD, context, runner=runner), context)

    def begin(
        self, inputs: Tensor, layout: Layout, routing: Routing | None = None, ops: Kernels | None = None
    ) -> tuple[Tensor, ForwardContext]:
        """Hidden states before the first layer: of tokens (T,), or given ones (T, D), which an encoder of images or
        speech made, or the pipeline stage before."""
        ops = for_batch(ops or self.ops, layout)
        if routing is not None and routing.keep_logits:  # not in a block, which may be compiled
            routing.lengths = [span.new for span in layout.spans]
        rope = rope_of(self.config, layout) if self.entry is None else self._angles(self.config.rope, layout)
        context = ForwardContext(layout, ops, rope, routing, self.mode != "invariant")
        for own in {layer.rope for layer in self.config.layers if layer.rope is not None}:
            context.layer_ropes[own] = self._angles(own, layout)
        if self.knowledge is not None:
            context.facts = self.knowledge.facts_for(layout, lambda tokens: self.embedded(tokens, ops), ops)
        if inputs.is_floating_point():
            return inputs, context
        x_TD = self.embedded(inputs, ops)
        return (x_TD if self.entry is None else self.entry(x_TD, context)), context

    def _angles(self, rope: Rope, layout: Layout) -> RopeAngles:
        return table_angles(rope, self.config.context, layout)

    def run_layers(
        self,
        x_TD: Tensor,
        context: ForwardContext,
        start: int = 0,
        stop: int | None = None,
        runner: LayerRunner = run_plainly,
    ) -> Tensor:
        """Layers from `start` to before `stop`."""
        stop = len(self.layers) if stop is None else stop
        while start < stop:
            if runner is run_plainly and stop == len(self.layers):
                x_TD, start = self.advance(x_TD, context, start)
            else:
                x_TD = runner(cast(Block, self.layers[start]), start, x_TD, context)
                start += 1
        return x_TD

    def advance(self, x_TD: Tensor, context: ForwardContext, start: int) -> tuple[Tensor, int]:
        """As far as one kernel goes, through all layers or through the next; and where to go on."""
        if self.entry is not None and start == 0:
            blocks = cast("list[EncoderBlock]", list(self.layers))
            return run_encoder(blocks, self._encoder_stack(blocks), x_TD, context), len(blocks)
        stack = self._layer_stack() if start == 0 and context.layout.is_cached else None
        if stack is not None and (done_TD := context.run_fused(stack, x_TD)) is not None:
            return done_TD, len(self.layers)
        return run_plainly(cast(Block, self.layers[start]), start, x_TD, context), start + 1

    def finish(self, x_TD: Tensor, context: ForwardContext) -> Tensor:
        if self.entry is not None:
            return x_TD if self.norm is None else self.norm(x_TD, context.ops)
        return self.norm(x_TD, context.ops)

    def embedded(self, tokens_T: Tensor, ops: Kernels | None = None) -> Tensor:
        """Rows of the embedding."""
        return (ops or self.ops).embed(tokens_T, self._modules.get("embed") or self.embed, "embed")  # type: ignore[arg-type]

    def predict_further(
        self,
        number: int,
        hidden_TD: Tensor,
        next_T: Tensor,
        layout: Layout,
        routing: Routing | None = None,
        ops: Kernels | None = None,
    ) -> Tensor:
        """Multi-token-prediction layer `number`: from hidden states and the tokens that followed them, the hidden
        states that predict one token further."""
        next_TD, context = self.begin(next_T, layout, routing, ops)
        return self.mtp[number](hidden_TD, next_TD, context)

    def logits_at(self, hidden_TD: Tensor, rows: Tensor | slice = slice(None), ops: Kernels | None = None) -> Tensor:
        return (ops or self.ops).linear(hidden_TD[rows], self.output, None, self.output_site)

    def token_logprobs(self, hidden_TD: Tensor, targets_T: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
        """log p(target) after every hidden state and its entropy, differentiable, in the engine's own bits."""
        linear = partial(self.ops.linear, site=self.output_site)
        return token_logprobs(hidden_TD, self.output, targets_T, linear=linear, **options)

    def cross_entropy(
        self, hidden_TD: Tensor, targets_T: Tensor, scale_T: Tensor, **options: Any
    ) -> tuple[Tensor, Tensor]:
        """The scaled sum of -log p(target), and each token's own, without ever holding all logits."""
        site = self.output_site
        return self.ops.linear_cross_entropy(hidden_TD, self.output, targets_T, scale_T, site=site, **options)

    @property
    def output(self) -> Tensor:
        """The matrix that turns hidden states into logits (V, D)."""
        refuse_encoder(self.config, "model", "there are no logits")
        return self.embed if self.head is None else self.head

    @property
    def output_site(self) -> str:
        return "embed" if self.head is None else "head"

    @property
    def ops(self) -> Kernels:
        if self._ops is not None:
            return self._ops
        if self._chosen is None or self._chosen[:3] != (self.device, self.mode, self.lora):
            chosen = kernels.choose(self.device, self.mode)
            chosen = cast(Kernels, QuantizedKernels(chosen)) if self.quantized else chosen
            if self.lora is not None:  # in all rows, for whoever runs this model: trainer, engine, evaluation
                chosen = cast(Kernels, AdaptedKernels(chosen, {self.lora: None}))
            self._chosen = (self.device, self.mode, self.lora, chosen)
        return self._chosen[3]

    @ops.setter
    def ops(self, ops: Kernels | None) -> None:
        self._ops = ops

    def beside(self, lora: Lora | None) -> Model:
        """The very same weights under another adapter, or under none: no second copy of them."""
        other = copy.copy(self)
        other._modules = dict(self._modules)
        other.lora = lora
        return other

    def __getstate__(self) -> dict[str, Any]:
        return {
            **self.__dict__,
            "_chosen": None,
            "_encoder": None,
        }  # modules of kernels and loaded libraries cannot be copied

    def _layer_stack(self) -> LayerStack | None:
        """All layers as data for kernels that run several; None if one has to go alone. Made anew when a layer is
        another than it was."""
        blocks = cast("list[Block]", list(self.layers))
        if not all(block.fusible for block in blocks):
            return None
        if any(block._forward_hooks or block._forward_pre_hooks for block in blocks):  # somebody wants to come between
            return None
        known = self._stack
        if known is None or any(
            layer.attention_norm.weight is not block.attention_norm.weight
            for layer, block in zip(known.layers, blocks, strict=True)
        ):
            known = self._stack = LayerStack(tuple(block.weights() for block in blocks))
        return known

    def _encoder_stack(self, blocks: list[EncoderBlock]) -> EncoderStack:
        known = self._encoder
        if known is None or any(
            layer.ffn_norm.weight is not block.ffn_norm.weight
            for layer, block in zip(known.layers, blocks, strict=True)
        ):
            known = self._encoder = EncoderStack(tuple(block.weights() for block in blocks))
        return known

    @cached_property
    def quantized(self) -> bool:
        """Whether any matrix is quantized. A model is made so when it is read; who changes it after says so."""
        return any(isinstance(module, QuantizedWeight) for module in self.modules())

    def weights_replaced(self) -> None:
        """A weight is of another kind now: which kernels take it is looked up again."""
        vars(self).pop("quantized", None)
        self._chosen = self._stack = None

    def cache_shapes(self) -> list[dict[str, tuple[int, ...]]]:
        """What each layer, prediction layers last, keeps per token."""
        blocks = [*self.layers, *(layer.block for layer in self.mtp)]
        return [block.attention.cache_shapes() for block in blocks]

    def state_shapes(self) -> list[dict[str, tuple[int, ...]]]:
        """The same of what it keeps of a sequence as a whole."""
        blocks = [*self.layers, *(layer.block for layer in self.mtp)]
        return [block.attention.state_shapes() for block in blocks]

    @property
    def state_bytes(self) -> int:
        """Of one sequence."""
        return SequenceStates(self.state_shapes(), 1, "meta").bytes

    def new_cache(
        self, pages: int, page_size: int = 16, dtype: torch.dtype | None = None, sequences: int = 1
    ) -> PagedCache:
        """`sequences` have a place for a state at the same time, where layers keep some."""
        states = SequenceStates(self.state_shapes(), sequences, self.device) if self.config.has_states else None
        return PagedCache(self.cache_shapes(), pages, page_size, dtype or self.dtype, self.device, states)

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
        """Fresh weights for training from scratch."""
        for name, tensor in self.state_dict().items():
            tensor.copy_(first_parameter(name, tuple(tensor.shape), seed, self.config))
        return self
