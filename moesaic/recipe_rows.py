"""Rows that records bring along in place of tokens: the section `rows` of a source in a recipe."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, Field

from moesaic.strict import STRICT


class RowsSection(BaseModel):
    """Embeddings of images or speech in files that records name: one file for each mark in a record's text."""

    model_config = STRICT

    field: str = Field("rows", description="names a file, or several: .npy or .safetensors, rows by numbers")
    mark: str = Field("<rows>", min_length=1, description="what stands in the text where the rows of a file come")
    size: Annotated[int, Field(gt=0)] = Field(description="numbers of a row: those of the model's hidden states")
