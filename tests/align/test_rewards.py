"""Rewards: what each is worth by hand-worked examples, and that none of them can bring a run down."""

from __future__ import annotations

import dataclasses
import json
import math
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moesaic.align.rewards import Reward, judge
from moesaic.align.rewards.critique import Critique
from moesaic.align.rewards.model import ModelReward
from moesaic.align.rewards.numeric import last_number
from moesaic.align.rewards.overlong import Overlong
from moesaic.data.tasks import tasks
from moesaic.errors import UserError
from moesaic.methods import Method, build
from moesaic.worlds.judges import Answer
from moesaic.worlds.judges.constraints import verdicts as verdicts_of
from moesaic.worlds.judges.critiques import preference, rating, verdicts
from tests.align.made import reward_directory
from tests.matrix import REWARDS, filled
from tests.waiting import PATIENCE


def make(name: str, **options: Any) -> Reward:
    given = filled(REWARDS[name], reward_model=reward_directory() if name in ("model", "critic", "detector") else "")
    return build(Method(name, {**given, **options}), Reward, "test")


def said(text: str, truth: str | None = None, **facts: Any) -> Answer:
    return Answer("What is it?", text, tokens=len(text.split()), truth=truth, facts=facts)


class TestEveryReward:
    @pytest.mark.parametrize("name", REWARDS)
    def test_nothing_a_model_says_brings_a_run_down(self, name: str) -> None:
        facts = {"tests": ["assert x"], "constraints": [{"kind": "json"}], "steps": [0.5], "schema": {"type": "array"}}
        hostile = [
            "",
            "\0",
            "\ud800",
            "<think>",
            "[" * 100_000,
            "\\boxed{" * 50,
            "9" * 5000,
            "1e999",
            "```python\n",
            "(((",
        ]
        answers = [Answer("q", text, truth="7", facts=facts) for text in hostile]
        judged = judge([(name, 1.0, make(name))], answers)
        assert len(judged) == len(hostile)
        for one in judged:
            value = one.parts[name]
            assert (value is None) == bool(one.problems)
            assert value is None or (math.isfinite(value) and one.total == value)

    @pytest.mark.parametrize(
        "name", sorted({"exact", "numeric", "math", "faithfulness", "code_tests", "process", "task"})
    )
    def test_says_what_is_missing(self, name: str) -> None:
        [one] = judge([(name, 1.0, make(name))], [Answer("q", "7")])
        assert one.parts == {name: None} and one.problems[0].startswith(f"{name}: ")

    @pytest.mark.parametrize(
        ("name", "options"),
        [
            ("overlong", {"limit": 10, "cache": 11}),
            ("format", {"pattern": "("}),
            ("json_schema", {"default_schema": {"type": "nothing"}}),
            ("critique", {"url": "localhost"}),
            ("critique", {"key_variable": "NO_SUCH_VARIABLE_HERE"}),
            ("length", {"min_length": 5, "max_length": 4}),
            ("repetition", {"n": 0}),
            ("numeric", {"relative": -1.0}),
            ("code_tests", {"seconds": 0.0}),
            ("process", {"by": "max"}),
        ],
    )
    def test_wrong_options_are_the_users_error(self, name: str, options: dict[str, Any]) -> None:
        with pytest.raises(UserError):
            make(name, **options)

    def test_names_of_methods_leave_the_package_whole(self) -> None:
        for name in REWARDS:
            make(name)
        import moesaic.align.rewards as package

        assert package.judge is judge and package.Reward is Reward  # a submodule of that name would replace them


