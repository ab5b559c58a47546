"""Sort assignments by expert on the device, without the host ever learning a count.

Every assignment (token t, choice k) gets a row in a buffer of P rows in which each expert owns one segment that starts
at a multiple of `align`. A table then says, for every tile of rows, whose it is. It is a counting sort in three
launches (one for small batches, where every program counts for itself) whose order is that of the tokens, so that
results repeat to the bit. An assignment to expert -1 is none, and has no row.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from moesaic.kernels.triton.dependent_launch import launch_pdl, supports_pdl
from moesaic.kernels.triton.launch import launch

RECORD = 8  # int32 per table record: expert, first tile of it, tiles of it, first row, rows used; the rest is padding
CHUNK = 256  # assignments placed by one program
SMALL_CHUNK = 32  # the same while there are few: more programs, each with less to compare
WHOLE = 4096  # up to this many assignments every program counts them all
WRITERS = 8  # programs that write tables


@dataclass(frozen=True)
class Routing:
    """Where each assignment's row is. N = T * K assignments, P padded rows."""

    slots_N: torch.Tensor  # row of each assignment; -1: none
    sources_P: torch.Tensor  # assignment of each row; undefined in padding
    tiles: torch.Tensor  # a record for each tile of `align` rows
    wide_tiles: torch.Tensor  # the same for tiles of 2 * align rows
    segments_E: torch.Tensor  # a record for each expert
    totals: torch.Tensor  # number of tiles, number of wide tiles
    align: int

    @property
    def rows(self) -> int:
        return self.sources_P.shape[0]


@triton.jit
def count_chunk(routes_N, counts_CE, assignments, experts, CHUNK: tl.constexpr, BINS: tl.constexpr):
    at = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    expert = tl.load(routes_N + at, mask=at < assignments, other=-1).to(tl.int32)
    counts = tl.histogram(tl.maximum(expert, 0), BINS, mask=expert >= 0)
    bins = tl.arange(0, BINS)
    tl.store(counts_CE + tl.program_id(0) * experts + bins, counts, mask=bins < experts)


@triton.jit
def sum_chunks(counts_CE, totals_E, chunks, experts, CHUNKS: tl.constexpr, WIDTH: tl.constexpr):
    """Counts become the number of earlier assignments to the same expert; their sum goes to `totals_E`."""
    chunk = tl.arange(0, CHUNKS)[:, None]
    expert = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    at = counts_CE + chunk * experts + expert[None, :]
    known = (chunk < chunks) & (expert[None, :] < experts)
    counts = tl.load(at, mask=known, other=0)
    tl.store(at, tl.cumsum(counts, 0) - counts, mask=known)
    tl.store(totals_E + expert, tl.sum(counts, 0), mask=expert < experts)


@triton.jit
def write_table(
    table,
    total,
    writer,
    count_E,
    start_E,
    rows: tl.constexpr,
    limit,
    RECORD: tl.constexpr,
    BINS: tl.constexpr,
    WRITERS: tl.constexpr,
):
    """Every WRITERS-th tile of each expert, all experts at once."""
    bins = tl.arange(0, BINS)
    tiles_E = (count_E + rows - 1) // rows
    end_E = tl.cumsum(tiles_E, 0)
    first_E = end_E - tiles_E
    tl.store(total, tl.max(end_E, 0))
    for tile in range(writer, tl.max(tiles_E, 0), WRITERS):
        kept = (tile < tiles_E) & (first_E + tile < limit)
        record = table + (first_E + tile) * RECORD
        tl.store(record, bins, mask=kept)
        tl.store(record + 1, first_E, mask=kept)
        tl.store(record + 2, tiles_E, mask=kept)
        tl.store(record + 3, start_E, mask=kept)
        tl.store(record + 4, count_E, mask=kept)


