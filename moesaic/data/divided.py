"""Mix by a column in place of sources: its values are then what phases weigh, reports name and losses are told of.

    data: {mix_by: topic, phases: [{share: 1, weights: {topic3: 1}}]}
    data, section = divided(Shards("out/data"), recipe.data)

Everything that goes by a document's domain goes by its value: nothing else need know. Without phases, each value weighs
as many tokens as it has, which is the data as it comes.
"""

from __future__ import annotations

import copy

import numpy as np

from moesaic.data.shards import Shards
from moesaic.errors import UserError
from moesaic.recipe_sections import DataSection, SourceSection

MAX_VALUES = 4096


def divided(data: Shards, section: DataSection) -> tuple[Shards, DataSection]:
    """As they are, without `mix_by`."""
    if section.mix_by is None:
        return data, section
    column = data.column(section.mix_by)
    values, value_D = np.unique(column, return_inverse=True)
    if not np.array_equal(values, np.round(values)) or len(values) > MAX_VALUES:
        problem = f'the column "{section.mix_by}" is not of at most {MAX_VALUES} whole numbers'
        raise UserError("data.mix_by", problem, "Name one such as topic, which data.topics makes.")
    view = copy.copy(data)
    view.domains = [f"{section.mix_by}{value:g}" for value in values]
    view.__dict__["domain"] = value_D.astype(np.uint16)
    trained = ~data.held_out
    tokens = np.bincount(value_D[trained], data.lengths[trained], minlength=len(values))
    sources = [SourceSection(name=name, path="", weight=size) for name, size in zip(view.domains, tokens) if size]
    return view, section.model_copy(update={"sources": tuple(sources), "mix_by": None})