class TestAnswers:
    @pytest.mark.parametrize(
        ("text", "truth", "options", "worth"),
        [
            ("Paris", "paris", {}, 1),
            ("  **Paris.** ", "Paris", {}, 1),
            ("New   York", "new york", {}, 1),
            ("ＡＢＣ", "abc", {}, 1),
            ("It is Paris", "Paris", {}, 0),
            ("<think>Rome?</think>Paris", "Paris", {}, 1),
            ("<think>Paris", "Paris", {}, 0),
            ("so <answer>Rome</answer> no, <answer>Paris</answer>", "Paris", {"part": "tag"}, 1),
            ("Paris", "Paris", {"part": "tag"}, 0),
            (r"so \boxed{\frac{1}{2}}.", r"\frac{1}{2}", {"part": "boxed"}, 1),
            ("first\nlast", "last", {"part": "last_line"}, 1),
            ("paris", "Paris", {"strict": True}, 0),
            ("the Louvre", "Louvre", {}, 0),
            ("the Louvre", "Louvre", {"articles": False}, 1),
            ("-5", "5", {}, 0),
            ("?", "!", {}, 0),
        ],
    )
    def test_exact(self, text: str, truth: str, options: dict[str, Any], worth: float) -> None:
        assert make("exact", **options)(said(text, truth)) == worth

    def test_other_forms_of_the_truth(self) -> None:
        assert make("exact")(said("NYC", None, answers=["New York", "NYC"])) == 1
        assert make("numeric")(said("3", None, answers=["2", "3"])) == 1

    @pytest.mark.parametrize(
        ("text", "number"),
        [
            ("1,234.5 apples", 1234.5),
            ("10-3 = 7", 7),
            ("10-3", 3),
            ("x = -3", -3),
            ("−4", -4),
            ("1, 2, 3", 3),
            ("about 1.5e-3.", 0.0015),
            ("it costs $12.", 12),
            (".5", 0.5),
            ("none", None),
            ("1e999", None),
        ],
    )
    def test_last_number(self, text: str, number: float | None) -> None:
        assert last_number(text) == number

    @given(st.floats(allow_nan=False, allow_infinity=False))
    def test_any_number_is_found_again(self, value: float) -> None:
        assert make("numeric")(said(f"first 12, then {value!r}.", repr(value))) == 1
        assert make("numeric")(said(f"{value * 1.01 + 1}", repr(value))) == 0

    def test_numeric_tolerance(self) -> None:
        assert make("numeric", relative=0.01)(said("99.5", "100")) == 1
        assert make("numeric", relative=0.001)(said("99.5", "100")) == 0
        assert make("numeric")(said("nothing", "0")) == 0

    def test_task(self) -> None:
        task = tasks("gcd", "train", 0)
        assert make("task")(dataclasses.replace(said(str(task.answer)), task=task)) == 1
        assert make("task")(dataclasses.replace(said("no"), task=task)) == 0
        assert make("task")(dataclasses.replace(said(f"<think>Perhaps.</think>{task.answer}"), task=task)) == 1
        assert make("task")(dataclasses.replace(said(f"<think>Perhaps\n{task.answer}"), task=task)) == 0

    def test_what_an_environment_gave(self) -> None:
        assert make("environment")(said("anything", environment=0.25)) == 0.25


@pytest.fixture(scope="module")
def mathematics() -> Reward:
    return make("math", seconds=PATIENCE)


class TestMath:
    @pytest.mark.parametrize(
        ("text", "truth", "worth"),
        [
            (r"The answer is $\frac{1}{2}$.", "0.5", 1),
            ("1/2", r"\frac{1}{2}", 1),
            (r"\boxed{x^2 + 2x + 1}", "(x+1)^2", 1),
            (r"\boxed{\{1, 2\}}", r"\{2, 1\}", 1),
            (r"\boxed{2\sqrt{2}}", r"\sqrt{8}", 1),
            (r"\boxed{3}", "4", 0),
            ("no idea", "4", 0),
            (r"<think>\boxed{4}</think>\boxed{5}", "4", 0),
        ],
    )
    def test_equal(self, mathematics: Reward, text: str, truth: str, worth: float) -> None:
        assert mathematics(said(text, truth)) == worth

    def test_what_takes_too_long_costs_only_itself(self, mathematics: Reward) -> None:
        endless = said(r"\boxed{9^{9^{9^{9}}} \bmod 7}", "3")
        hasty = dataclasses.replace(mathematics, seconds=0.01)  # type: ignore[type-var]
        [slow] = judge([("math", 1.0, hasty)], [endless])
        assert slow.parts == {"math": None} and "0.01 s" in slow.problems[0]
        assert mathematics(said(r"\boxed{3}", "3.0")) == 1


