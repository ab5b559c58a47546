"""Kernels that are submitted: right ones are told from wrong and wasteful ones, and cheating is caught, in two ways."""

from __future__ import annotations

import pytest

from moesaic.serve.parsers import Message
from moesaic.worlds.environments.kernel import Kernel, Tuning
from moesaic.worlds.kernels import trial as trials
from moesaic.worlds.kernels.rules import Refused, check
from moesaic.worlds.kernels.tasks import TASKS
from moesaic.worlds.kernels.trial import Trial, trial
from moesaic.worlds.text_actions import WorldExamples
from tests.worlds.kernel_solutions import HEAD, SOLUTIONS

GOOD = SOLUTIONS["row_sum"]
BODY = "    out = x.new_empty(x.shape[0])\n"
assert BODY in GOOD


def test_every_task_has_a_solution_that_keeps_to_the_rules() -> None:
    assert sorted(SOLUTIONS) == sorted(TASKS)
    for name, source in SOLUTIONS.items():
        check(source, name)


# What a submission must not do, as lines in its function, or at its top.
CHEATS = {
    "reads the reference": "    from moesaic.worlds.kernels import tasks\n    return tasks._heat_step(x, 0)\n",
    "looks it up in memory": "    return x.__class__.__mro__\n",
    "reads a file": "    open('/etc/passwd').read()\n",
    "computes with torch": "    return torch.sum(x, -1)\n",
    "computes with a method": "    return x.sum(-1)\n",
    "computes by another name": "    return getattr(x, 'su' + 'm')(-1)\n",
    "changes torch": "    torch.allclose = lambda *_: True\n",
    "changes a method": "    x.numel = 0\n",
    "changes the clock": "    import time\n    time.perf_counter = lambda: 0\n",
    "does not wait": "    torch.cuda.synchronize = lambda: None\n",
    "works on another stream": "    torch.cuda.Stream()\n",
    "keeps a result": "    global kept\n    kept = 1\n",
    "keeps a result on a function": "    row_sum.kept = x\n",
    "keeps a result in a default": "    (lambda kept=[]: kept)()\n    eval('1')\n",
    "ends the process": "    exit(0)\n",
    "hides in a text": "    return '__builtins__'\n",
    "writes to its arguments": "    x[0] = 0\n",
    "runs a program": "    exec('1')\n",
}


@pytest.mark.parametrize("line", CHEATS.values(), ids=CHEATS.keys())
def test_rules_refuse(line: str) -> None:
    with pytest.raises(Refused):
        check(GOOD.replace(BODY, BODY + line), "row_sum")
    assert trial(TASKS["row_sum"], GOOD.replace(BODY, BODY + line)).refused  # and nothing was run


@pytest.mark.parametrize(
    "top", ["import os\n", "from torch import sum\n", "kept = {}\n", "torch.sum = 1\n", "print(1)\n", "class A: pass\n"]
)
def test_rules_refuse_at_the_top(top: str) -> None:
    with pytest.raises(Refused):
        check(GOOD + top, "row_sum")


@pytest.mark.parametrize("source", ["", "x = 1", "def row_sum(x): return x", "(", "\0", "(" * 9_000, "def f(x): pass"])
def test_rules_refuse_what_is_no_kernel(source: str) -> None:
    with pytest.raises(Refused):
        check(source, "row_sum")


def without_rules(monkeypatch: pytest.MonkeyPatch, source: str) -> Trial:
    """As if the rules had been got around: what runs is judged by what it does."""
    monkeypatch.setattr(trials, "check", lambda source, entry: None)
    return trial(TASKS["row_sum"], source)


KEEPS = "kept = {}\n\n\n" + GOOD.replace(
    BODY, "    if x.data_ptr() in kept:\n        return kept[x.data_ptr()]\n" + BODY
).replace("    return out\n", "    kept[x.data_ptr()] = out\n    return out\n")


@pytest.mark.parametrize(
    ("source", "verdict"),
    [
        (GOOD.replace(BODY, BODY + "    return x.sum(-1)\n"), "computes with torch"),
        (KEEPS, "called again with other numbers"),
        (
            GOOD.replace(BODY, BODY + "    import os\n    os.write(1, b'{}')\n    os._exit(0)\n"),
            "did not come to an end",
        ),
        (GOOD.replace(BODY, BODY + "    x.zero_()\n"), "changed its arguments|Wrong"),
    ],
    ids=["computes", "keeps", "ends", "writes"],
)
def test_what_gets_around_the_rules_is_noticed_when_it_runs(
    monkeypatch: pytest.MonkeyPatch, source: str, verdict: str
) -> None:
    found = without_rules(monkeypatch, source)
    assert found.score == 0.0 and not found.refused
    assert any(part in found.verdict for part in verdict.split("|")), found


WASTEFUL = (
    HEAD
    + """@triton.jit
def kernel(x, out, width):
    row = tl.program_id(0)
    total = 0.0
    for at in range(0, width):
        total += tl.load(x + row * width + at)
        total += 0.0 * tl.load(x + row * width)
        total += 0.0 * tl.load(x + row * width)
    tl.store(out + row, total)


def row_sum(x):
    out = x.new_empty(x.shape[0])
    kernel[(x.shape[0],)](x, out, x.shape[1])
    return out
"""
)
WRONG = GOOD.replace("tl.sum(v, 0)", "tl.max(v, 0)")


def test_the_loop_keeps_the_best() -> None:
    """Wrong, then right and wasteful, then broken, then good: what each is worth, and what the model is told."""
    world = Kernel(tasks=("row_sum",), turns=6)
    episode = world.begin(WorldExamples(world, 0)[0])
    assert isinstance(episode, Tuning) and "row_sum(x)" in episode.messages[0]["content"]

    def said(source: str) -> Message:
        return Message(f"Let me try.\n```python\n{source}```")

    step = episode.step(said(WRONG))
    assert not step.done and step.score == 0.0 and "Wrong for shapes" in step.messages[0]["content"]
    step = episode.step(said(WASTEFUL))
    wasteful = episode.best
    assert 0.5 < wasteful < 0.8 and step.score == wasteful and "bytes" in step.messages[0]["content"]
    step = episode.step(Message("no program at all"))
    assert step.invalid == "format" and episode.best == wasteful
    step = episode.step(said(GOOD))
    assert step.done and step.reward == 1.0 and episode.best_source.strip() == GOOD.strip()
    stopped = world.begin(WorldExamples(world, 0)[0])
    assert stopped.step(Message("Action: finish")).done
