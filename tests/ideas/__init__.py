"""What each method is without its idea, and the test that misses it: `tests/mutations.py` removes them in turn."""

from tests.ideas import align, compress, data, evaluate, pretraining, rewards, serve, train, worlds
from tests.ideas.idea import Idea

__all__ = ["IDEAS", "Idea"]

IDEAS: list[Idea] = [
    *train.IDEAS,
    *data.IDEAS,
    *pretraining.IDEAS,
    *align.IDEAS,
    *rewards.IDEAS,
    *compress.IDEAS,
    *serve.IDEAS,
    *worlds.IDEAS,
    *evaluate.IDEAS,
]
