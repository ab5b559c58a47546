"""What `trial.py` runs in the sandbox: a submission on inputs made here, and what it returned, how it was measured.

It runs as a program of its own inside the jail. On its input is JSON with `source`, `entry`, `cases` (arguments as
`inputs.py` specifies them, and a seed each) and `timed`; on its output JSON under a mark. What is right is not known
here. Everything that measures is taken hold of before a line of the submission runs.
"""

from __future__ import annotations

import base64
import importlib.util
import json
import os
import sys
import time
from typing import Any

os.environ["TRITON_INTERPRET"] = "1" if not os.path.exists("/dev/nvidiactl") else "0"

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from moesaic.worlds.kernels.inputs import made

HARMLESS = (
    "empty", "zeros", "zero_", "fill_", "new_empty", "view", "reshape", "_unsafe_view", "_reshape_alias", "as_strided",
    "alias", "detach", "expand", "clone", "copy_", "_to_copy", "set_", "lift_fresh",
)  # fmt: skip


class OnlyKernels(TorchDispatchMode):
    """Tensors may be made and laid out; whatever computes has to be a kernel."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().split("::")[1].split(".")[0]
        if not name.startswith(HARMLESS):
            raise RuntimeError(f"it computes with torch ({name}), not with a kernel")
        return func(*args, **(kwargs or {}))


class Traffic:
    """Bytes that kernels load and store, and how many programs they are, counted by Triton's interpreter."""

    def __init__(self) -> None:
        self.loaded = self.stored = self.programs = 0
        from triton.runtime import interpreter

        builder = interpreter.InterpreterBuilder
        load, store, grid = builder.create_masked_load, builder.create_masked_store, builder.set_grid_idx

        def masked_load(own: Any, ptrs: Any, mask: Any, *rest: Any, **more: Any) -> Any:
            found = load(own, ptrs, mask, *rest, **more)
            self.loaded += int(mask.data.sum()) * found.data.dtype.itemsize
            return found

        def masked_store(own: Any, ptrs: Any, value: Any, mask: Any, *rest: Any, **more: Any) -> Any:
            self.stored += int(mask.data.sum()) * value.data.dtype.itemsize
            return store(own, ptrs, value, mask, *rest, **more)

        def set_grid_idx(own: Any, *place: int) -> Any:
            self.programs += 1
            return grid(own, *place)

        builder.create_masked_load, builder.create_masked_store = masked_load, masked_store
        builder.set_grid_idx = set_grid_idx


def told(result: Any, before: list[Any], after: list[Any]) -> dict[str, Any]:
    if not isinstance(result, torch.Tensor):
        return {"problem": f"it returned {type(result).__name__}, not a tensor"}
    for one, other in zip(before, after, strict=True):
        if isinstance(one, torch.Tensor) and not torch.equal(one, other):
            return {"problem": "it changed its arguments"}
    plain = result.detach().to("cpu", torch.float32).contiguous()
    return {"shape": list(plain.shape), "values": base64.b64encode(plain.numpy().tobytes()).decode()}


def seconds_of(function: Any, arguments: list[Any], clock: Any = time.perf_counter) -> float:
    """The median of several calls, with the cache flushed between them and the device waited for."""
    flush, found = torch.empty(64 << 20, dtype=torch.int8, device="cuda"), []
    for _ in range(3):
        function(*arguments)
    for _ in range(20):
        flush.zero_()
        torch.cuda.synchronize()
        start = clock()
        function(*arguments)
        torch.cuda.synchronize()
        found.append(clock() - start)
    return sorted(found)[len(found) // 2]


def main() -> None:
    asked = json.load(sys.stdin)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    out, dumps = os.dup(1), json.dumps
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what a submission prints is nobody's business
    traffic = Traffic() if device == "cpu" else None
    with open("submission.py", "w", encoding="utf-8") as file:
        file.write(asked["source"])
    answer: dict[str, Any] = {"results": [], "device": device}
    try:
        spec = importlib.util.spec_from_file_location("submission", "submission.py")
        assert spec and spec.loader
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        function = getattr(module, asked["entry"])
        for specs, seed in asked["cases"]:
            arguments = made(specs, seed, device)
            given = [value.clone() if isinstance(value, torch.Tensor) else value for value in arguments]
            with OnlyKernels():
                result = function(*arguments)
            answer["results"].append(told(result, given, arguments))
            # The same tensors with other numbers in them: a result that was kept from before is wrong now.
            for value, other in zip(arguments, made(specs, seed + 1, device), strict=True):
                if isinstance(value, torch.Tensor):
                    value.copy_(other)
            with OnlyKernels():
                result = function(*arguments)
            answer["results"].append(told(result, made(specs, seed + 1, device), arguments))
        if traffic is not None:
            answer |= {"loaded": traffic.loaded, "stored": traffic.stored, "programs": traffic.programs}
        else:
            arguments = made(asked["timed"], asked["cases"][0][1], device)
            answer["seconds"] = seconds_of(function, arguments)
            answer["sum"] = float(function(*arguments).double().sum())
    except BaseException as error:
        answer["error"] = f"{type(error).__name__}: {error}"[-600:]
    os.write(out, b"\n" + asked["mark"].encode() + dumps(answer).encode())


if __name__ == "__main__":
    main()
