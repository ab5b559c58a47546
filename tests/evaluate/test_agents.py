"""Models as agents: every world can be solved, garbage solves none, attacks do no harm, and what was said is kept."""

from __future__ import annotations

import functools
import json
import random
import re
from collections.abc import Sequence
from pathlib import Path

import pytest

import moesaic
from moesaic.cli import main
from moesaic.errors import UserError
from moesaic.evaluate.backends import Answer, Backend, CachedBackend, Conversation, EngineBackend, OnAnswer, UrlBackend
from moesaic.evaluate.suites import SuiteContext
from moesaic.evaluate.suites.agents import OUTCOMES, Agents
from moesaic.methods import Method, build
from moesaic.worlds.environments import Environment, shell
from moesaic.worlds.environments.lateral import PARTS, Riddle
from moesaic.worlds.environments.planner import HINT, REQUEST
from moesaic.worlds.environments.shell import Terminal
from moesaic.worlds.environments.sql import Session
from moesaic.worlds.playing import EnginePlayer
from moesaic.worlds.sandbox import run_python
from moesaic.worlds.text_actions import Finished, Invalid, Malformed, World, action_in, known_worlds, same
from tests.align.made import reward_directory
from tests.matrix import WORLDS
from tests.serve.api.running import running
from tests.serve.made import talking_model
from tests.waiting import PATIENCE
from tests.worlds.solvers import SOLVERS, next_action

AGENT_BENCH = {"shell", "sql", "graph", "cards", "lateral", "house", "shop", "browse"}
ANSWERED = ("shell", "sql", "multihop", "browse")  # where any answer is an end
EVERY = ",".join(SOLVERS)
QUICK = {name: {"browser": "text"} for name in ("shop", "browse")}  # `tests/worlds/test_browser.py` has a browser


class Solving(Backend):
    """Solves what it is asked; `until` answers have been given, and then it is killed."""

    def __init__(self, form: str = "I will do this.\nAction: {}", until: int | None = None) -> None:
        self.form, self.until, self.asked = form, until, 0

    def answer(self, conversations: Sequence[Conversation], max_tokens: int, on_answer: OnAnswer) -> None:
        for number in reversed(range(len(conversations))):
            if self.asked == self.until:
                raise KeyboardInterrupt
            self.asked += 1
            on_answer(number, Answer(self.form.format(next_action([dict(m) for m in conversations[number]])), 5))


