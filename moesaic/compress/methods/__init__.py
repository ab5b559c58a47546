"""Ways to make a model smaller, one file each, found by name: `moesaic compress DIR --method NAME --out OUT`.

Most compress one matrix at a time with the statistics of its inputs (`LayerwiseCompressor` in compress/layerwise.py).
Others change the model as a whole (`Compressor`): fewer experts, fewer layers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar

from moesaic.model.config import ModelConfig

if TYPE_CHECKING:
    from moesaic.compress.job import Job


class Compressor(ABC):
    """Puts what it makes into the job's layer store, by the names of the parameters of the model it returns."""

    # Whether a text is read through the model.
    reads_text: ClassVar[bool] = True
    # Whether only our own layout can hold what it makes.
    own_layout: ClassVar[bool] = False

    @abstractmethod
    def run(self, job: Job) -> ModelConfig: ...

    @property
    def not_joined(self) -> str:
        """What `transformers` cannot join to the experts of a mixture in what this makes, if there is such a thing: it
        takes symmetric, packed codes of one size."""
        return "" if getattr(self, "symmetric", True) else "codes with zero points"

    @property
    def layouts(self) -> tuple[str, ...]:
        """Those that can hold what it makes; the first is the default."""
        return ("moesaic",) if self.own_layout else ("moesaic", "compressed-tensors")

    @property
    def ends_bits(self) -> int:
        """Of the embedding and the output matrix; 0 leaves them as they are."""
        return 8
