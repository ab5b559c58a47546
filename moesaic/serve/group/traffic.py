"""What a rank of a worker group sends in a step: the formula, which tests hold the measured bytes and messages to.

With T rows in the data-parallel rank, n = tp, widths rounded up to the widest share, and b bytes a number, a rank sends
to each of its n - 1 tensor neighbours:

    attention            T (HC / n + D / n) b        two messages: heads to `out`, its columns to all
    a dense network      T (F / n + D / n) b         two messages: hidden units to `down`, its columns to all
    experts, ep = 1      T (K F / n + D / n) b       two messages
    experts, ep > 1      (T / n) D b, behind the results of its experts: one row of D for each assignment whose row
                         another rank owns. Between data-parallel ranks also the rows themselves (D b + 8 bytes for each
                         assignment that leaves, with its weight and its expert) and 4 bytes for the count of each rank.

Once a step: its embedding rows, D b each; to rank 0 its columns of the logits that are wanted, and from other
data-parallel ranks the choice of experts, 4 bytes each. Rank 0 sends the step's array to all. A shared expert is a
dense network beside the others. Nothing else travels.
"""

from __future__ import annotations

from dataclasses import dataclass

from moesaic.model.config import Experts, GroupedQuery, ModelConfig
from moesaic.parallel.layout import ParallelLayout
from moesaic.serve.group.shares import widths
from moesaic.serve.group.step_array import FIRST

Sent = dict[str, tuple[int, int]]  # by kind: messages and bytes


@dataclass(frozen=True)
class StepRows:
    """What a rank has in a step: `rows` of its data-parallel rank, of which it embeds `embedded` and owns `owned`;
    logits of `wanted` rows. Over all layers: `results` of assignments that leave it for the owners of their rows, and
    `dispatched` assignments of its own rows that leave for other data-parallel ranks."""

    rows: int
    embedded: int
    owned: int
    wanted: int
    results: int = 0
    dispatched: int = 0


def step_traffic(config: ModelConfig, layout: ParallelLayout, rank: int, of: StepRows, itemsize: int = 4) -> Sent:
    """Of one step whose array fits in its first message, without hidden states that rank 0 asked for."""
    tp, D = layout.tp, config.hidden
    sent: Sent = {}

    def add(kind: str, messages: int, size: int) -> None:
        if messages:
            known = sent.get(kind, (0, 0))
            sent[kind] = known[0] + messages, known[1] + size

    def columns(kind: str, rows: int, wide: int) -> None:
        """The widest share of so many columns, to every tensor neighbour."""
        add(kind, int(tp > 1 and rows > 0), rows * max(widths(wide, tp)) * itemsize * (tp - 1))

    add("embed", int(tp > 1 and of.rows > 0), of.embedded * D * itemsize * (tp - 1))
    for layer in config.layers:
        columns("out", of.rows, heads_out(config))
        columns("stream", of.rows, D)
        ffn = layer.ffn
        dense = ffn.shared_hidden if isinstance(ffn, Experts) else ffn.hidden
        if dense:
            columns("down", of.rows, dense)
            columns("stream", of.rows, D)
        if not isinstance(ffn, Experts):
            continue
        if layout.ep == 1:
            columns("expert hidden", of.rows * ffn.per_token, ffn.hidden)
            columns("stream", of.rows, D)
            continue
        apart = layout.ep > tp  # experts on other data-parallel ranks, too
        add("expert counts", int(apart), 4 * (layout.ep - 1))
        add("expert rows", int(apart), 0)
        add("expert results", int(apart or of.rows > 0), 0)
        add("rows", int(tp > 1 and of.rows > 0), of.owned * D * itemsize * (tp - 1))
    for kind, size in (
        ("expert rows", of.dispatched * (D * itemsize + 8)),
        ("expert results", of.results * D * itemsize),
    ):
        if kind in sent:
            sent[kind] = sent[kind][0], size
    if rank:
        logits = of.wanted * widths(config.vocab, tp)[rank % tp] * itemsize
        add("logits", int(logits > 0), logits)
        choices = sum(layer.ffn.per_token for layer in config.layers if isinstance(layer.ffn, Experts))
        add("routes", int(rank % tp == 0 and of.rows > 0 and choices > 0), of.rows * choices * 4)
    else:
        add("step", int(layout.devices > 1), FIRST * 8 * (layout.devices - 1))
    return sent


def heads_out(config: ModelConfig) -> int:
    """Columns that attention hands to `out`."""
    attention = config.attention
    return attention.heads * (attention.head_size if isinstance(attention, GroupedQuery) else attention.value_size)


def messages_per_layer(config: ModelConfig, layout: ParallelLayout, number: int) -> int:
    """That a rank takes part in when a layer of some rows is run."""
    ffn = config.layers[number].ffn
    dense = ffn.shared_hidden if isinstance(ffn, Experts) else ffn.hidden
    tensor = (2 + 2 * bool(dense)) * (layout.tp > 1)
    if not isinstance(ffn, Experts):
        return tensor
    if layout.ep == 1:
        return tensor + 2 * (layout.tp > 1)
    return tensor + 1 + (layout.tp > 1) + 2 * (layout.ep > layout.tp)
