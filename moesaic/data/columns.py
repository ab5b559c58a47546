"""Which columns prepared data will have, known before it is prepared."""

from __future__ import annotations

from moesaic.data.quality import QualityScore
from moesaic.errors import UserError
from moesaic.recipe import Recipe
from moesaic.recipe_sections import DataSection, SourceSection
from moesaic.strict import did_you_mean


def check_column(name: str, section: DataSection, place: str) -> None:
    """A UserError where a document would be without a number under this name."""
    for source in section.sources:
        if name not in (known := columns_of(source, section)):
            problem = f'the data would have no column "{name}" for {source.name}{did_you_mean(name, known)}'
            raise UserError(place, problem, "See data.quality, data.scores, data.topics, and columns of a source.")


def columns_of(source: SourceSection, section: DataSection) -> list[str]:
    """Those of its records, and those computed for every document."""
    computed = [*(["quality"] if section.quality else []), *(method.name for method in section.scores)]
    topics = ["topic", "topic_share"] if section.topics is not None else []
    return [*source.columns, *computed, *topics]


def scorers(recipe: Recipe) -> dict[str, QualityScore]:
    """What computes the columns that are computed, by their names; a UserError if a source cannot be scored so."""
    data = recipe.data
    named: dict[str, QualityScore] = {}
    if data.quality is not None:
        named["quality"] = recipe.build("data.quality", QualityScore)
    for number, method in enumerate(data.scores):
        if method.name in named:
            raise UserError("data.scores", f"{method.name} is there twice", "Each becomes a column of its name.")
        named[method.name] = recipe.build(f"data.scores.{number}", QualityScore)
    for scorer in named.values():
        for source in data.sources:
            scorer.check(source.columns, f"data.sources: {source.name}")
    wanted = {name for source in data.sources for name in source.columns}
    if taken := wanted & set(named):
        raise UserError("data.sources", f'the column "{min(taken)}" is also computed', "Give it another name.")
    return named
