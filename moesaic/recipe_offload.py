"""What of a training run lives outside the device: the section `train.offload` of a recipe."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, Field, model_validator

from moesaic.errors import UserError
from moesaic.strict import STRICT, wrong

CPU = "cpu"


class OffloadSection(BaseModel):
    """Offload to the host: models larger than the memory of the GPU."""

    model_config = STRICT

    optimizer: Annotated[str, Field(min_length=1)] | None = Field(
        CPU, description="float32 weights and optimizer state: cpu, or a folder on an NVMe disk; null: on the device"
    )
    on_device: float = Field(
        0.0, ge=0, description="GiB of the device's memory for such state of the first layers, which then stays there"
    )
    delay: bool = Field(False, description="take a step's update while the next one computes, which so does not see it")
    speculative: float = Field(
        0.0, ge=0, description="GiB of host memory to undo updates taken before the gradient norm is known; 0: none"
    )
    cast: Literal["auto", "host", "device"] = Field(
        "auto", description="where gradients become float32; auto: measured. The result is the same"
    )
    activations: bool = Field(False, description="activations wait on the host for the backward pass")

    @model_validator(mode="after")
    def _possible(self) -> OffloadSection:
        if self.delay and self.speculative:
            raise wrong("delay and speculative exclude each other: a delayed update waits for nothing")
        if self.delay and self.on_device:
            raise wrong("delay and on_device exclude each other: the device's share would not be late")
        if self.optimizer is None and (self.delay or self.speculative or self.on_device):
            raise wrong("delay, speculative and on_device are of an optimizer that is offloaded; set optimizer: cpu")
        return self


def check_ranks(offload: OffloadSection | None, ranks: int) -> None:
    """Ranks would reduce gradients that have left for the host by then."""
    if offload is not None and offload.optimizer is not None and ranks > 1:
        problem = f"is for one device, and this run has {ranks} ranks"
        raise UserError("train.offload.optimizer", problem, "Set it to null; activations may be offloaded.")
