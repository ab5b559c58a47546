"""A kernel for every task: right, and with no more traffic than a good one has."""

from __future__ import annotations

HEAD = "import torch\nimport triton\nimport triton.language as tl\n\n\n"

# One program a row, which is held at once.
ROW = """@triton.jit
def kernel(x, {more}out, width, {eps}B: tl.constexpr):
    row = tl.program_id(0)
    at = tl.arange(0, B)
    inside = at < width
    v = tl.load(x + row * width + at, mask=inside, other={other})
    {body}


def {name}(x{given}):
    out = {out}
    kernel[(x.shape[0],)](x, {passed}out, x.shape[1], {eps_passed}B=triton.next_power_of_2(x.shape[1]))
    return out
"""


def by_row(name: str, body: str, more: str = "", given: str = "", out: str = "torch.empty_like(x)", other: str = "0.0"):
    names = [part.strip() for part in given.split(",") if part.strip()]
    eps = "eps" in names
    passed = "".join(f"{part}, " for part in names if part != "eps")
    return HEAD + ROW.format(
        name=name, body=body, more=more, given=given, out=out, other=other, passed=passed,
        eps="eps, " if eps else "", eps_passed="eps, " if eps else "",
    )  # fmt: skip


STORE = "tl.store(out + row * width + at, {}, mask=inside)"
SOLUTIONS = {
    "swiglu": HEAD
    + """@triton.jit
def kernel(gate, up, out, n, B: tl.constexpr):
    at = tl.program_id(0) * B + tl.arange(0, B)
    inside = at < n
    g = tl.load(gate + at, mask=inside, other=0.0)
    u = tl.load(up + at, mask=inside, other=0.0)
    tl.store(out + at, g * tl.sigmoid(g) * u, mask=inside)


def swiglu(gate, up):
    out = torch.empty_like(gate)
    n = gate.numel()
    kernel[(triton.cdiv(n, 256),)](gate, up, out, n, B=256)
    return out
""",
    "row_sum": by_row("row_sum", "tl.store(out + row, tl.sum(v, 0))", out="x.new_empty(x.shape[0])"),
    "softmax": by_row(
        "softmax",
        "e = tl.exp(v - tl.max(v, 0))\n    " + STORE.format("e / tl.sum(e, 0)"),
        other="-float('inf')",
    ),
    "rms_norm": by_row(
        "rms_norm",
        "w = tl.load(weight + at, mask=inside, other=0.0)\n    "
        + STORE.format("v / tl.sqrt(tl.sum(v * v, 0) / width + eps) * w"),
        more="weight, ",
        given=", weight, eps",
    ),
    "layer_norm": by_row(
        "layer_norm",
        "w = tl.load(weight + at, mask=inside, other=0.0)\n    b = tl.load(bias + at, mask=inside, other=0.0)\n    "
        "c = tl.where(inside, v - tl.sum(v, 0) / width, 0.0)\n    "
        + STORE.format("c / tl.sqrt(tl.sum(c * c, 0) / width + eps) * w + b"),
        more="weight, bias, ",
        given=", weight, bias, eps",
    ),
    "matmul": HEAD
    + """@triton.jit
def kernel(a, b, out, M, N, K, B: tl.constexpr):
    m = tl.program_id(0) * B + tl.arange(0, B)
    n = tl.program_id(1) * B + tl.arange(0, B)
    total = tl.zeros((B, B), dtype=tl.float32)
    for start in range(0, K, B):
        k = start + tl.arange(0, B)
        x = tl.load(a + m[:, None] * K + k[None, :], mask=(m[:, None] < M) & (k[None, :] < K), other=0.0)
        y = tl.load(b + k[:, None] * N + n[None, :], mask=(k[:, None] < K) & (n[None, :] < N), other=0.0)
        total += tl.dot(x, y)
    tl.store(out + m[:, None] * N + n[None, :], total, mask=(m[:, None] < M) & (n[None, :] < N))


def matmul(a, b):
    out = torch.empty((a.shape[0], b.shape[1]), device=a.device, dtype=torch.float32)
    grid = (triton.cdiv(a.shape[0], 32), triton.cdiv(b.shape[1], 32))
    kernel[grid](a, b, out, a.shape[0], b.shape[1], a.shape[1], B=32)
    return out
""",
    "attention": HEAD
    + """@triton.jit
def kernel(q, k, v, out, length, scale, D: tl.constexpr, B: tl.constexpr):
    head = tl.program_id(1) * length * D
    m = tl.program_id(0) * B + tl.arange(0, B)
    d = tl.arange(0, D)
    x = tl.load(q + head + m[:, None] * D + d[None, :], mask=m[:, None] < length, other=0.0)
    most = tl.full((B,), -1e30, dtype=tl.float32)
    total = tl.zeros((B,), dtype=tl.float32)
    found = tl.zeros((B, D), dtype=tl.float32)
    for start in range(0, (tl.program_id(0) + 1) * B, B):
        n = start + tl.arange(0, B)
        y = tl.load(k + head + n[:, None] * D + d[None, :], mask=n[:, None] < length, other=0.0)
        z = tl.load(v + head + n[:, None] * D + d[None, :], mask=n[:, None] < length, other=0.0)
        s = tl.dot(x, tl.trans(y)) * scale
        s = tl.where((n[None, :] <= m[:, None]) & (n[None, :] < length), s, -1e30)
        new = tl.maximum(most, tl.max(s, 1))
        p = tl.exp(s - new[:, None])
        shrink = tl.exp(most - new)
        total = total * shrink + tl.sum(p, 1)
        found = found * shrink[:, None] + tl.dot(p, z)
        most = new
    tl.store(out + head + m[:, None] * D + d[None, :], found / total[:, None], mask=m[:, None] < length)


def attention(q, k, v):
    out = torch.empty_like(q)
    heads, length, width = q.shape
    kernel[(triton.cdiv(length, 16), heads)](q, k, v, out, length, width ** -0.5, D=width, B=16)
    return out
""",
    "sparse_matvec": HEAD
    + """@triton.jit
def kernel(offsets, columns, values, x, out, B: tl.constexpr):
    row = tl.program_id(0)
    start = tl.load(offsets + row)
    end = tl.load(offsets + row + 1)
    total = tl.zeros((B,), dtype=tl.float32)
    for first in range(start, end, B):
        at = first + tl.arange(0, B)
        inside = at < end
        c = tl.load(columns + at, mask=inside, other=0)
        total += tl.load(values + at, mask=inside, other=0.0) * tl.load(x + c, mask=inside, other=0.0)
    tl.store(out + row, tl.sum(total, 0))


def sparse_matvec(offsets, columns, values, x):
    out = torch.empty(offsets.shape[0] - 1, device=x.device, dtype=torch.float32)
    kernel[(offsets.shape[0] - 1,)](offsets, columns, values, x, out, B=32)
    return out
""",
    "heat_step": HEAD
    + """@triton.jit
def kernel(u, out, rows, width, rate, B: tl.constexpr):
    r = tl.program_id(0)
    c = tl.program_id(1) * B + tl.arange(0, B)
    at = u + r * width + c
    inner = (r > 0) & (r < rows - 1) & (c > 0) & (c < width - 1)
    middle = tl.load(at, mask=c < width, other=0.0)
    around = tl.load(at - width, mask=inner, other=0.0) + tl.load(at + width, mask=inner, other=0.0)
    around += tl.load(at - 1, mask=inner, other=0.0) + tl.load(at + 1, mask=inner, other=0.0)
    new = tl.where(inner, middle + rate * (around - 4 * middle), middle)
    tl.store(out + r * width + c, new, mask=c < width)


def heat_step(u, rate):
    out = torch.empty_like(u)
    kernel[(u.shape[0], triton.cdiv(u.shape[1], 64))](u, out, u.shape[0], u.shape[1], rate, B=64)
    return out
""",
}
