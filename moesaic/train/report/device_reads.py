"""Read values off a device without waiting for it: they are copied asynchronously, and read once they have arrived."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


class DeviceRead:
    """Some tensors of one step on their way to the host, each device's in one copy.

    What they held when the reading was made is what is read: the caller may overwrite them at once.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._sizes = [tensor.numel() for tensor in tensors]
        self._parts: list[tuple[list[int], Tensor, Any]] = []
        for device in dict.fromkeys(tensor.device for tensor in tensors):
            places = [place for place, tensor in enumerate(tensors) if tensor.device == device]
            # Double precision holds every float32 and every count; an empty one first makes it the common type.
            wide = torch.float64 if device.type in ("cpu", "cuda") else torch.float32
            flat = torch.cat(
                [torch.empty(0, dtype=wide, device=device)] + [tensors[place].detach().reshape(-1) for place in places]
            )
            event = None
            if device.type == "cuda":
                host = torch.empty(flat.shape, dtype=flat.dtype, pin_memory=True)
                host.copy_(flat, non_blocking=True)
                event = torch.cuda.Event()
                event.record(torch.cuda.current_stream(device))
                flat = host
            self._parts.append((places, flat, event))

    def ready(self) -> bool:
        """Whether `numbers` would return without waiting."""
        return all(event.query() if event is not None else flat.device.type == "cpu" for _, flat, event in self._parts)

    def numbers(self) -> list[NDArray[np.float64]]:
        """The numbers of each tensor, flat; waits for those that have not arrived."""
        found: dict[int, NDArray[np.float64]] = {}
        for places, flat, event in self._parts:
            if event is not None:
                event.synchronize()
            values = flat.cpu().double().numpy()
            ends = np.cumsum([self._sizes[place] for place in places])[:-1]
            found.update(zip(places, np.split(values, ends)))
        return [found[place] for place in range(len(self._sizes))]
