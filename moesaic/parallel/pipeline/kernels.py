"""What makes a whole forward of the model one stage's: kernels in which the first embedding is the rows that came from
the stage before, and the last norm leaves rows alone where the stage is not the last.

So an objective runs on the last stage as it is, and every stage runs `Model.forward`, where FSDP and hooks expect it.
"""

from __future__ import annotations

from torch import Tensor, nn

from moesaic.errors import UserError
from moesaic.kernels.interface import Kernels
from moesaic.kernels.wrapped import WrappedKernels


class StageKernels(WrappedKernels):
    def __init__(self, plain: Kernels, norm: nn.Module) -> None:
        super().__init__(plain)
        self.norm = norm  # the model's last
        self._finishes = True
        self._given_TD: Tensor | None = None
        self._tokens_T: Tensor | None = None

    def enter(self, tokens_T: Tensor, given_TD: Tensor | None, finishes: bool) -> None:
        """The next forward is of these tokens, whose rows came from elsewhere if `given_TD` is not None."""
        self._tokens_T = None if given_TD is None else tokens_T
        self._given_TD, self._finishes = given_TD, finishes

    def embed(self, tokens_T: Tensor, table_VD: Tensor, site: str = "") -> Tensor:
        if self._tokens_T is None or tokens_T is not self._tokens_T:  # the first stage, or a prediction layer's tokens
            return self.plain.embed(tokens_T, table_VD, site)
        given_TD, self._given_TD = self._given_TD, None
        if given_TD is None:
            problem = "this objective runs the model more than once for a batch, and a pipeline runs it once"
            raise UserError("parallel.pp", problem, "Train with pp=1.")
        return given_TD

    def rms_norm(self, x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
        if not self._finishes and weight_D is self.norm.weight:
            return x_TD
        return self.plain.rms_norm(x_TD, weight_D, eps)
