"""From prepared data to a topic for each document: columns `topic` and `topic_share`, and what each topic is about.

    found = find_topics(Shards("out/data"), TopicsSection(topics=32))
    print(found.text())

The columns lie beside the shards like any other that is computed later; topics/topics.json says what was found, and
under which settings: with the same, nothing is done again, and a killed search goes on from its last iteration.
A document without a single word in the model is given the topic that is the most frequent in its source.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from moesaic import atomic
from moesaic.data.shards import Shards
from moesaic.data.tokenizer_training import load_tokenizer
from moesaic.data.topics.corpus import Words, choose_words
from moesaic.data.topics.sampler import Sampler
from moesaic.json_files import read_json
from moesaic.recipe_sections import TopicsSection
from moesaic.units import plural

FOLDER, RESULT = "topics", "topics.json"
TOPIC, SHARE = "topic", "topic_share"
SHOWN = 8  # words that name a topic


@dataclass(frozen=True)
class Topic:
    number: int
    words: list[str]
    tokens: int  # of the words in the model
    documents: int  # whose words are of it more than of any other
    sources: dict[str, int]  # those by source


@dataclass(frozen=True)
class Topics:
    topics: list[Topic]
    words: int  # different ones
    tokens: int
    log_likelihood: float  # of words and topics together, for each word

    def text(self) -> str:
        """A line for each topic, the largest first."""
        head = (
            f"{plural(self.tokens, 'token')} of {plural(self.words, 'word')}, log-likelihood {self.log_likelihood:.4f}"
        )
        lines = [head]
        for topic in sorted(self.topics, key=lambda topic: -topic.documents):
            from_ = ", ".join(f"{count:,} {name}" for name, count in topic.sources.items() if count)
            lines.append(f"  topic{topic.number}: {' '.join(topic.words)}  ({from_ or 'no document'})")
        return "\n".join(lines)


def find_topics(
    data: Shards, section: TopicsSection, on_iteration: Callable[[int, int], None] = lambda done, total: None
) -> Topics:
    folder = data.directory / FOLDER
    request = {"data": data.fingerprint, **section.model_dump()}
    if (known := _known(folder / RESULT, request)) is not None and {TOPIC, SHARE} <= set(data.columns):
        return known
    words = choose_words(data, section.common, section.rare)
    sampler = Sampler(
        data, words, folder, topics=section.topics, alpha=section.alpha, beta=section.beta, steps=section.steps,
        seed=section.seed,
    )  # fmt: skip
    on_iteration(sampler.iteration, section.iterations)
    for done in sampler.run(section.iterations):
        on_iteration(done, section.iterations)
    topic_D, share_D = of_documents(data, sampler)
    data.add_column(TOPIC, topic_D)
    data.add_column(SHARE, share_D)
    names = named(data.directory, words, sampler.counts_WK)
    topics = []
    for number in range(section.topics):
        sources = np.bincount(data.domain[topic_D == number], minlength=len(data.domains)).tolist()
        by_source = dict(zip(data.domains, sources, strict=True))
        tokens = int(sampler.counts_WK[:, number].sum(dtype=np.int64))
        topics.append(Topic(number, names[number], tokens, sum(sources), by_source))
    found = Topics(topics, words.count, sampler.size, sampler.log_likelihood())
    atomic.write_json(folder / RESULT, {"request": request, **asdict(found)}, indent=1)
    sampler.remove_files()
    return found


def of_documents(data: Shards, sampler: Sampler) -> tuple[np.ndarray, np.ndarray]:
    """The topic of each document, and the share of its words that are of it."""
    topic_D, share_D = np.full(data.documents, -1, np.int32), np.zeros(data.documents, np.float32)
    for first, found, share in sampler.by_document():
        topic_D[first : first + len(found)], share_D[first : first + len(found)] = found, share
    without = topic_D < 0
    for source in np.unique(data.domain[without]):
        mine = data.domain == source
        counts = np.bincount(topic_D[mine & ~without], minlength=1)
        topic_D[mine & without] = counts.argmax()
    return topic_D, share_D


def named(directory: Path, words: Words, counts_WK: np.ndarray) -> list[list[str]]:
    """For each topic the words that are the most frequent in it for how frequent they are at all."""
    tokenizer = load_tokenizer(directory / "tokenizer")
    texts = [tokenizer.decode([token]).strip() for token in words.token_W.tolist()]
    telling_W = np.array([sum(map(str.isalpha, text)) > 1 for text in texts])
    share_W = counts_WK.sum(1) / max(1, counts_WK.sum())
    names = []
    for counts_W in counts_WK.T:
        mine_W = counts_W / max(1, counts_W.sum())
        lift_W = np.log(np.maximum(mine_W, 1e-12) / np.maximum(share_W, 1e-12))
        score_W = np.where(telling_W | ~telling_W.any(), mine_W * lift_W, -np.inf)
        order = [texts[word] for word in np.argsort(-score_W, kind="stable")[: 4 * SHOWN] if counts_W[word]]
        names.append(list(dict.fromkeys(order))[:SHOWN])
    return names


def _known(file: Path, request: dict[str, Any]) -> Topics | None:
    found = read_json(file) if file.is_file() else {}
    if found.pop("request", None) != request:
        return None
    return Topics([Topic(**topic) for topic in found.pop("topics")], **found)
