"""Three domains a tiny model can be shown in a minute, for recipes/glm5-stages.yaml: sums (reasoning), games of cards
(agentic), and sentences under constraints that code can check (general).

    python -m bench.stage_tasks recipes          writes the recipe's small files anew

What is shown is careless: of the cards that are played a good part is drawn at random, and sentences keep to what was
asked only by chance. So a model that has seen it knows what an answer looks like, and not which is good.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from moesaic.serve.parsers import Message
from moesaic.worlds.environments.cards import Cards, Game
from moesaic.worlds.text_actions import Acting, WorldExamples

SAID = ("a cat dog sun red big old tree runs sees finds and the", "with on sky sea warm cold day night house road")
WORDS = " ".join(SAID).split()
TOPICS = ["the sea", "the sun", "a dog", "a cat", "a house", "a road", "the night", "the sky", "a tree", "the cold"]
SHOWN, HELD_OUT = 5_000, 9_000  # first numbers of games and sentences: no stage and no evaluation has the same


def games(count: int) -> Iterator[dict[str, Any]]:
    """Legal: the card with the number of the prize, where it is still held, or one at random."""
    world, draw = Cards(), random.Random("games")
    examples = WorldExamples(world, SHOWN)
    for number in range(count):
        episode = world.begin(examples[number])
        assert isinstance(episode, Acting) and isinstance(episode.simulation, Game)
        messages, done = list(episode.messages), False
        while not done:
            hand, prize = episode.simulation.hand, episode.simulation.prizes[0]
            said = f"Action: play {prize if prize in hand and draw.random() < 0.6 else draw.choice(hand)}"
            step = episode.step(Message(said))
            messages.append({"role": "assistant", "content": said})
            messages += [] if step.done else step.messages
            done = step.done
        yield {"messages": messages}


def asked(number: int) -> dict[str, Any]:
    """A sentence that is asked for, and how it is checked."""
    draw = random.Random(f"asked {number}")
    words = draw.randint(2, 6)
    constraints: list[dict[str, Any]] = [
        {"kind": "min_words", "value": words},
        {"kind": "max_words", "value": words},
        {"kind": "lowercase"},
        {"kind": "ends_with", "value": "."},
    ]
    question = f"Write {words} words about {draw.choice(TOPICS)}, in lower case, with a full stop at the end."
    return {"question": question, "constraints": constraints}


def sentences(count: int) -> Iterator[dict[str, Any]]:
    draw = random.Random("sentences")
    for number in range(count):
        said = " ".join(draw.choices(WORDS, k=draw.randint(2, 6))) + draw.choice([".", "!", "", "?"])
        said = draw.choice([str.lower, str.upper, str.capitalize])(said)
        yield {"prompt": asked(SHOWN + number)["question"], "response": said}


def held_out(count: int) -> list[dict[str, Any]]:
    return [asked(HELD_OUT + number) for number in range(count)]


def write(folder: Path, shown: int, prompts: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    lines: dict[str, Iterable[dict[str, Any]]] = {
        "stages-games": games(shown),
        "stages-sentences": sentences(shown),
        "stages-prompts": map(asked, range(prompts)),
    }
    for name, found in lines.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in found))


if __name__ == "__main__":
    write(Path(sys.argv[1]), 12, 40)
