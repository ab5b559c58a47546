"""What each method is without its idea, and the test that misses it: `tests/mutations.py` removes them in turn."""

from tests.ideas import align, compress, data, evaluate, pretraining, serve, train, worlds
from tests.ideas.idea import Idea

__all__ = ["IDEAS", "Idea"]

IDEAS: list[Idea] = [
    *train.IDEAS,
    *data.IDEAS,
    *pretraining.IDEAS,
    *align.IDEAS,
    *compress.IDEAS,
    *serve.IDEAS,
    *worlds.IDEAS,
    *evaluate.IDEAS,
]
