"""Where offloaded weights wait."""

from __future__ import annotations

from typing import Literal

import torch

Home = Literal["disk", "host"]
HOMES = ("disk", "host")


def default_home(device: torch.device) -> Home:
    return "host" if device.type == "cuda" else "disk"
