"""Ways to make a model smaller, one file each, found by name: `moesaic compress DIR --method NAME --out OUT`.

Most look at one matrix at a time (`ByMatrix`), with what flowed into it; the walk over the layers is shared. Others
change the model as a whole (`Compressor`): fewer experts, fewer layers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, ClassVar

from torch import Tensor

from moesaic.compress.calibration_statistics import InputStatistics, Watched
from moesaic.kernels.quantized import QuantizedMatrix
from moesaic.model.block import Block
from moesaic.model.config import ModelConfig

if TYPE_CHECKING:
    from moesaic.compress.job import Job

Maker = Callable[[str, Tensor, InputStatistics], QuantizedMatrix | Tensor]


class Compressor(ABC):
    """Puts what it makes on the job's shelf, by the names of the parameters of the model it returns."""

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
    def ends_bits(self) -> int:
        """Of the embedding and the output matrix; 0 leaves them as they are."""
        return 8


class ByMatrix(Compressor):
    """Few bits, or zeros, for one matrix after the other."""

    @property
    def feels(self) -> bool:
        """Whether moments are weighed by how much the layer's output feels each token."""
        return self.reads_text

    @abstractmethod
    def matrix(self, name: str, weight_OI: Tensor, seen: InputStatistics) -> QuantizedMatrix | Tensor:
        """A matrix made smaller, or a plain one with other values. An expert's number is the last of `name`."""

    def maker(self, job: Job) -> Maker:
        """What makes the matrices of this job; here is the place to look at the whole model first."""
        return self.matrix

    def end_bits(self, job: Job, name: str) -> int:
        """Of the embedding or the output matrix, where they are made smaller at all."""
        return job.ends_bits

    def prepare(self, block: Block, watched: Watched) -> dict[str, Tensor]:
        """Change a layer before its matrices are taken; returns the small parameters that are new."""
        return {}

    def run(self, job: Job) -> ModelConfig:
        from moesaic.compress.layers import walk

        walk(job, self)
        return job.config