class TestForm:
    @pytest.mark.parametrize(
        ("text", "worth"),
        [
            ('{"a": 1}', 1),
            ('```json\n{"a": 1}\n```', 1),
            ('<think>{</think>{"a": 1}', 1),
            ('{"a": "1"}', 0.25),
            ("{}", 0.25),
            ("[1]", 0.25),
            ('{"a": 1', 0),
            ('{"a": NaN}', 0),
            ('{"a": 1, "a": 2}', 0),
            ('Here: {"a": 1}', 0),
        ],
    )
    def test_json_schema(self, text: str, worth: float) -> None:
        schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
        assert make("json_schema", default_schema=schema, any_json=0.25)(said(text)) == worth
        assert make("json_schema", default_schema=None)(said(text)) == (worth > 0)

    def test_the_questions_schema_goes_first(self) -> None:
        assert make("json_schema")(said("[1]", schema={"type": "array"})) == 1
        assert make("json_schema")(said("{}", schema={"type": "array"})) == 0

    def test_no_schema_is_fetched(self) -> None:
        reward = make("json_schema")
        [one] = judge([("json_schema", 1.0, reward)], [said("{}", schema={"$ref": "http://127.0.0.1:9/schema"})])
        assert one.parts == {"json_schema": None} and "http://127.0.0.1:9/schema" in one.problems[0]

    @pytest.mark.parametrize(
        ("text", "worth"),
        [
            ("<think>a</think><answer>b</answer>", 1),
            (" <think>a\nb</think>\n\n<answer>b</answer>\n", 1),
            ("<think>a</think>b<answer>c</answer>", 0),
            ("<think>a</think><answer>b</answer> and more", 0),
            ("<answer>b</answer><think>a</think>", 0),
            ("<think></think><answer>b</answer>", 0),
            ("<think>a</think><answer>b</answer><answer>b</answer>", 0),
            ("<think>a<think></think></think><answer>b</answer>", 0),
            ("<think>a", 0),
        ],
    )
    def test_tags(self, text: str, worth: float) -> None:
        assert make("format")(said(text)) == worth

    def test_pattern(self) -> None:
        assert make("format", pattern=r".*Answer: \d+")(said("Well.\nAnswer: 12")) == 1
        assert make("format", pattern=r".*Answer: \d+")(said("Answer: 12!")) == 0


class TestLength:
    def test_between_two_lengths(self) -> None:
        reward = make("length", min_length=4, max_length=6, slack=4, unit="words")
        worth = [reward(said("word " * count)) for count in range(12)]
        assert worth == [0.0, 0.25, 0.5, 0.75, 1.0, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0, 0.0]
        assert make("length", max_length=3, unit="characters")(said("word")) == 0
        assert make("length", max_length=3)(Answer("q", "", tokens=3)) == 1

    @pytest.mark.parametrize(("tokens", "worth"), [(0, 0), (16384, 0), (18432, -0.5), (20480, -1), (30000, -1)])
    def test_overlong_as_in_the_paper(self, tokens: int, worth: float) -> None:
        """DAPO: 16,384 tokens are expected, and a cache of 4,096 more."""
        assert make("overlong", limit=20480)(Answer("q", "", tokens=tokens)) == worth
        assert make("overlong", limit=20480, cache=4096)(Answer("q", "", tokens=tokens)) == worth

    def test_overlong_never_rises(self) -> None:
        worth = [Overlong(7)(Answer("q", "", tokens=tokens)) for tokens in range(10)]
        assert worth == sorted(worth, reverse=True) and (worth[0], worth[-1]) == (0, -1)

    def test_repetition(self) -> None:
        assert make("repetition")(said("one two three four five six")) == 0
        assert make("repetition", n=2)(said("a b a b a b")) == pytest.approx(-3 / 5)  # ab ba ab ba ab
        assert make("repetition", n=2, free=0.2)(said("a b a b a b")) == pytest.approx(-0.5)
        assert make("repetition", n=1, unit="characters")(said("好好好好")) == -0.75
        assert make("repetition")(said("too short")) == 0
        assert make("repetition", n=1)(said("word " * 1000)) == pytest.approx(-0.999)