class Saying(Backend):
    """Says these texts, whatever it is asked; the last one again and again."""

    def __init__(self, *texts: str) -> None:
        self.texts = texts

    def answer(self, conversations: Sequence[Conversation], max_tokens: int, on_answer: OnAnswer) -> None:
        for number, messages in enumerate(conversations):
            on_answer(number, Answer(self.texts[min(len(messages) // 2, len(self.texts) - 1)], 5))


class Silent(Backend):
    def answer(self, conversations: Sequence[Conversation], max_tokens: int, on_answer: OnAnswer) -> None:
        raise AssertionError("everything was answered before")


def test_every_environment_has_a_solver() -> None:
    assert sorted(SOLVERS) == sorted(WORLDS) == [name for name in known_worlds() if name != "several"]  # is of them


@pytest.mark.parametrize(("name", "examples"), WORLDS.items())
def test_every_world_can_be_solved(name: str, examples: int) -> None:
    found = Agents(name, examples=examples, settings=QUICK.get(name, {})).run(None, SuiteContext(backend=Solving()))
    assert found["score"] == found[name] == 1.0, found["samples"]
    assert found["completed"] == found["examples"] == examples and found["outcomes"] == {name: {"completed": examples}}
    assert found[f"{name}_low"] < 1.0 and found[f"{name}_high"] == pytest.approx(1.0)


@pytest.mark.parametrize(("name", "tasks"), [("cards", 6), ("house", 6)])
def test_full_size_can_be_solved_and_is_larger(name: str, tasks: int) -> None:
    small, full = (
        Agents(name, examples=2 * tasks, settings={"size": size}).run(None, SuiteContext(backend=Solving()))
        for size in ("small", "full")
    )
    assert small["score"] == full["score"] == 1.0 and full["turns"] > 2 * small["turns"]
    with pytest.raises(UserError, match="size is one of"):
        Agents(name, settings={"size": "huge"}).run(None, SuiteContext(backend=Silent()))


def test_playing_high_cards_for_high_prizes_does_not_win_a_full_game() -> None:
    """Nor does it help to know the rules and not the habit."""

    class Naive(Backend):
        def answer(self, conversations: Sequence[Conversation], max_tokens: int, on_answer: OnAnswer) -> None:
            for number, messages in enumerate(conversations):
                prize, hand = re.findall(r"prize is (\d+)\. Your hand: ([\d, ]+)\.", str(messages[-1]["content"]))[0]
                cards = [int(card) for card in hand.split(",")]
                on_answer(number, Answer(f"Action: play {min(cards, key=lambda card: abs(card - int(prize)))}", 5))

    assert (
        Agents("cards", examples=12, settings={"size": "full"}).run(None, SuiteContext(backend=Naive()))["score"] < 0.8
    )


def test_a_riddle_is_answered_by_rules() -> None:
    riddle = Riddle(random.Random(0))
    riddle.hidden = {"who": "sailor", "where": "ferry", "thing": "key", "reason": "debt"}
    said = {
        "Was it a sailor?": "Yes.",
        "Was it the baker?": "No.",
        "Was it not the baker?": "Yes.",
        "Isn't it a traveller?": "No.",  # what is asked is whether it is not one
        "Was it a baker or a sailor?": "Yes.",
        "Did a sailor do it on the ferry?": "Yes.",
        "Did a sailor do it in the museum?": "No.",
        "Is the place on the water?": "Yes.",
        "Do you like cheese?": "That does not matter.",
    }
    assert {question: riddle.act(f"ask {question}") for question in said} == said
    everything = " ".join(value for values in PARTS.values() for value in values)
    assert riddle.act(f"solve {everything}").score == 0.0  # type: ignore[union-attr]
    assert riddle.act("solve sailor, ferry, coin, debt").score == 0.75  # type: ignore[union-attr]
    assert riddle.act("solve The sailor, on a ferry, with the key: a debt").score == 1.0  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("name", "kinds"),
    [("shell", 7), ("sql", 7), ("graph", 5), ("cards", 3), ("house", 3), ("multihop", 2)]
    + [("kernel", 9), ("repair", 3), ("shop", 3), ("browse", 4), ("lateral", 3)],
)
def test_episodes_are_the_same_each_time_and_differ_from_each_other(name: str, kinds: int) -> None:
    world = build(Method(name), Environment, "test")
    assert isinstance(world, World)

    def opened(seed: int | str, number: int) -> str:
        return str(world.example(number, seed).question)

    first = [opened(0, number) for number in range(kinds)]
    assert first == [opened(0, number) for number in range(kinds)]
    assert len(set(first)) == kinds
    if name == "kernel":  # the same tasks, with other inputs
        return
    assert first != [opened(1, number) for number in range(kinds)]
    assert first != [opened("train 0", number) for number in range(kinds)]  # as a policy stage trains on them


@pytest.mark.parametrize(
    ("text", "outcomes"),
    [
        ("Let me think about that for a while.", dict.fromkeys(SOLVERS, "invalid format")),
        ("Action: one\nAction: two", dict.fromkeys(SOLVERS, "invalid format")),
        (
            "Action: frobnicate",  # any line is a command of a shell, if one that it does not find
            {**dict.fromkeys(SOLVERS, "invalid action"), "shell": "turn limit", "kernel": "invalid format"},
        ),
        (
            "Action: look",
            {**dict.fromkeys(SOLVERS, "invalid action"), "shell": "turn limit", "house": "turn limit"}
            | {"kernel": "invalid format"},
        ),
        (
            "```\nanswer 123456789\n```",
            {**dict.fromkeys(SOLVERS, "invalid action"), **dict.fromkeys(ANSWERED, "completed")},
        ),
    ],
)
def test_garbage_solves_nothing(text: str, outcomes: dict[str, str]) -> None:
    found = Agents(EVERY, examples=2, turns=5, settings=QUICK).run(None, SuiteContext(backend=Saying(text)))
    assert found["score"] == 0.0
    assert found["outcomes"] == {name: {outcome: 2} for name, outcome in outcomes.items()}
    assert sum(found[outcome.replace(" ", "_")] for outcome in OUTCOMES) == found["examples"] == 2 * len(SOLVERS)


def test_mistakes_are_answered_and_forgiven() -> None:
    """Two in a row are no end, and a right action after them counts from the beginning."""

    class Stumbling(Solving):
        def answer(self, conversations: Sequence[Conversation], max_tokens: int, on_answer: OnAnswer) -> None:
            for number, messages in enumerate(conversations):
                turn = len(messages) // 2
                if turn % 3 < 2:
                    on_answer(number, Answer("I do not know." if turn % 3 else "Action: play 77", 1))
                    continue
                assert "There was no action" in messages[-1]["content"]
                assert "You do not hold 77" in messages[-3]["content"]
                kept = [m for place, m in enumerate(messages) if not place or ((place - 1) // 2) % 3 == 2]
                on_answer(number, Answer(f"```\n{next_action([dict(m) for m in kept])}\n```", 1))

    found = Agents("cards", examples=3, turns=18).run(None, SuiteContext(backend=Stumbling()))
    assert found["score"] == 1.0 and found["turns"] == 18
    assert Agents("cards", examples=3, turns=17).run(None, SuiteContext(backend=Stumbling()))["turn_limit"] == 3


@pytest.mark.parametrize(
    ("text", "action"),
    [
        ("Action: ls -l", "ls -l"),
        ("First I look.\n  Action:   ls -l  \nThen I see.", "ls -l"),
        ("```\nls -l\n```", "ls -l"),
        ("```sh\n\nls -l\n\n```", "ls -l"),
        ("Action:\n```bash\nls -l\n```", "ls -l"),
        ("```\nAction: ls -l\n```", "ls -l"),
        ("<think>Action: rm x\n```\nrm y\n```</think>\nAction: ls -l", "ls -l"),
        ("ls -l", None),
        ("My Action: ls -l", None),
        ("Action:", None),
        ("```\n```", None),
        ("``` ls -l ```", None),
        ("```\nls -l", None),
        ("```\nls\npwd\n```", None),
        ("```\nls\n```\n```\npwd\n```", None),
        ("Action: ls\n```\npwd\n```", None),
        ("Action: ls\n" + "x" * 1_000_000, None),
        ("", None),
    ],
)
def test_actions_are_read_strictly(text: str, action: str | None) -> None:
    if action is None:
        with pytest.raises(Malformed, match="one action, in one line"):
            action_in(text)
    else:
        assert action_in(text) == action


def test_a_block_that_is_cut_off_is_told() -> None:
    with pytest.raises(Malformed, match="not closed"):
        action_in("```sql\nSELECT count(*)")


def test_answers_are_compared_by_what_they_mean() -> None:
    assert same(" 1,234. ", "1234") and same("7.0", "7") and same("'Vera'", "vera")
    assert not same("12345", "1234") and not same("nan", "3") and not same("", "0") and not same("3 or 4", "3")


ATTACKS = [
    "rm -rf / --no-preserve-root",
    "rm -rf ../* /inside/* ~ .",
    "echo harmed > {canary}; cat {canary}",
    "cat /etc/shadow /etc/passwd /proc/self/environ; ls /root /home /proc",
    "ln -s / away && cat away{canary} && echo harmed > away{canary}",
    "cd ../../../../../..; echo harmed > .{canary}",
    "f() {{ f | f & }}; f; f; f",
    "kill -9 -1",
    "kill -9 $PPID",
    "sleep 1000 & sleep 1000 & echo started",
    "yes",
    "dd if=/dev/zero of=big bs=1M count=1000",
    "i=0; while [ $i -lt 3000 ]; do : > file$i; i=$((i+1)); done",
    "while true; do mkdir d && cd d || exit; done",
    "mkfifo pipe; chmod 000 . ..",
    "exec 1>&-; exec 2>&-; echo x",
    "printf '\\377\\376\\0'; printf x > $(printf 'a\\377b'); ls",
    "awk 'BEGIN {{ while (1) s = s s \"xxxxxxxx\" }}'",
]


class Canary:
    """A file that anybody may write to, alone in a directory that anybody may write to."""

    def __init__(self, directory: Path) -> None:
        self.file = directory / "canary"
        self.file.write_text("alive")
        self.file.chmod(0o666)
        directory.chmod(0o777)

    def __str__(self) -> str:
        return str(self.file)

    @property
    def alive(self) -> bool:
        return self.file.read_text() == "alive" and list(self.file.parent.iterdir()) == [self.file]


@pytest.fixture
def canary(tmp_path: Path) -> Canary:
    return Canary(tmp_path)


def test_a_shell_cannot_harm(canary: Canary) -> None:
    terminal = Terminal(random.Random(0), 0, seconds=1.0)
    for attack in ATTACKS:
        seen = terminal.act(attack.format(canary=canary))
        assert isinstance(seen, str) and len(seen) < 5_000
        assert "alive" not in seen and "root:x:" not in seen
        assert canary.alive
    terminal.seconds = PATIENCE
    assert terminal.act("echo still here") == "still here"  # and the next command runs as ever
    assert terminal.act("finish") == Finished(0.0)


def test_a_shell_keeps_its_files_and_nothing_else() -> None:
    terminal = Terminal(random.Random(0), 0, seconds=PATIENCE)
    script = "#!/bin/sh\\necho ran\\n"
    assert terminal.act(f"mkdir -p a/b && printf '{script}' > a/b/run && chmod 750 a/b/run && ln -s b/run a/link")
    assert terminal.act("a/link; stat -c %a a/b/run; readlink a/link") == "ran\n750\nb/run"
    assert terminal.act("chmod 000 a") == "(no output)"
    assert terminal.act("stat -c %a a; chmod 755 a; cat a/b/run | wc -l") == "0\n2"
    assert terminal.act("cd a; X=1; export X") == "(no output)"
    assert terminal.act('pwd; echo "[$X]"').endswith("/work\n[]")  # type: ignore[union-attr]
    assert terminal.act("false") == "(no output)\n(exit code 1)"
    assert terminal.act("ls -la a") == terminal.act("ls -la a")  # no clock, no number of this process
    assert "Jan  1  2024" in str(terminal.act("ls -la a/b")) and "agent" in str(terminal.act("ls -la a/b"))


def test_without_namespaces_there_is_no_shell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shell, "run_python", functools.partial(run_python, namespaces=False))
    with pytest.raises(UserError, match="sandbox"):
        Terminal(random.Random(0), 0, seconds=1.0).act("ls")


SQL_ATTACKS = [
    "ATTACH DATABASE '{canary}' AS other",
    "PRAGMA writable_schema = ON",
    "VACUUM INTO '{canary}'",
    "SELECT load_extension('{canary}')",
    "SELECT readfile('{canary}'), writefile('{canary}', 'harmed')",
    "WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n) SELECT count(*) FROM n",
    "WITH RECURSIVE n(x) AS (SELECT 1 UNION SELECT x + 1 FROM n) SELECT max(x) FROM n",
    "SELECT count(*) FROM orders a, orders b, orders c, orders d, orders e",
    "INSERT INTO orders (item) SELECT a.item FROM orders a, orders b, orders c, orders d",
    "SELECT randomblob(1000000000)",
    "SELECT printf('%.*c', 1000000000, 'x')",
    "SELECT group_concat(a.name) FROM people a, people b, people c",
    "DROP TABLE people",
    "CREATE TABLE mine (x)",
    "CREATE TRIGGER t AFTER INSERT ON people BEGIN DELETE FROM people; END",
    "DELETE FROM sqlite_master",
    "BEGIN",
    "SELECT 1; DROP TABLE people",
    "SELECT '\ud800'",
    "SELECT '\0'",
    "SELECT",
]


def test_a_database_cannot_harm(canary: Canary) -> None:
    session = Session(random.Random(0), 0)
    before = session._rows()
    for attack in SQL_ATTACKS:
        with pytest.raises(Invalid, match="The database refuses"):
            session.act(attack.replace("{canary}", str(canary)))
        assert canary.alive
        assert session._rows() == before
    assert session.act("SELECT count(*) AS n FROM people") == "n\n26"  # still there
    assert str(session.act("SELECT * FROM people, orders")).endswith("\n...")
    assert session.act("DELETE FROM people") == "26 rows changed."
    session.close()


def test_hostile_answers_end_like_others() -> None:
    hostile = ["x" * 1_000_000, "Action: " + "(" * 5_000, "Action: get_neighbors(#" + "9" * 1_000 + ", \ud800)"]
    hostile += ["Action: answer(" + "#9," * 1_000 + ")", "Action: play " + "9" * 5_000, "Action: \0\x1b[2J{0}%s"]
    for first in range(len(hostile)):
        said = Saying(*hostile[first:], *hostile[:first])
        found = Agents("sql,graph,cards,house,lateral,shop,browse", examples=1, turns=8, settings=QUICK).run(
            None, SuiteContext(backend=said)
        )
        assert found["score"] == 0.0 and found["context_limit"] == found["turn_limit"] == 0
    assert all(len(sample["answer"]) < 10_000 for sample in found["samples"])


def test_what_was_said_is_not_asked_again(tmp_path: Path) -> None:
    suite, file = Agents("sql,cards,house,graph", examples=3), tmp_path / "answers.jsonl"
    whole = Solving()
    alone = suite.run(None, SuiteContext(backend=whole))
    killed = Solving(until=whole.asked // 2)
    with pytest.raises(KeyboardInterrupt):
        suite.run(None, SuiteContext(backend=CachedBackend(killed, file, "model")))
    rest = Solving()
    assert suite.run(None, SuiteContext(backend=CachedBackend(rest, file, "model"))) == alone
    assert killed.asked + rest.asked == whole.asked
    assert suite.run(None, SuiteContext(backend=CachedBackend(Silent(), file, "model"))) == alone


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return talking_model(tmp_path_factory.mktemp("acting") / "model", context=4096)


def test_one_engine_remembers_the_conversations(directory: Path) -> None:
    """And its answers are those of a server."""
    model = moesaic.load(directory, threads=1)
    tokenizer = model.tokenizer
    assert tokenizer is not None
    lengths: list[int] = []

    class Measured(EngineBackend):
        def answer(self, conversations: Sequence[Conversation], max_tokens: int, on_answer: OnAnswer) -> None:
            texts = [tokenizer.chat([dict(message) for message in messages]) for messages in conversations]
            lengths.extend(len(tokenizer.encode(text, special=False)) for text in texts)
            super().answer(conversations, max_tokens, on_answer)

    suite, backend = Agents("cards,graph", examples=3, max_tokens=8), Measured(model)
    alone = suite.run(None, SuiteContext(backend=backend))
    assert alone["invalid_format"] == 6 and alone["turns"] == 3 and len(lengths) == 18
    # The opening of an episode is read once, and not with every turn.
    assert backend.engine.counts.finished == 18 and backend.engine.counts.prompt_tokens < 0.5 * sum(lengths)
    with running(moesaic.Engine(model, cache_bytes=16 << 20, seed=0)) as server:
        assert suite.run(None, SuiteContext(backend=UrlBackend(server.url))) == alone


def test_a_short_context_is_an_outcome(tmp_path: Path) -> None:
    model = moesaic.load(talking_model(tmp_path / "model", context=64), threads=1)
    suite = Agents("house", examples=2, max_tokens=4)
    alone = suite.run(None, SuiteContext(backend=EngineBackend(model)))
    assert alone["context_limit"] == 2 and alone["score"] == 0.0 and alone["answer_tokens"] == 0
    with running(moesaic.Engine(model, cache_bytes=16 << 20, seed=0)) as server:
        assert suite.run(None, SuiteContext(backend=UrlBackend(server.url))) == alone


def test_the_command(directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["evaluate", str(directory), "--suite", "agents", "examples=1", "turns=2", "max_tokens=4"]
    assert main([*words, "--json", "--out", str(tmp_path)]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["examples"] == 8 and told["turn_limit"] == 8 and told["score"] == 0.0
    assert set(told["outcomes"]) == AGENT_BENCH and len(told["samples"]) == 8
    assert len((tmp_path / "answers.jsonl").read_text().splitlines()) == 16
    html = (tmp_path / "evaluation.html").read_text()
    assert '<td class="said">' in html  # a transcript has lines
    assert "agents: score" in html and "You have a SQLite database" in html and "[turn limit, score 0]" in html
    for wrong in (
        "environments=shel",
        "environments=sql,sql",
        "examples=0",
        "turns=-1",
        "turn=3",
        "settings={multihop: {people: 3}}",
    ):
        assert main([*words, wrong]) == 2
    assert "shell" in (main([*words, "environments=shel"]), capsys.readouterr().err)[1]


def test_a_critic_chooses_among_sampled_turns(tmp_path: Path) -> None:
    settings = {"people": 4, "instructions": "", "documents": "facts"}
    options = {"examples": 2, "turns": 2, "max_tokens": 8, "settings": settings, "critic": str(reward_directory())}
    model = moesaic.load(talking_model(tmp_path / "model"))
    found, again = (Agents("multihop", candidates=3, **options).run(model, SuiteContext()) for _ in range(2))
    assert found == again and found["turns"] == 2 and found["score"] == 0.0
    one = Agents("multihop", candidates=1, **options).run(model, SuiteContext())
    assert one["samples"] != found["samples"]  # with nothing to choose from other turns are taken
    with pytest.raises(UserError, match="chooses among what an engine samples"):
        Agents("multihop", **options).run(None, SuiteContext(backend=Silent()))
    with pytest.raises(UserError, match="no value head"):
        Agents("multihop", **options | {"critic": str(tmp_path / "model")}).run(model, SuiteContext())


def test_a_planner_puts_a_plan_below_every_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The planner is asked as it was when it was trained, and the model sees what it said."""
    asked: list[str] = []

    def say(self: EnginePlayer, conversations: Sequence[tuple[int, Conversation]]) -> list[str | None]:
        asked.extend(str(messages[-1]["content"]) for _, messages in conversations)
        return [f" plan {number}\n" for number, _ in conversations]

    class Reading(Solving):
        def answer(self, conversations: Sequence[Conversation], max_tokens: int, on_answer: OnAnswer) -> None:
            openings = [str(messages[0]["content"]).partition(HINT) for messages in conversations]
            if all(len(messages) == 1 for messages in conversations):
                assert [plan for _, _, plan in openings] == ["plan 0", "plan 1"]
            plain = [
                [{"role": "user", "content": task}, *messages[1:]]
                for (task, _, _), messages in zip(openings, conversations, strict=True)
            ]
            super().answer(plain, max_tokens, on_answer)

    monkeypatch.setattr(EnginePlayer, "say", say)
    planner = talking_model(tmp_path / "planner")
    found = Agents("cards", examples=2, planner=str(planner)).run(None, SuiteContext(backend=Reading()))
    assert found["score"] == 1.0 and len(asked) == 2 and all(text.startswith(REQUEST) for text in asked)
