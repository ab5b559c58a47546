"""What happens to a finished tile of a Hopper matmul before it leaves for memory."""

# mypy: allow-untyped-defs, allow-incomplete-defs
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

tensor_store = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global  # renamed after 3.6

# Two dozen arguments read better in rows than in columns.
# fmt: off


@gluon.jit
def send(out_map, row, column, staging, tile):
    """Write one tile through shared memory with the copy engine, once the tile that was there has left."""
    tma.store_wait(0)
    staging.store(tile)
    fence_async_shared()
    tensor_store(out_map, [row, column], staging)


@gluon.jit
def send_part(out_map, row, column, staging, tile, left, ROWS: gl.constexpr):
    """The same in pieces of 64 rows, as many as are `left`: those below are another expert's."""
    tma.store_wait(0)
    staging.store(tile)
    fence_async_shared()
    for part in gl.static_range(ROWS // 64):
        if part * 64 < left:
            tensor_store(out_map, [row + part * 64, column], staging.slice(part * 64, 64))


@gluon.jit
def quick_sigmoid(x):
    """1 / (1 + exp(-x)) in four instructions: this epilogue is bound by them. Good to about 1e-6."""
    return gl.inline_asm_elementwise(
        "{ .reg .f32 t; mul.f32 t, $1, 0fBFB8AA3B; ex2.approx.ftz.f32 t, t; "
        "add.f32 t, t, 0f3F800000; rcp.approx.ftz.f32 $0, t; }",
        "=f,f",
        [x],
        gl.float32,
        is_pure=True,
        pack=1,
    )


@gluon.jit
def finish_chained(
    grads, c_map, h_map, a, ready, empty, iteration, weights, dots, sources, ROWS, start, row, count, n, width, chunks,
    HALF: gl.constexpr, BN: gl.constexpr, STEP: gl.constexpr, STAGES: gl.constexpr,
):
    """SwiGLU backwards, 64 columns at a time: from the gradients of the unweighted hidden rows to those of gate and up,
    of the routing weights, and the weighted hidden rows; each tile is written over what it was made from.
    A loop: as straight code for the whole tile it took several times as long."""
    layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, STEP, 16])
    for chunk in range(chunks):
        gate_stage = iteration % STAGES
        up_stage = (iteration + 1) % STAGES
        column = n * BN + chunk * STEP
        mbarrier.wait(ready.index(gate_stage), (iteration // STAGES) & 1)
        mbarrier.wait(ready.index(up_stage), ((iteration + 1) // STAGES) & 1)
        for part in gl.static_range(HALF // 64):
            gates = a.index(gate_stage).slice(part * 64, 64)
            ups = a.index(up_stage).slice(part * 64, 64)
            hiddens = grads.index(chunk).slice(part * 64, 64)
            position = row + part * 64 + gl.arange(0, 64, gl.SliceLayout(1, layout))
            source = gl.load(sources + start + position, mask=position < count, other=0)
            scale = gl.load(weights + source, mask=position < count, other=0.0)[:, None]
            gate = gates.load(layout).to(gl.float32)
            grad = hiddens.load(layout).to(gl.float32)
            up = ups.load(layout).to(gl.float32)
            sigmoid = quick_sigmoid(gate)
            silu = gate * sigmoid
            hidden = silu * up
            gl.store(dots + (column // STEP) * ROWS + start + position, gl.sum(grad * hidden, 1))
            grad = grad * scale
            hiddens.store((scale * hidden).to(gl.bfloat16))
            gates.store((grad * up * (sigmoid + silu * (1.0 - sigmoid))).to(gl.bfloat16))
            ups.store((grad * silu).to(gl.bfloat16))
        fence_async_shared()
        tensor_store(h_map, [start + row, column], grads.index(chunk))
        tensor_store(c_map, [start + row, column], a.index(gate_stage))
        tensor_store(c_map, [start + row, column + width], a.index(up_stage))
        tma.store_wait(0)
        mbarrier.arrive(empty.index(gate_stage))
        mbarrier.arrive(empty.index(up_stage))
        iteration += 2


@gluon.jit
def halves(tile, ROWS: gl.constexpr, WIDTH: gl.constexpr):
    return tile.reshape([ROWS, 2, WIDTH]).permute([0, 2, 1]).split()
