"""Attention over a paged cache, the same to the bit for a token alone, in any batch, and however its prompt was cut.

Keys are split by their position in the sequence (split-KV: `SPLIT` to a split), each split is walked in blocks of
`BLOCK`, and the splits are combined in order. In decode every split is a program of its own and a second kernel
combines them (flash-decoding); in prefill one program walks all splits and does the same sums. Row sums of the weights
are taken by the tensor cores too, whose order does not depend on the tile. Query heads that share a key head are rows
of one tile.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
import torch
import triton

from moesaic.kernels.triton.attention import latent_hopper
from moesaic.kernels.triton.attention.paged_kernels import combine_kernel, decode_kernel, prefill_kernel
from moesaic.kernels.triton.attention.paged_rows import Rows
from moesaic.kernels.triton.dependent_launch import launch_pdl, supports_pdl

SPLIT = 128  # keys to a split: 256 is 3 % faster with many sequences, and 3 % slower with one
BLOCK = 64  # keys to a step
LATENT_BLOCK = 32  # the same where a key has half a thousand numbers
PREFETCH = 16  # with so few tiles there is time to fetch keys before they are needed
NO_LIMIT = 1 << 30  # of what a token attends to
ONES = 16  # row sums are a matmul with this many columns of ones


def latent_tile(heads: int, wide: bool) -> tuple[int, int]:
    """Of the heads that share a latent, how many are rows of one tile, and how many tokens' of a prompt: more rows of
    half a thousand sums, twice, than these do not fit into registers."""
    max_rows = 16 if wide else 32
    together = max_divisor(heads, max_rows)
    return together, max(1, max_rows // together)


def max_divisor(of: int, max_rows: int) -> int:
    return next(number for number in range(min(of, max_rows), 0, -1) if of % number == 0)


def attend(
    q_THC: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    rows: Rows,
    scale: float,
    window: int | None = None,
    rope_size: int = 0,
    sinks_H: torch.Tensor | None = None,
    chosen_TK: torch.Tensor | None = None,
    sums_HT: torch.Tensor | None = None,
) -> torch.Tensor:
    """Every token attends to its sequence up to itself; keys and values are (pages, page size, N, C). With
    `rope_size`, both are the latents (pages, page size, C + rope_size), and queries have as many numbers. With
    `chosen_TK` a token attends to what lies there in the cache, and a tile is of one token. `sums_HT` is to hold the
    logarithms of the sums of weights, where keys are no latents."""
    T, H, C = q_THC.shape[0], q_THC.shape[1], q_THC.shape[2] - rope_size
    page_size, N = keys.shape[1], 1 if rope_size else keys.shape[2]
    wide = q_THC.dtype == torch.float32
    group = latent_tile(H, wide)[0] if rope_size else H // N
    q_THC = q_THC.contiguous()
    out_THC = torch.empty(T, H, C, dtype=q_THC.dtype, device=q_THC.device)
    if rope_size and latent_hopper.takes(q_THC, keys, rope_size) and rows.trees_TM is None:
        latent_hopper.attend_tiles(q_THC, keys, rows, scale, out_THC, chosen_TK)
        return out_THC
    shape = {
        "GROUP": group,
        "SPLIT": SPLIT,
        "BLOCK": LATENT_BLOCK if rope_size else BLOCK,
        "BLOCK_C": max(16, triton.next_power_of_2(C)),
        "BLOCK_R": max(16, triton.next_power_of_2(rope_size)),
        "ONES": ONES,
        "WINDOWED": window is not None,
        "CHOSEN": chosen_TK is not None,
        "ROPE_SIZE": rope_size,
        "PACKED": q_THC.is_cuda,
        "PRECISION": "ieee" if wide else "tf32",
        "STAGES": 1 if wide or keys.dtype.itemsize == 1 else 2,
    }
    per_base = scale * 1.4426950408889634  # weights are powers of two
    pages, seen = rows.page_table_SP.shape[1], window or 0
    warps, combined = (8, max_divisor(H, 4)) if rope_size else (4, group)
    most = NO_LIMIT if chosen_TK is None else chosen_TK.shape[1]
    chosen = q_THC if chosen_TK is None else chosen_TK
    attended = (q_THC, keys, values, rows.positions_T, rows.sequences_T, rows.page_table_SP)
    if rows.decode_X2 is not None:
        tiles, splits = rows.decode_X2.shape[0], triton.cdiv(min(rows.max_length, most), SPLIT)
        overlap = rows.read_before_wait and supports_pdl(q_THC.device)
        best_PTH = torch.empty(splits, T, H, dtype=torch.float32, device=q_THC.device)
        weight_PTH = torch.empty_like(best_PTH)
        out_PTHC = torch.empty(splits, T, H, C, dtype=torch.float32, device=q_THC.device)
        trees = rows.trees_TM is not None
        launch_pdl(
            decode_kernel,
            (tiles, H // group, splits),
            *attended,
            rows.decode_X2,
            rows.trees_TM if trees else q_THC,
            rows.cached_S if trees else rows.positions_T,
            chosen,
            best_PTH,
            weight_PTH,
            out_PTHC,
            T,
            H,
            N,
            C,
            pages,
            page_size,
            rows.trees_TM.shape[1] if rows.trees_TM is not None else 0,
            seen,
            most,
            per_base,
            ROWS=max(16, triton.next_power_of_2(rows.decode_tokens * group)),
            TREE=trees,
            PREFETCH=tiles <= PREFETCH and not rope_size,
            PDL=overlap,
            num_warps=warps,
            **shape,
        )
        launch_pdl(
            combine_kernel,
            (tiles * rows.decode_tokens, H // combined),
            best_PTH,
            weight_PTH,
            out_PTHC,
            rows.positions_T,
            rows.decode_X2,
            sinks_H,
            sums_HT,
            out_THC,
            T,
            H,
            C,
            most,
            GROUP=combined,
            HEADS=triton.next_power_of_2(combined),
            TOKENS=rows.decode_tokens,
            SPLIT=SPLIT,
            BLOCK_C=shape["BLOCK_C"],
            PDL=overlap,
            num_warps=4,
        )
    if rows.prefill_X2 is not None:
        prefill_kernel[(H // group, rows.prefill_X2.shape[0])](
            *attended,
            rows.prefill_X2,
            sinks_H,
            sums_HT,
            chosen,
            out_THC,
            T,
            H,
            N,
            C,
            pages,
            page_size,
            seen,
            most,
            per_base,
            ROWS=max(16, triton.next_power_of_2(rows.prefill_tokens * group)),
            num_warps=warps,
            **shape,
        )
    return out_THC