class TestConstraints:
    TEXT: ClassVar[str] = "<think>no, no</think>Dear friend, two things:\n- one apple\n- two pears\n\nBest wishes. Bye!"

    @pytest.mark.parametrize(
        ("kind", "kept", "broken"),
        [
            ("min_words", 13, 14),
            ("max_words", 13, 12),
            ("min_characters", 60, 70),
            ("max_characters", 70, 60),
            ("min_sentences", 2, 3),
            ("max_sentences", 2, 1),
            ("n_bullets", 2, 3),
            ("n_paragraphs", 2, 1),
            ("keyword", ["apple", "best wishes"], ["apple", "plum"]),
            ("keyword", "APPLE", "app"),
            ("any_keyword", ["plum", "apple"], ["plum", "cherry"]),
            ("forbidden", ["no", "plum"], ["pears"]),
            ("times", {"word": "two", "least": 2}, {"word": "two", "most": 1}),
            ("starts_with", "Dear", "dear"),
            ("ends_with", "Bye!", "Bye"),
            ("contains", "pea", "plum"),
            ("no_character", ";?", ",;"),
            ("pattern", r"^- two", r"^two"),
        ],
    )
    def test_kinds(self, kind: str, kept: Any, broken: Any) -> None:
        assert make("constraints")(said(self.TEXT, constraints=[{"kind": kind, "value": kept}])) == 1
        assert make("constraints")(said(self.TEXT, constraints=[{"kind": kind, "value": broken}])) == 0

    @pytest.mark.parametrize(
        ("kind", "kept", "broken"),
        [("json", "[1]", "[1"), ("lowercase", "abc 1", "Abc"), ("uppercase", "ABC 1", "Abc"), ("one_of", "yes", "Yes")],
    )
    def test_kinds_of_whole_answers(self, kind: str, kept: str, broken: str) -> None:
        constraint = {"kind": kind, "value": ["yes", "no"]}
        assert make("constraints")(said(kept, constraints=[constraint])) == 1
        assert make("constraints")(said(broken, constraints=[constraint])) == 0

    def test_weights_and_verdicts(self) -> None:
        listed = [
            {"kind": "max_words", "value": 1, "weight": 3},
            {"kind": "keyword", "value": "apple"},
            {"text": "Be kind."},  # for a judge
        ]
        reward = make("constraints")
        assert reward(said("an apple", constraints=listed)) == 0.25
        found = verdicts_of("an apple", listed)
        assert [(one.kind, one.kept, one.weight) for one in found] == [("max_words", False, 3), ("keyword", True, 1)]
        assert make("constraints", all_or_nothing=True)(said("an apple", constraints=listed)) == 0
        assert make("constraints", all_or_nothing=True)(said("apple", constraints=listed)) == 1

    @pytest.mark.parametrize(
        ("constraint", "problem"),
        [
            ({"kind": "max_word", "value": 1}, "did you mean max_words"),
            ({"kind": "max_words", "value": "many"}, "'many' is no value"),
            ({"kind": "pattern", "value": "("}, "is no value"),
            ({"text": "Be kind."}, "without constraints"),
        ],
    )
    def test_problems_are_recorded(self, constraint: dict[str, Any], problem: str) -> None:
        [one] = judge([("constraints", 1.0, make("constraints"))], [said("a b", constraints=[constraint])])
        assert one.parts == {"constraints": None} and problem in one.problems[0]


class TestProcess:
    @pytest.mark.parametrize(("by", "worth"), [("min", 0.5), ("product", 0.36), ("last", 0.9), ("mean", 0.7333333)])
    def test_reductions(self, by: str, worth: float) -> None:
        assert make("process", by=by)(said("", steps=[0.8, 0.5, 0.9])) == pytest.approx(worth)

    def test_what_a_model_says_of_steps_is_folded(self) -> None:
        said_N = torch.tensor([2.0, -1.0, 0.5])
        right_N = said_N.sigmoid()
        folds = {"whole": 0.5, "last": right_N[2], "min": right_N[1], "mean": right_N.mean(), "product": right_N.prod()}
        for by, worth in folds.items():
            reward = make("model", by=by)
            assert isinstance(reward, ModelReward) and reward._fold(said_N) == pytest.approx(float(worth))

    def test_scores_must_be_scores(self) -> None:
        with pytest.raises(ValueError, match="between 0 and 1"):
            make("process")(said("", steps=[0.5, 2]))


