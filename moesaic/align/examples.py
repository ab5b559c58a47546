"""Where the examples and prompts of a stage come from: JSON lines, or families of verifiable tasks.

    data: [{path: chats.jsonl, weight: 2}, {path: "builtin:chain_sum", weight: 1}]

A line is {"messages": [...]}, {"prompt": ..., "response": ...} or, for prompts, {"question": ..., "answer": ...};
what else it holds comes along as facts (tests, schema, constraints). Example i of a source is always the same one, and
so is the order in which weighted sources take turns, so a position is a few counts.
"""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from moesaic.data.sources import BUILTIN, GYM
from moesaic.data.tasks import Split, check_family, tasks
from moesaic.data.tasks.families import PRESETS, split_names
from moesaic.errors import UserError
from moesaic.json_lines import json_lines
from moesaic.worlds.example import Example

OWN, SEEDS = 100_000, 100  # a seed has so many tasks of each family before those of the next; so many seeds have some
FEW = 8  # examples of an endless source that show what they are like
Item = TypeVar("Item")
Place = tuple[int, int]  # an example of a mixture: the number of its source, and its number there


class Examples(Protocol):
    def __getitem__(self, index: int) -> Example: ...


class TaskExamples:
    """Families of tasks in turn, without end: a set of them by its name, or as in a source of pretraining."""

    def __init__(self, name: str, split: Split) -> None:
        self.families = PRESETS.get(name) or split_names(name.removeprefix(GYM))
        for family in self.families:
            check_family(family, f"{BUILTIN}{name}", or_set=family == name)
        self.split = split

    def first_of(self, seed: int) -> int:
        """Where the tasks begin that a seed has for itself."""
        return len(self.families) * OWN * (seed % SEEDS)

    def __getitem__(self, index: int) -> Example:
        place, which = divmod(index, len(self.families))
        task = tasks(self.families[which], self.split, place)
        return Example(({"role": "user", "content": task.question.strip()},), task.solution, task)


class Shuffled(Generic[Item]):
    """The same items again and again, each time in another order."""

    def __init__(self, items: Sequence[Item], seed: int) -> None:
        self.items, self.seed = items, seed
        self._order: tuple[int, list[int]] = (-1, [])  # of the last epoch that was asked for

    def __getitem__(self, index: int) -> Item:
        epoch, place = divmod(index, len(self.items))
        if self._order[0] != epoch:
            order = list(range(len(self.items)))
            random.Random(f"{self.seed} {epoch}").shuffle(order)
            self._order = (epoch, order)
        return self.items[self._order[1][place]]


class FileExamples(Shuffled[Example]):
    """JSON lines."""

    def __init__(self, path: Path, seed: int) -> None:
        super().__init__([self._read(line, place) for place, line in json_lines(path)], seed)

    @staticmethod
    def _read(line: dict[str, Any], place: str) -> Example:
        facts = dict(line)
        messages = facts.pop("messages", None)
        if messages is not None:
            messages = read_messages(messages, place, "messages is not a list")
        elif not isinstance(question := facts.pop("question", facts.pop("prompt", None)), str):
            raise UserError(place, "has neither messages nor a question or prompt", "Say what was asked.")
        else:
            messages = [{"role": "user", "content": question}]
            facts.setdefault("answer", facts.pop("response", None))
        if not messages:
            raise UserError(place, "messages is empty", "Say what was asked.")
        check_tools(facts.get("tools"), place)
        answer = facts.pop("answer", None)
        if answer is not None and not isinstance(answer, str):
            answer = json.dumps(answer)
        return Example(tuple(messages), answer, facts=facts, place=place)


def read_messages(found: Any, place: str, otherwise: str) -> list[dict[str, Any]]:
    """Messages as a line holds them: a template shows whatever is there, so what is no message is refused here."""
    if not isinstance(found, list) or not all(isinstance(m, dict) and isinstance(m.get("role"), str) for m in found):
        raise UserError(place, f"{otherwise} of {{role, content}}", "Correct it.")
    for number, message in enumerate(found, 1):
        content, calls = message.get("content"), message.get("tool_calls")
        if not isinstance(content, str | list) and not (content is None and calls):
            raise UserError(place, f"message {number} ({message['role']}) has no text as its content", "Correct it.")
        if calls is not None and not (isinstance(calls, list) and all(map(is_call, calls))):
            problem = f"tool_calls of message {number} ({message['role']}) is not a list of calls"
            raise UserError(place, problem, 'A call is {"function": {"name": ..., "arguments": ...}}.')
    return found


