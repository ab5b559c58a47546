"""Where the rows lie that heads of compact requests have retained, as attention over chosen rows reads them.

A KV policy leaves every layer and key head rows of its own, wherever they lie in the cache. Each request lists them in
a table on the device (layers, heads, columns; the newest last). Here the tables of a batch are gathered into one list
for each layer, a row for every token and head: to `paged.attend` such a pair is a token with one key head, which
attends to `chosen_TK`.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
import torch
import triton
import triton.language as tl

BLOCK = 1024


@triton.jit
def gather_kernel(
    tables_T3,
    counts_TLN,
    chosen_LXK,
    positions_LX,
    newest_LX,
    T,
    L,
    N,
    K,
    BLOCK: tl.constexpr,
):
    """One head of one layer of one token: the rows it attends to, how many less one, and the newest of them."""
    pair, part = tl.program_id(0), tl.program_id(1)
    token, own = pair // (L * N), pair % (L * N)
    layer, head = own // N, own % N
    count = tl.load(counts_TLN + pair)
    table = tl.load(tables_T3 + 3 * token).to(tl.pointer_type(tl.int32))
    width = tl.load(tables_T3 + 3 * token + 1)
    end = own * width + tl.load(tables_T3 + 3 * token + 2)
    to = (layer.to(tl.int64) * T + token) * N + head
    place = part * BLOCK + tl.arange(0, BLOCK)
    rows = tl.load(table + end - count + place, mask=place < count, other=0)
    tl.store(chosen_LXK + to * K + place, rows, mask=place < count)
    if part == 0:
        newest = tl.load(table + end - 1, mask=count > 0, other=-1)
        tl.store(positions_LX + to, count - 1)
        tl.store(newest_LX + to, newest)


@triton.jit
def store_kernel(k_XC, v_XC, newest_X, keys, values, C, BLOCK_C: tl.constexpr):
    """A token's key and value of one head, to the newest of its rows; nowhere for a token that is none."""
    pair = tl.program_id(0).to(tl.int64)
    row = tl.load(newest_X + pair).to(tl.int64)
    c = tl.arange(0, BLOCK_C)
    inside = (c < C) & (row >= 0)
    kind = keys.dtype.element_ty
    tl.store(keys + row * C + c, tl.load(k_XC + pair * C + c, mask=inside, other=0.0).to(kind), mask=inside)
    tl.store(values + row * C + c, tl.load(v_XC + pair * C + c, mask=inside, other=0.0).to(kind), mask=inside)


def gather(
    tables_T3: torch.Tensor, counts_TLN: torch.Tensor, most: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows (L, T * N, most), positions and newest rows (L, T * N). `tables_T3` has each request's address of its table,
    the table's width, and how many of its columns are in use; `counts_TLN` how many of these each head has retained,
    the new token among them; 0 where there is no request."""
    T, L, N = counts_TLN.shape
    chosen_LXK = torch.empty(L, T * N, most, dtype=torch.int32, device=counts_TLN.device)
    positions_LX = torch.empty(L, T * N, dtype=torch.int32, device=counts_TLN.device)
    newest_LX = torch.empty_like(positions_LX)
    grid = (T * L * N, triton.cdiv(most, BLOCK))
    gather_kernel[grid](tables_T3, counts_TLN, chosen_LXK, positions_LX, newest_LX, T, L, N, most, BLOCK=BLOCK)
    return chosen_LXK, positions_LX, newest_LX


def store(
    k_TNC: torch.Tensor, v_TNC: torch.Tensor, newest_X: torch.Tensor, keys_XC: torch.Tensor, values_XC: torch.Tensor
) -> None:
    C = keys_XC.shape[1]
    store_kernel[(len(newest_X),)](
        k_TNC, v_TNC, newest_X, keys_XC, values_XC, C, BLOCK_C=triton.next_power_of_2(C), num_warps=1
    )