class TestCode:
    ADD = "Sure:\n```python\ndef add(a, b):\n    return a + b\n```\nDone."
    CALLS: ClassVar[list[Any]] = [{"call": "add(2, 3)", "value": 5}, {"call": "add([1], [2.5])", "value": [1, 2.5]}]
    ASSERTS: ClassVar[list[Any]] = ["assert add(2, 3) == 5", "import math\nassert math.isclose(add(.1, .2), .3)"]

    def test_right_and_wrong(self) -> None:
        reward = make("code_tests", bare=False)
        assert reward(said(self.ADD, tests=self.CALLS + self.ASSERTS)) == 1
        assert reward(said(self.ADD.replace("+", "-"), tests=self.CALLS)) == 0
        assert reward(said(self.ADD.replace("+", "-"), tests=self.CALLS[:1])) == 0  # it runs, and says another number
        assert reward(said(self.ADD.replace("```", ""), tests=self.CALLS)) == 0  # no block of code
        assert reward(said(self.ADD.replace("def", "dfe"), tests=self.CALLS)) == 0

    def test_share_and_what_was_done_before_the_time_was_over(self) -> None:
        tests = [
            "assert add(1, 1) == 2",
            "assert add(1, 1) == 3",
            "add(1, 1)",
            "import time; time.sleep(900)",
            "add(1, 1)",
        ]
        for seconds in (1.0, 4.0, 16.0, 64.0):  # in too little time, less was done
            share = make("code_tests", share=True, seconds=seconds)(said(self.ADD, tests=tests))
            if share >= 2 / 5:
                break
        assert share == pytest.approx(2 / 5)

    def test_programs(self) -> None:
        code = "```python\nprint('Hello'); print(sum(map(int, input().split())))\n```"
        tests = [{"input": "1 2", "output": "Hello\n3\n"}, {"input": "1 3", "output": "Hello  \n4"}]
        assert make("code_tests")(said(code, tests=tests)) == 1
        wrong = [*tests, {"input": "1 3", "output": "Hello\n5"}, {"input": "x", "output": "Hello"}]
        assert make("code_tests", share=True)(said(code, tests=wrong)) == 0.5

    @pytest.mark.parametrize(
        "cheat",
        [
            "import os; os._exit(0)",
            "raise SystemExit(0)",
            "print('true'); print('0 true')",
            "add = lambda a, b: type('Any', (), {'__eq__': lambda s, o: True})()",
            "import sys; print(sys.stdin.read()); import os; os.lseek(0, 0, 0); print(os.read(0, 9999))",
            "import glob\nfor f in glob.glob('*'): print(open(f).read())",
            "def add(a, b): return True",
        ],
    )
    def test_cheats(self, cheat: str) -> None:
        tests = [{"call": "add(2, 3)", "value": 5}, {"call": "add(0, 1)", "value": 1}]
        assert make("code_tests", share=True)(said(f"```python\n{cheat}\n```", tests=tests)) == 0
        if "__eq__" not in cheat:
            tests = ["assert add(2, 3) == 5", "assert add(0, 1) + 1 == 2 and add(2, 2) == 4"]
            assert make("code_tests", share=True)(said(f"```python\n{cheat}\n```", tests=tests)) == 0

    def test_a_test_that_is_none_is_recorded(self) -> None:
        [one] = judge([("code_tests", 1.0, make("code_tests"))], [said(self.ADD, tests=[{"call": "add(1, 1)"}])])
        assert one.parts == {"code_tests": None} and "not a test" in one.problems[0]


Reply = Callable[[dict[str, Any]], tuple[int, str]]


