"""What prepared data is about: topics, each named by its words, and a column with every document's.

moesaic topics out/data
moesaic topics out/data --topics 16 --iterations 50 --seed 1
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from moesaic.cli.app import JsonFlag, print_json
from moesaic.cli.progress import resumable

ORDER = 32


def command(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Data that moesaic prepare made.")],
    topics: Annotated[int, typer.Option(help="How many.", min=2, max=4096)] = 32,
    iterations: Annotated[int, typer.Option(help="Every token has its topic drawn once in one.", min=1)] = 100,
    common: Annotated[
        float, typer.Option(help="Leave out tokens that are in a larger share of the documents.", min=1e-9, max=1)
    ] = 0.25,
    rare: Annotated[int, typer.Option(help="Leave out tokens that are in fewer documents.", min=1)] = 3,
    alpha: Annotated[float, typer.Option(help="Prior of a document's topics.", min=1e-9)] = 0.1,
    beta: Annotated[float, typer.Option(help="Prior of a topic's words.", min=1e-9)] = 0.01,
    steps: Annotated[
        int, typer.Option(help="0: topics are drawn (SaberLDA); else proposals (WarpLDA).", min=0, max=8)
    ] = 0,
    seed: Annotated[int, typer.Option(help="Another seed finds other topics.", min=0)] = 0,
    json: JsonFlag = False,
) -> None:
    """Find the topics of prepared data, and keep each document's as a column.

    The columns topic and topic_share are then there for mixtures (data.mix_by), quantiles and curricula. Killed or
    stopped at any moment, the same command resumes.
    """
    from moesaic.data.preparation.prepare import Status
    from moesaic.data.shards import Shards
    from moesaic.data.topics.find import FOLDER, find_topics
    from moesaic.recipe_sections import TopicsSection

    section = TopicsSection(
        topics=topics, iterations=iterations, common=common, rare=rare, alpha=alpha, beta=beta, steps=steps, seed=seed
    )
    data = Shards(directory)
    with resumable("topics", directory, lambda data: (data / FOLDER).is_dir()) as on_status:
        found = find_topics(data, section, lambda *at: on_status(Status("finding topics", *at)))
    if json:
        return print_json({"directory": directory, **vars(found)})
    print(found.text())
    print("Next: data.mix_by=topic mixes by them, and moesaic mix finds the weights.")
