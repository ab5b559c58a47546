"""The arguments of a call from a seed: made in the sandbox for a submission, and again out here for the reference."""

from __future__ import annotations

from typing import Any

import torch

# Of an argument: {"normal": shape}, {"below": n, "shape": shape}, {"offsets": rows, "most": n, "total": n} of the rows
# of a sparse matrix, or {"value": x}.
Spec = dict[str, Any]


def made(specs: list[Spec], seed: int, device: str = "cpu") -> list[Any]:
    source = torch.Generator().manual_seed(seed)
    found: list[Any] = []
    for spec in specs:
        if "normal" in spec:
            found.append(torch.randn(spec["normal"], generator=source))
        elif "offsets" in spec:
            lengths = torch.randint(0, spec["most"] + 1, (spec["offsets"],), generator=source)
            lengths[-1] = spec["total"] - lengths[:-1].sum()
            found.append(torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]).int())
        elif "below" in spec:
            found.append(torch.randint(0, spec["below"], spec["shape"], generator=source).int())
        else:
            found.append(spec["value"])
    return [value.to(device) if isinstance(value, torch.Tensor) else value for value in found]