class FakeServer:
    """Speaks just enough of the chat API, and remembers what it was asked."""

    def __init__(self) -> None:
        outer = self
        self.asked: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.replies: list[Reply] = []
        self.most_at_once = self.at_once = 0
        lock = threading.Lock()

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with lock:
                    outer.at_once += 1
                    outer.most_at_once = max(outer.most_at_once, outer.at_once)
                    outer.asked.append(body)
                    outer.keys.append(self.headers["Authorization"])
                    reply = outer.replies.pop(0) if len(outer.replies) > 1 else outer.replies[0]
                status, text = reply(body)
                with lock:
                    outer.at_once -= 1
                assert self.path == "/v1/chat/completions"
                content = {"choices": [{"message": {"role": "assistant", "content": text}}]}
                data = json.dumps(content).encode() if status == 200 else text.encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_port}/v1"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def says(self, *replies: str | tuple[int, str] | Reply) -> None:
        def fixed(reply: str | tuple[int, str]) -> Reply:
            return lambda _: (200, reply) if isinstance(reply, str) else reply

        self.replies = [reply if callable(reply) else fixed(reply) for reply in replies]

    @property
    def prompts(self) -> list[str]:
        return [asked["messages"][0]["content"] for asked in self.asked]


@pytest.fixture
def server() -> Iterator[FakeServer]:
    fake = FakeServer()
    yield fake
    fake.server.shutdown()
    fake.server.server_close()


