"""The mutual index of chunks and entities (KAG), searched by personalised PageRank (HippoRAG): what a question needs
and does not name is reached through what the chunks it does find name.

A walk starts at the entities that a question names and at the chunks that words and vectors found, the best much more
often than the next; it goes from a chunk to what it names, from an entity to chunks that name it or are about it, along
triples and between names of one thing. How often it comes by is weighed with what words and vectors make of a chunk.

The constants were chosen on samples that are in no reported figure (bench/know_retrieval.py says which); around them
recall is flat.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from scipy import sparse

from moesaic.know.graph.graph import Graph
from moesaic.know.search.fusion import Ranked, best


@dataclass(frozen=True)
class Walk:
    """How a walk starts and goes on."""

    on: float = 0.7  # of going on from a node, rather than back to a start
    steps: int = 12  # of power iteration: always as many, so that a search is reproducible
    starts: int = 20  # chunks found by words and vectors at which it may start
    sharpness: float = 13.0  # of those, a chunk that scores 0.1 more is started at exp(1.3) as often
    plain: float = 0.1  # of those starts, the part that goes by the plain score: what was found stays in reach
    entities: float = 1.0  # starts at entities of the question, for one at a chunk
    title: float = 5.0  # an edge to what a chunk is about, for one to what it names once
    triple: float = 0.2  # an edge between two entities of a triple
    synonym: float = 1.0  # an edge between two names of one thing
    found: float = 1.0  # how much the score of words and vectors counts beside the walk, in exponents


class Mutual:
    def __init__(self, graph: Graph, walk: Walk | None = None) -> None:
        self.graph, self.walk = graph, walk or Walk()

    @cached_property
    def named_by(self) -> np.ndarray:
        """How many chunks name each entity."""
        both = self.graph.counts + self.graph.titles
        return np.bincount(both.indices, minlength=len(self.graph.entities))

    @cached_property
    def transition(self) -> sparse.csr_array:
        """From each node (a column) to each: rows first, then entities. A rare entity leads to its chunks more surely
        than one that is named everywhere."""
        graph, walk = self.graph, self.walk
        rows, entities = graph.rows, len(graph.entities)
        rarity = np.log1p(rows / np.maximum(self.named_by, 1)) / np.log1p(max(rows, 1))
        counts = graph.counts.copy()
        counts.data = np.log1p(counts.data)
        about = graph.titles.sum(axis=0)  # chunks of a long document share the weight of one
        titles = graph.titles @ sparse.diags_array(walk.title / np.maximum(about, 1))
        names = (counts + titles) @ sparse.diags_array(rarity)
        said, same = graph.said, graph.synonyms
        between = sparse.csr_array(
            (
                np.concatenate([np.full(len(said), walk.triple), np.full(len(same), walk.synonym)]),
                (np.concatenate([said[:, 0], same[:, 0]]), np.concatenate([said[:, 2], same[:, 1]])),
            ),
            shape=(entities, entities),
        )
        whole = sparse.block_array(
            [[sparse.csr_array((rows, rows)), names], [names.T, between + between.T]], format="csr"
        )
        out = np.maximum(np.asarray(whole.sum(axis=0)).ravel(), 1e-12)
        return sparse.csr_array(whole @ sparse.diags_array(1.0 / out), dtype=np.float32)

    def search(self, query: str, found: Ranked, k: int) -> Ranked:
        """The `k` best rows for a question of which `found` is what words and vectors made, scores from 0 to 1."""
        found_R = np.zeros(self.graph.rows)
        found_R[found[0]] = found[1]
        visits_R = self.visits(query, found)
        score_R = visits_R * np.exp(self.walk.found * 2 * found_R)
        rows = np.flatnonzero(score_R > 0)
        if not len(rows):
            return found[0][:k], found[1][:k]
        return best(rows, score_R[rows], k)

    def visits(self, query: str, found: Ranked) -> np.ndarray:
        """How often the walk comes by each row."""
        rows = self.graph.rows
        start = np.zeros(rows + len(self.graph.entities), dtype=np.float32)
        first, scores = found[0][: self.walk.starts], found[1][: self.walk.starts]
        if len(first):
            often = np.exp(self.walk.sharpness * (scores - scores.max()))
            plainly = scores / max(float(scores.sum()), 1e-9)
            start[first] = (1 - self.walk.plain) * often / often.sum() + self.walk.plain * plainly
        named = self.graph.linker.mentioned(query)
        # One that few chunks name says more of what is asked.
        weights = {number: sure / max(1, self.named_by[number]) for number, sure in named.items()}
        for number, weight in weights.items():
            start[rows + number] = self.walk.entities * weight / sum(weights.values())
        if not start.any():
            return np.zeros(rows, dtype=np.float32)
        start /= start.sum()
        at = start
        for _ in range(self.walk.steps):
            at = self.walk.on * (self.transition @ at) + (1 - self.walk.on) * start
        return at[:rows]