@triton.jit
def place_chunk(
    routes_N,
    before_CE,
    totals_E,
    slots_N,
    sources_P,
    tiles,
    wide_tiles,
    segments_E,
    tile_counts,
    assignments,
    experts,
    chunks,
    limit,
    ALIGN: tl.constexpr,
    CHUNK: tl.constexpr,
    WRITERS: tl.constexpr,
    BINS: tl.constexpr,
    RECORD: tl.constexpr,
    WHOLE: tl.constexpr,
    PDL: tl.constexpr,
):
    """The first `chunks` programs give each assignment its row; the others write the tables. WHOLE, if not 0: so many
    assignments at most, to be counted here."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    program = tl.program_id(0)
    bins = tl.arange(0, BINS)
    order = tl.arange(0, CHUNK)
    if WHOLE > 0:
        all = tl.arange(0, WHOLE)
        everyone = tl.load(routes_N + all, mask=all < assignments, other=-1).to(tl.int32)
        count_E = tl.histogram(tl.maximum(everyone, 0), BINS, mask=everyone >= 0)
    else:
        count_E = tl.load(totals_E + bins, mask=bins < experts, other=0)
    padded_E = (count_E + ALIGN - 1) // ALIGN * ALIGN
    start_E = tl.cumsum(padded_E, 0) - padded_E
    if program >= chunks:
        writer = program - chunks
        write_table(tiles, tile_counts, writer, count_E, start_E, ALIGN, limit, RECORD, BINS, WRITERS)
        write_table(wide_tiles, tile_counts + 1, writer, count_E, start_E, 2 * ALIGN, limit, RECORD, BINS, WRITERS)
        record = segments_E + bins * RECORD
        tl.store(record + 3, start_E, mask=bins < experts)
        tl.store(record + 4, count_E, mask=bins < experts)
    else:
        if WHOLE == 0:
            next_E = start_E + tl.load(before_CE + program * experts + bins, mask=bins < experts, other=0)
        elif WHOLE > CHUNK:
            earlier = (everyone >= 0) & (all < program * CHUNK)
            next_E = start_E + tl.histogram(tl.maximum(everyone, 0), BINS, mask=earlier)
        else:
            next_E = start_E
        at = program * CHUNK + order
        inside = at < assignments
        expert = tl.load(routes_N + at, mask=inside, other=-1).to(tl.int32)
        valid = expert >= 0
        same = (expert[:, None] == expert[None, :]) & (order[None, :] < order[:, None])
        mine = expert[:, None] == bins[None, :]
        slot = tl.sum(same.to(tl.int32), 1) + tl.sum(tl.where(mine, next_E[None, :], 0), 1)
        tl.store(slots_N + at, tl.where(valid, slot, -1), mask=inside)
        tl.store(sources_P + slot, at, mask=valid)


def max_tiles(assignments: int, experts: int, align: int) -> int:
    """Tiles that any routing of this many assignments can need."""
    used = min(assignments, experts)
    return (assignments + used * (align - 1)) // align


def route(routes_TK: torch.Tensor, experts: int, align: int) -> Routing:
    assignments = routes_TK.numel()
    routes_N = routes_TK.contiguous().view(-1)
    limit = max_tiles(assignments, experts, align)
    rows = limit * align
    bins = max(32, triton.next_power_of_2(experts))
    device = routes_TK.device
    # One allocation for all: the host's time for each is that of a short kernel. Rows are multiples of sixteen.
    sizes = [limit * RECORD, limit * RECORD, experts * RECORD, 4, rows, assignments]
    parts = torch.empty(sum(sizes), dtype=torch.int32, device=device).split(sizes)
    tiles, wide_tiles, segments = (part.view(-1, RECORD) for part in parts[:3])
    tile_counts, sources, slots = parts[3:]
    chunk = SMALL_CHUNK if assignments <= 8192 else CHUNK
    chunks = triton.cdiv(assignments, chunk)
    whole = assignments <= WHOLE
    if whole:
        before = totals = slots  # not read
    else:
        before = torch.empty(chunks + 1, experts, dtype=torch.int32, device=device)
        totals = before[chunks]
        launch(count_chunk, (chunks,), routes_N, before, assignments, experts, CHUNK=chunk, BINS=bins, num_warps=4)
        width = 8 if chunks <= 2048 else 2
        launch(
            sum_chunks,
            (triton.cdiv(experts, width),),
            before,
            totals,
            chunks,
            experts,
            CHUNKS=triton.next_power_of_2(chunks),
            WIDTH=width,
            num_warps=8,
        )
    launch_pdl(
        place_chunk,
        (chunks + WRITERS,),
        routes_N,
        before,
        totals,
        slots,
        sources,
        tiles,
        wide_tiles,
        segments,
        tile_counts,
        assignments,
        experts,
        chunks,
        limit,
        ALIGN=align,
        CHUNK=chunk,
        WRITERS=WRITERS,
        BINS=bins,
        RECORD=RECORD,
        WHOLE=max(chunk, triton.next_power_of_2(assignments)) if whole else 0,
        PDL=supports_pdl(device),
        num_warps=8,
    )
    return Routing(slots, sources, tiles, wide_tiles, segments, tile_counts, align)
