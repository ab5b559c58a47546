"""What the functions of the native library take."""

from __future__ import annotations

import ctypes

POINTER, LONG, INT, FLOAT = ctypes.c_void_p, ctypes.c_long, ctypes.c_int, ctypes.c_float
SIGNATURES = {
    "linear": [POINTER] * 4 + [LONG] * 4 + [INT],
    "rms_norm": [POINTER] * 3 + [LONG] * 2 + [FLOAT, INT],
    "heads": [POINTER] * 7 + [LONG] * 6 + [FLOAT, INT, INT],
    "swiglu": [POINTER] * 2 + [LONG] * 2 + [INT] * 2,
    "route": [POINTER] * 4 + [LONG] * 5 + [INT] * 2 + [FLOAT, INT],
    "experts": [POINTER] * 7 + [LONG] * 5 + [INT] * 2,
    "rms_norm_back": [POINTER] * 5 + [LONG] * 2 + [FLOAT, INT],
    "heads_back": [POINTER] * 11 + [LONG] * 5 + [FLOAT, INT, INT],
    "swiglu_back": [POINTER] * 3 + [LONG] * 2 + [INT],
    "layers": [POINTER, LONG] + [POINTER] * 5 + [LONG] + [POINTER] * 3 + [LONG] * 5 + [POINTER, INT],
    "attend": [POINTER] * 11 + [LONG] * 11 + [FLOAT, INT, INT],
    "quantized_layers": [POINTER, LONG] + [POINTER] * 5 + [LONG] + [POINTER] * 3 + [LONG] * 5 + [POINTER, INT],
    "quantized_linear": [POINTER] * 6 + [LONG] * 7 + [INT],
    "select_tokens": [POINTER] * 4 + [LONG] * 6 + [FLOAT, INT],
    "attend_latents": [POINTER] * 4 + [LONG] * 6 + [FLOAT, INT],
    "attend_to_chosen": [POINTER] * 5 + [LONG] * 9 + [FLOAT, INT],
    "attend_retained": [POINTER] * 6 + [LONG] * 4 + [FLOAT, INT],
    "layer_norm": [POINTER] * 5 + [LONG] * 2 + [FLOAT, INT],
    "activate": [POINTER] + [LONG] * 3 + [INT, LONG, INT],
    "pack": [POINTER] * 2 + [LONG] * 2,
    "packed_numbers": [LONG] * 2,
    "packed_linear": [POINTER] * 4 + [LONG] * 3,
    "bytes_room": [POINTER],
    "pack_bytes": [POINTER] * 2,
    "encode": [POINTER, LONG] + [POINTER] * 2 + [LONG, INT],
    "delta_rule": [POINTER] * 13 + [LONG] * 8 + [INT],
    "attend_back": [POINTER] * 10 + [LONG] * 9 + [FLOAT, INT],
}
NUMBERS = ("packed_numbers", "bytes_room")  # what answers with a number
