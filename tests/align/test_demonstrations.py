"""AgentTuning: a teacher's trajectories are played once, filtered by reward, and mixed with general data."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

import moesaic
from moesaic.align.align import align
from moesaic.align.rollouts.demonstrations import collect_demonstrations
from moesaic.align.stages import Stage
from moesaic.errors import UserError
from moesaic.recipe import load_recipe
from moesaic.worlds.environments.several import Several
from moesaic.worlds.playing import Conversation
from tests.align.made import ADAMW, assert_refused, recipe_of
from tests.serve.made import talking_model
from tests.worlds.solvers import next_action

ROOT = Path(__file__).parents[2]
WORLDS = Several(worlds=("sql", "cards"))
SQL = "{name: several, worlds: [sql]}"


def solved(messages: Conversation) -> str:
    return f"Action: {next_action([dict(message) for message in messages])}"


class Teacher:
    """Solves `sql` and knows nothing of cards; of each conversation it has heard it keeps the opening."""

    def __init__(self, patience: int = 1_000) -> None:
        self.heard: list[str] = []
        self.patience = patience  # turns after which it is gone

    def say(self, asked: Sequence[tuple[int, Conversation]]) -> list[str | None]:
        self.patience -= 1
        if self.patience < 0:
            raise ConnectionError("gone")
        self.heard += [str(messages[0]["content"]) for _, messages in asked if len(messages) == 1]
        return [solved(said) if "SQLite" in str(said[0]["content"]) else "I would rather not." for _, said in asked]


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_right_episodes_of_a_teacher_are_kept(tmp_path: Path) -> None:
    notes = collect_demonstrations(Teacher(), WORLDS, 10, 1.0, 0, tmp_path, "k")
    assert notes == {"teacher_reward": 0.5, "episodes": 10, "episodes_kept": 5}
    kept = lines(tmp_path / "kept.jsonl")
    assert len(kept) == 5 and all(line["messages"][0]["content"].startswith("You have a SQLite") for line in kept)
    for line in kept:
        *before, last = line["messages"]
        assert last == {"role": "assistant", "content": solved(before)}
    assert [line["invalid"] for line in lines(tmp_path / "episodes.jsonl")] == [0, 3] * 5
    with pytest.raises(UserError, match="none of the teacher's 4 episodes"):
        collect_demonstrations(Teacher(), WORLDS, 4, 2.0, 0, tmp_path / "b", "k")


def test_what_was_played_before_a_kill_is_not_asked_for_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moesaic.align.rollouts.demonstrations.AT_ONCE", 4)
    whole, first, second = Teacher(), Teacher(patience=5), Teacher()
    expected = collect_demonstrations(whole, WORLDS, 10, 1.0, 0, tmp_path / "whole", "k")
    with pytest.raises(ConnectionError):
        collect_demonstrations(first, WORLDS, 10, 1.0, 0, tmp_path / "killed", "k")
    with (tmp_path / "killed/episodes.jsonl").open("a") as file:
        file.write('{"key": "k", "rewa')  # the line at which it was killed
    assert collect_demonstrations(second, WORLDS, 10, 1.0, 0, tmp_path / "killed", "k") == expected
    assert len(whole.heard) == 10 and whole.heard[4:] == second.heard
    for name in ("episodes.jsonl", "kept.jsonl"):
        assert (tmp_path / "whole" / name).read_text() == (tmp_path / "killed" / name).read_text()
    third = Teacher()  # other tasks, or another teacher: nothing of it is kept
    collect_demonstrations(third, WORLDS, 2, 1.0, 0, tmp_path / "killed", "other")
    assert len(third.heard) == 2 == len(lines(tmp_path / "killed/episodes.jsonl"))


@pytest.fixture
def server() -> Iterator[str]:
    """Speaks OpenAI's protocol, and solves what it is asked."""

    class Solving(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
            assert asked["model"] == "large" and self.headers["authorization"] == "Bearer s3cret"
            said = {"message": {"content": solved(asked["messages"])}, "finish_reason": "stop"}
            body = json.dumps({"choices": [said], "usage": {"completion_tokens": 9}}).encode()
            self.send_response(200)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            return None

    serving = ThreadingHTTPServer(("127.0.0.1", 0), Solving)
    Thread(target=serving.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{serving.server_port}/v1"
    serving.shutdown()
    serving.server_close()


def test_a_server_teaches_one_trajectory_to_four_of_the_general_data(
    tmp_path: Path, server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TEACHERS_KEY", "s3cret")
    base, chats = talking_model(tmp_path / "base", context=2048), tmp_path / "chats.jsonl"
    chats.write_text("".join(json.dumps({"prompt": f"Say {n}.", "response": str(n)}) + "\n" for n in range(50)))
    stage = (
        f"{{name: demonstrations, steps: 2, environment: {SQL}, episodes: 6, batch_tokens: 4096, max_length: 2048, "
        f'teacher: {{url: "{server}", model: large, key_variable: TEACHERS_KEY}}, data: [{{path: "{chats}"}}], '
        "evaluate: 2, evaluate_every: 2}"
    )
    recipe, out = recipe_of(tmp_path, stage, more=ADAMW), tmp_path / "out"
    align(recipe, base, out, quiet=True)
    metrics = lines(out / "metrics.jsonl")
    assert len(metrics) == 2 and metrics[-1]["episodes_kept"] == 6 and metrics[-1]["teacher_reward"] == 1.0
    assert metrics[-1]["accuracy"] == 0.0
    assert not any("s3cret" in file.read_text(errors="replace") for file in out.rglob("*") if file.is_file())
    stream: Any = recipe.build("align.stages.0", Stage).open(moesaic.load(base), out)  # nobody is asked again
    drawn = [next(stream.examples) for _ in range(20)]
    assert sum("SQLite" in example.question or len(example.messages) > 2 for example in drawn) == 4


def test_a_model_directory_teaches_by_the_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    base = talking_model(tmp_path / "base", context=2048)
    given = {"teacher": base, "episodes": 2, "right": 0.0, "steps": 1, "max_tokens": 4, "evaluate_every": 0}
    recipe = load_recipe(
        ROOT / "recipes/agent-tuning.yaml", [f"align.stages.0.{key}={value}" for key, value in given.items()]
    )
    align(recipe, base, tmp_path / "out", quiet=True)
    played = lines(tmp_path / "out/demonstrations/kept.jsonl")
    assert len(played) == 2 and all(line["messages"][-1]["role"] == "assistant" for line in played)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("environment: cards", "a teacher who plays"),
        ("environment: cards, teacher: nowhere, share: 1.0", "nowhere: no such directory"),
        ("environment: cards, teacher: out, data: [{path: chats.jsonl}], share: 1.0", "below 1 with data"),
        ("environment: cards, teacher: out, share: 0.2", "1 without"),
        ("environment: cards, teacher: {url: here}, share: 1.0", "begins with http"),
        ("environment: cards, teacher: {model: large}, share: 1.0", "a model directory, or"),
        ('environment: cards, teacher: {url: "http://a", key_variable: NO_SUCH_KEY}, share: 1.0', "NO_SUCH_KEY"),
        ("environment: tool_use, teacher: {url: 'http://a'}, share: 1.0", "no tasks of its own"),
    ],
)
def test_bad_options_are_refused_before_anything_is_played(tmp_path: Path, options: str, message: str) -> None:
    base = talking_model(tmp_path / "base")
    assert_refused(tmp_path, base, f"{{name: demonstrations, {options}}}", message)
    assert not (tmp_path / "out").exists()
