"""Which columns prepared data will have, known before it is prepared."""

from __future__ import annotations

from moesaic.errors import UserError
from moesaic.recipe_sections import DataSection, SourceSection
from moesaic.strict import did_you_mean


def check_column(name: str, section: DataSection, place: str) -> None:
    """A UserError where a document would be without a number under this name."""
    for source in section.sources:
        if name not in (known := columns_of(source, section)):
            problem = f'the data would have no column "{name}" for {source.name}{did_you_mean(name, known)}'
            raise UserError(place, problem, "See data.quality, data.scores, and columns of a source.")


def columns_of(source: SourceSection, section: DataSection) -> list[str]:
    """Those of its records, and those computed for every document."""
    computed = [*(["quality"] if section.quality else []), *(method.name for method in section.scores)]
    return [*source.columns, *computed]
