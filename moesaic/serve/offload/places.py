"""Where offloaded weights wait, and where on disk the parts of each parameter are."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Literal

import torch

from moesaic.model.families import Place

Home = Literal["disk", "host"]
HOMES = ("disk", "host")


def default_home(device: torch.device) -> Home:
    return "host" if device.type == "cuda" else "disk"


def by_parameter(places: Sequence[Place]) -> dict[str, list[Place]]:
    found: dict[str, list[Place]] = defaultdict(list)
    for place in places:
        if not place.copy:
            found[place.parameter].append(place)
    return found