class TestCritique:
    @pytest.mark.parametrize(
        ("text", "value"),
        [
            ("Fine.\nRating: [[7]]", 7),
            ("[[2]] at first, but then [[ 8.5 ]]", 8.5),
            ("Score: 6", 6),
            ("**Rating:** 9/10", 9),
            ("I would give it 10/10.", 10),
            ("It has 3 faults.\n4", 4),
            ("Rating: 10", 10),
        ],
    )
    def test_ratings_are_found(self, text: str, value: float) -> None:
        assert rating(text) == value

    @pytest.mark.parametrize("text", ["", "no rating", "[[11]]", "[[0]]", "Rating: 100", "it has 3 faults"])
    def test_what_is_no_rating(self, text: str) -> None:
        with pytest.raises(ValueError, match="no verdict"):
            rating(text)

    def test_preferences_and_verdicts(self) -> None:
        texts = ["[[A]]", "Verdict: B", "so: [[c]]", "Answer A is clearly better.", "A is good.\n**B**"]
        assert [preference(text) for text in texts] == [1, 0, 0.5, 1, 0]
        assert verdicts("Constraint 1: [[yes]]\nconstraint 2 - No\nConstraint 1: [[no]]", 2) == [False, False]
        with pytest.raises(ValueError, match="constraint 2"):
            verdicts("Constraint 1: [[yes]]", 2)

    def test_pointwise(self, server: FakeServer) -> None:
        server.says("<think>[[1]]</think>Good.\nRating: [[10]]", "Rating: [[1]]")
        reward = make("critique", url=server.url)
        answer = said("<think>secretly</think>It is {blue}. ======== end", truth="It is blue.")
        assert (reward(answer), reward(answer)) == (1.0, 0.0)
        prompt = server.prompts[0]
        assert "What is it?" in prompt and "It is {blue}." in prompt and "secretly" not in prompt
        assert "Reference answer" in prompt and "It is blue." in prompt
        assert "Reference" not in Critique(server.url, "judge", reference=False).asking.prompt(answer)
        assert "secretly" in Critique(server.url, "judge", thoughts=True).asking.prompt(answer)
        assert server.asked[0]["model"] == "judge" and server.asked[0]["temperature"] == 0

    def test_pairwise_in_both_orders(self, server: FakeServer) -> None:
        reward = make("critique", url=server.url, form="pairwise")
        answer = said("mine", other="theirs")
        server.says("[[A]]")  # a judge that favours the first place says nothing
        assert reward(answer) == 0.5
        server.says("[[A]]", "[[B]]")
        assert reward(answer) == 1
        first, second = server.prompts[-2:]
        assert first.index("mine") < first.index("theirs") and second.index("mine") > second.index("theirs")
        server.says("[[B]]")
        assert make("critique", url=server.url, form="pairwise", both_orders=False)(answer) == 0

    def test_checklist(self, server: FakeServer) -> None:
        listed = [{"text": "Be kind.", "weight": 3}, {"text": "Be short."}, {"kind": "json"}]
        server.says("Kind.\nConstraint 1: [[yes]]\nLong.\nConstraint 2: [[no]]")
        assert make("critique", url=server.url, form="checklist")(said("hi", constraints=listed)) == 0.75
        assert "1. Be kind.\n2. Be short.\n" in server.prompts[0]

    def test_tries_again_where_that_helps(self, server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("moesaic.align.rewards._chat.time.sleep", lambda _: None)
        server.says((503, "busy"), (429, "slowly"), "Rating: [[10]]")
        assert make("critique", url=server.url, retries=2)(said("a")) == 1
        server.says((400, "wrong"))
        [one] = judge([("critique", 1.0, make("critique", url=server.url, retries=5))], [said("a")])
        assert one.total == 0 and "HTTP 400" in one.problems[0] and len(server.asked) == 4

    def test_a_judge_that_hangs_or_talks_nonsense(self, server: FakeServer) -> None:
        given_up = threading.Event()

        def hang(_: dict[str, Any]) -> tuple[int, str]:
            given_up.wait(PATIENCE)
            return 200, "[[10]]"

        def rewards(seconds: float) -> list[tuple[str, float, Reward]]:
            judging = make("critique", url=server.url, retries=0, seconds=seconds)
            return [("critique", 2.0, judging), ("exact", 1.0, make("exact"))]

        server.says(hang)
        [one] = judge(rewards(0.2), [said("a", "a")])
        given_up.set()
        assert (one.total, one.parts) == (1.0, {"critique": None, "exact": 1.0}) and "Timeout" in one.problems[0]
        server.says("I would rather not say.")
        [one] = judge(rewards(PATIENCE), [said("a", "a")])
        assert (one.total, one.parts["critique"]) == (1.0, None) and "no verdict" in one.problems[0]

    def test_many_at_once(self, server: FakeServer) -> None:
        together = threading.Barrier(8)

        def wait(body: dict[str, Any]) -> tuple[int, str]:
            together.wait(PATIENCE)  # answers only when eight are asked at the same time
            return 200, "[[10]]" if "blue" in body["messages"][0]["content"] else "[[1]]"

        server.says(wait)
        reward = make("critique", url=server.url, retries=0)
        judged = judge([("critique", 1.0, reward)], [said("blue" if n % 2 else "green") for n in range(8)])
        assert [one.total for one in judged] == [0, 1] * 4 and server.most_at_once == 8

    def test_the_secret_stays_one(self, server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("JUDGE_KEY", "sk-very-secret")
        reward = make("critique", url=server.url, key_variable="JUDGE_KEY", retries=0)
        server.says(lambda _: (401, "wrong key sk-very-secret"))
        [one] = judge([("critique", 1.0, reward)], [said("a")])
        assert server.keys == ["Bearer sk-very-secret"]
        assert one.problems and "sk-very-secret" not in repr((one, reward, server.asked))


def test_a_sum_of_several() -> None:
    rewards = [("exact", 1.0, make("exact")), ("overlong", 0.5, make("overlong")), ("process", 1.0, make("process"))]
    [one] = judge(rewards, [Answer("q", "7", tokens=90, truth="7")])
    assert one.total == pytest.approx(1 - 0.25)
    assert one.parts == {"exact": 1.0, "overlong": -0.5, "process": None}
    assert one.problems == ("process: the answer came without scores of its steps",)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_reward_that_is_no_number_costs_one_answer_its_part(value: float) -> None:
    class Broken(Reward):
        def __call__(self, answer: Answer) -> float:
            return value if answer.text == "bad" else 1.0

    good, bad = judge([("broken", 1.0, Broken())], [Answer("q", "good"), Answer("q", "bad")])
    assert (good.total, bad.total) == (1.0, 0.0)
    assert bad.parts == {"broken": None} and bad.problems == (f"broken: gave {value}",)


def test_a_reward_model_is_loaded_once_however_many_groups_are_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    from moesaic.model import directory

    reward, plain, loads = make("model"), directory.load, []

    def load(*given: Any, **options: Any) -> Any:
        loads.append(given)
        time.sleep(0.05)  # long enough for all the others to come
        return plain(*given, **options)

    monkeypatch.setattr(directory, "load", load)
    with ThreadPoolExecutor(8) as pool:
        scores = list(pool.map(reward, [Answer("q", "7")] * 8))
    assert len(loads) == 1 and len(set(scores)) == 1


def test_a_reward_model_leaves_a_worker_its_share_of_the_threads() -> None:
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        make("model")(Answer("q", "7"))
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)
