"""What is compared by `moesaic align --study`: the section `study` of a recipe."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from moesaic.recipe_sections import Section, Seed


class StudySection(Section):
    """What moesaic align --study compares: every combination of some values of the recipe's keys."""

    axes: dict[str, Annotated[tuple[Any, ...], Field(min_length=1)]] = Field(
        {}, description="key of the recipe, or model -> the values it takes in turn"
    )
    seeds: tuple[Seed, ...] = Field((0, 1, 2), min_length=1, description="each combination is run with each")
    measure: str = Field("accuracy", description="the metric of the last stage that is compared; its newest value")