def is_call(call: Any) -> bool:
    function = call.get("function", call) if isinstance(call, dict) else None
    return isinstance(function, dict) and isinstance(function.get("name"), str)


def check_tools(tools: Any, place: str) -> None:
    if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise UserError(place, "tools is not a list of {type, function}", "Correct it.")


@dataclass(frozen=True)
class Later:
    """The same without the first `skip`: those that pretraining has read, say."""

    examples: Examples
    skip: int

    def __getitem__(self, index: int) -> Example:
        return self.examples[index + self.skip]


class Mixture:
    """Weighted sources that take turns: whoever is furthest behind its share is next, so every stretch has the mix."""

    def __init__(self, sources: Sequence[Examples], weights: Sequence[float]) -> None:
        assert len(sources) == len(weights)
        self.sources, self.weights = list(sources), [weight / sum(weights) for weight in weights]
        self.taken = [0] * len(sources)

    def __next__(self) -> Example:
        return self[self.turn()]

    def __getitem__(self, place: Place) -> Example:
        source, number = place
        return self.sources[source][number]

    def turn(self) -> Place:
        """Where the next example is."""
        due = sum(self.taken) + 1
        source = max(range(len(self.sources)), key=lambda n: (self.weights[n] * due - self.taken[n], -n))
        self.taken[source] += 1
        return source, self.taken[source] - 1

    def at(self, taken: Sequence[int]) -> Mixture:
        if len(taken) != len(self.sources):
            problem = f"the run was started with another number of sources ({len(taken)}, not {len(self.sources)})"
            raise UserError("align.stages", problem, "Name another --out, or the data it was started with.")
        mixture = copy.copy(self)  # not made anew: weights divided by their sum once more are others in the last bit
        mixture.taken = list(taken)
        return mixture


def open_examples(sources: Sequence[Mapping[str, Any]], split: Split, seed: int) -> Mixture:
    """`sources` as a recipe names them: path, weight and skip."""
    opened: list[Examples] = []
    for source in sources:
        path = str(source["path"])
        skip = int(source.get("skip", 0))
        if path.startswith(BUILTIN):
            found: Examples = (made := TaskExamples(path.removeprefix(BUILTIN), split))
            skip += made.first_of(seed)
        else:
            found = FileExamples(Path(path), seed)
        opened.append(Later(found, skip) if skip else found)
    return Mixture(opened, [float(source.get("weight", 1.0)) for source in sources])


def open_prompts(sources: Sequence[Mapping[str, Any]], seed: int) -> Mixture:
    """The same, as prompts: nothing may be answered already."""
    opened = open_examples(sources, "train", seed)
    for example in lines_of(opened):
        if example.messages[-1].get("role") == "assistant":
            remedy = "Leave the answer out of messages; where a reward needs it, name it answer."
            raise UserError(example.place, "ends with what the assistant said, so that nothing is asked", remedy)
    return opened


def open_conversations(sources: Sequence[Mapping[str, Any]], seed: int) -> Mixture:
    """The same, to learn what the assistant says: every line of a file must hold something of the kind."""
    opened = open_examples(sources, "train", seed)
    for example in lines_of(opened):
        if not any(message.get("role") == "assistant" for message in example.conversation()):
            problem = "holds nothing that an assistant said"
            raise UserError(example.place, problem, "Add a message of role assistant, or a response.")
    return opened


def lines_of(opened: Mixture) -> Iterator[Example]:
    """What was read from files."""
    for source in opened.sources:
        plain = source.examples if isinstance(source, Later) else source
        yield from plain.items if isinstance(plain, FileExamples) else ()


def first_examples(opened: Mixture) -> list[Example]:
    """What can be looked at of a mixture: all lines of files, and a few of what has no end."""
    lines = list(lines_of(opened))
    endless = [s for s in opened.sources if not isinstance(s.examples if isinstance(s, Later) else s, FileExamples)]
    return lines + [source[number] for source in endless for number in range(FEW)]
