"""What the body of every request is."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class RequestModel(BaseModel):
    """A wrong type is an error; a field we do not know is not, as with other servers of this kind."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)
