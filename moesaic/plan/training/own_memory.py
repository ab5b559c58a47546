"""Bytes that the product's own trainer holds on one device: its number formats, what its kernels keep, its temporaries.

`memory.py` plans for the stacks of large clusters (float32 gradients beside bf16 weights, logits in one piece). Here
gradients have the weights' format, a float32 master stands beside bf16 weights, the loss never holds all logits, and
float32 copies of gradients exist one piece at a time.
"""

from __future__ import annotations

from dataclasses import dataclass

from moesaic.plan.shape import AttentionShape, FfnShape, LayerShape, ModelShape
from moesaic.plan.training.memory import TrainingMemory

PIECE = 2**26  # gradients turned to float32 at a time, as train/optimizers does
LOGITS = 2**26  # numbers of logits at a time, as kernels/cross_entropy.py does

CONTEXT = 0.8e9  # of a process on a GPU, outside its allocator
UPDATE_COPIES = {"cpu": 1.0, "cuda": 1.0}  # float32 temporaries of a piece, in pieces


@dataclass(frozen=True)
class OwnTrainer:
    dtype: str  # float32 or bfloat16
    recompute: bool
    device: str  # cpu or cuda
    ranks: int = 1  # that FSDP2 divides parameters, gradients and optimizer states over, block by block

    @property
    def width(self) -> float:
        return 4.0 if self.dtype == "float32" else 2.0


def own_training_memory(model: ModelShape, trainer: OwnTrainer, sequences: int, length: int) -> TrainingMemory:
    """At the fullest moment of a step: as the loss is computed, between two layers of the backward pass, or while the
    optimizer updates. Gradients come as activations go."""
    tokens, width = sequences * length, trainer.width
    weights = model.parameters
    parameters, optimizer = weights * width, weights * (8.0 if trainer.dtype == "float32" else 12.0)
    inputs = width * tokens * model.hidden
    tables = model.embedding_parameters * (1 if model.tied else 2)
    moments: list[tuple[float, float]] = []  # gradients and everything else that lives, beside parameters and optimizer

    def kept(layer: LayerShape) -> float:
        return width * tokens * _kept(layer.attention, layer.ffn, model.hidden, trainer.device)

    alive = sum(inputs if trainer.recompute else kept(layer) for layer in model.layers)
    logits = min(LOGITS, tokens * model.vocab) * 6.0
    moments.append((model.embedding_parameters * width, alive + logits + 2 * inputs))
    done = float(model.embedding_parameters)
    for layer in reversed(model.layers):
        working = width * tokens * _working(layer.ffn, model.hidden) + 2 * inputs
        moments.append((done * width, alive + working + (kept(layer) if trainer.recompute else 0.0)))
        alive -= inputs if trainer.recompute else kept(layer)
        done += model.layer_parameters(layer)
    moments.append((weights * width, min(PIECE, weights) * 4.0 * UPDATE_COPIES[trainer.device]))
    assert done + tables - model.embedding_parameters <= weights * 1.001
    ranks = trainer.ranks
    gradients, rest = max(moments, key=lambda moment: moment[0] / ranks + moment[1])
    # Beside its own share a rank holds what is outside the blocks, the block it runs and the one it fetches ahead.
    block = max(model.layer_parameters(layer) for layer in model.kinds())
    gathered = (tables + model.hidden + 2 * block) * width if ranks > 1 else 0.0
    return TrainingMemory(parameters / ranks, gradients / ranks, optimizer / ranks, rest, 0.0, gathered, 0.0)


def _kept(attention: AttentionShape, ffn: FfnShape, hidden: int, device: str) -> float:
    """Numbers per token that autograd keeps of one layer."""
    queries, values = attention.heads * attention.key_size, attention.heads * attention.value_size
    if low := attention.latent:
        heads = 2 * (low.q_rank or 0) + 2 * low.kv_rank + low.rope + 3 * queries + values
    else:
        heads = 2 * queries + 2 * attention.kv_heads * (attention.key_size + attention.value_size)
    rows = 4 * hidden + heads + values
    if not ffn.experts:
        return rows + 3 * ffn.hidden
    # On a CPU: rows sorted by expert, gate and up, their product before and after weighting, what comes out. The GPU's
    # fused kernels keep gate and up alone, and gather the rest again.
    routed = ffn.topk * (2 * hidden + 4 * ffn.hidden) if device == "cpu" else 2 * ffn.topk * ffn.hidden + 2.5 * hidden
    return rows + routed + 3 * ffn.shared_hidden + 4 * ffn.experts


def _working(ffn: FfnShape, hidden: int) -> float:
    if not ffn.experts:
        return 3 * ffn.hidden + hidden
    return ffn.topk * (2 * hidden + 3 * ffn.hidden)


@dataclass(frozen=True)
class ServingMemory:
    weights: float
    cache: float
    working: float  # the largest step's activations and logits; on a GPU also those of the graphs
    context: float  # the CUDA context, kernels and libraries' workspaces

    @property
    def total(self) -> float:
        return self.weights + self.cache + self.working + self.context


def own_serving_memory(
    model: ModelShape, dtype: str, device: str, requests: int, tokens: int, largest_step: int
) -> ServingMemory:
    """The product's engine with a KV cache for `requests` sequences of `tokens`, in pages of 16; steps of at most
    `largest_step` tokens. Prompts ask for logits at their last token only."""
    width = 4.0 if dtype == "float32" else 2.0
    pages = -(-tokens // 16) * requests
    rows = min(largest_step, requests * tokens)
    cuda = device == "cuda"
    widest = max(_serving_width(layer.ffn, model.hidden, cuda) for layer in model.kinds())
    attention = max(layer.attention.heads * layer.attention.key_size * 3 for layer in model.kinds())
    working = width * rows * (4 * model.hidden + max(widest, attention)) + 4.0 * requests * model.vocab
    # A shape of step first runs as it is, then is captured; graphs share a pool of memory, which nobody else may use.
    copies = 2.0 if cuda else 1.0
    context = CONTEXT if cuda else 0.0
    cache = width * pages * 16 * model.cache_width()
    return ServingMemory(width * model.parameters, cache, copies * working, context)


def _serving_width(ffn: FfnShape, hidden: int, cuda: bool) -> float:
    """Numbers of one token at the widest place of an FFN: gate and up; on a GPU, where operations do not run in pieces,
    beside their product, or that beside what each expert makes of it."""
    chosen = max(1, ffn.topk)
    if not cuda:
        return 2 * ffn.hidden * chosen
    return max(3 * ffn.hidden * chosen, (ffn.hidden + hidden) * ffn.topk)
