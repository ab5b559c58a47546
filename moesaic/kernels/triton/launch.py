"""Launch a kernel with little work for the host: where steps are no CUDA graphs, that is what short ones wait for.

Triton looks at every argument anew at each launch, builds a key of text, and checks what may have changed: some 30 us.
Here a launch is found again by what its arguments can be compiled for: Triton's own rules (dtypes, multiples of 16, 1).
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from collections.abc import Callable
from typing import Any

import torch
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from moesaic.kernels.triton.compile_ahead import only_compiling

_found: dict[Any, tuple[Any, tuple[Any, ...]]] = {}  # the kernel, and its constants


def launch(kernel, grid: tuple[int, ...], *arguments, **options) -> None:
    """`kernel[grid](...)`. Arguments are in the kernel's order and not compiled in; `options` are its constants, all of
    them, and those of the compiler."""
    if not isinstance(kernel, JITFunction) or only_compiling():  # interpreted, or not launched at all
        kernel[grid](*arguments, **options)
        return
    device = driver.active.get_current_device()
    key = (kernel.fn, device, tuple([KINDS.get(type(one), kind_of)(one) for one in arguments]), tuple(options.items()))
    known = _found.get(key)
    if known is None:
        compiled = kernel[grid](*arguments, **options)
        if hasattr(compiled, "packed_metadata"):
            constants = tuple(options[name] for name in kernel.arg_names[len(arguments) :])
            _found[key] = (compiled, constants)
        return
    compiled, constants = known
    wide = grid + (1, 1)
    stream = driver.active.get_current_stream(device)
    compiled.run(
        *wide[:3], stream, compiled.function, compiled.packed_metadata, None, None, None, *arguments, *constants
    )


def kind_of(argument):
    """All that a kernel is compiled for; a tensor map, if nothing else."""
    for known in (torch.Tensor, int):  # a parameter, a number with a name
        if isinstance(argument, known):
            return KINDS[known](argument)
    return argument.base.dtype, *argument.block_shape, id(argument.layout)


KINDS: dict[type, Callable[[Any], Any]] = {
    torch.Tensor: lambda tensor: (tensor.dtype, tensor.data_ptr() & 15 == 0),
    torch.nn.Parameter: lambda tensor: (tensor.dtype, tensor.data_ptr() & 15 == 0),
    int: lambda number: (number == 1, number & 15 == 0, -(2**31) <= number < 2**31, number < 2**63),
    bool: lambda truth: truth,
    float: lambda _: float,
    type(None): lambda _: None,
}
