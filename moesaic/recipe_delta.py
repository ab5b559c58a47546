"""Layers with a state in place of attention: the section `model.delta` of a recipe."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, Field

from moesaic.strict import STRICT

Count = Annotated[int, Field(gt=0)]


class DeltaSection(BaseModel):
    """A gated delta rule in place of attention: a state of fixed size for each sequence, whatever its length."""

    model_config = STRICT

    every: Count = Field(4, description="each such layer, the last of so many, keeps its attention")
    key_heads: Count = Field(4, description="heads of queries and keys")
    heads: Count = Field(8, description="heads with a state, of which several share a query and a key")
    key_size: Count = 32
    value_size: Count = 32
    width: int = Field(4, ge=2, description="tokens that the convolution before it mixes")
