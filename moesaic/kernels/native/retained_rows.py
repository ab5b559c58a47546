"""Compact requests as native code reads them (`retained.h`): what each layer of each request retains, and where."""

from __future__ import annotations

import numpy as np

RETAINED = np.dtype(
    [
        *((name, np.int64) for name in ("rows", "counts", "coded", "scores", "queries")),  # addresses
        *((name, np.int64) for name in ("stride", "plain", "blocks", "rows_each", "tokens", "bits")),
        *((name, np.int64) for name in ("key_width", "value_width", "position", "last", "scored")),
        ("decay", np.float64),
    ]
)
