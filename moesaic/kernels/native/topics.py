"""How the native code that samples topics (topics.c, topics_draw.c) is called."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

from moesaic.kernels import native

_POINTER, _LONG, _INT, _FLOAT, _DOUBLE = ctypes.c_void_p, ctypes.c_long, ctypes.c_int, ctypes.c_float, ctypes.c_double
_BLOCK = [_POINTER, _INT, _POINTER, _POINTER, _LONG, _POINTER, _POINTER, _LONG]
SIGNATURES: dict[str, list[Any]] = {
    "topics_alias": [_POINTER] * 2 + [_LONG] * 3 + [_INT],
    "topics_frequencies": [_POINTER, _INT, _POINTER, _LONG] + [_POINTER] * 2 + [_LONG],
    "topics_sweep": [*_BLOCK, *[_POINTER] * 3, _LONG, _LONG, _FLOAT, _DOUBLE, _FLOAT, _INT, _POINTER],
    "topics_draw": [*_BLOCK, *[_POINTER] * 2, _LONG, _FLOAT, _FLOAT, ctypes.c_uint64],
    "topics_count": [*_BLOCK[:-1], *[_POINTER] * 2, _LONG],
}


@cache
def library() -> Any:
    """The functions above; None where there is no compiler."""
    kernels = native.kernels()
    if kernels is None:
        return None
    for name, kinds in SIGNATURES.items():
        function = getattr(kernels.library, name)
        function.argtypes, function.restype = kinds, _LONG
    kernels.library.topics_alias.restype = kernels.library.topics_frequencies.restype = None
    return kernels.library
