"""A sandbox that is killed from outside (by the kernel when memory runs out, say) runs its program again: an episode in
the shell, and what is rewarded, is the same as if nothing had happened."""

from __future__ import annotations

import os
import signal
import subprocess
from typing import Any

import pytest

from moesaic.serve.parsers import Message
from moesaic.worlds import sandbox
from moesaic.worlds.environments.shell import Shell
from moesaic.worlds.sandbox import ATTEMPTS, Limits, run_python


@pytest.fixture
def killed(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Kills the first so many sandboxes, with all they hold, as soon as they are started."""
    plain, left = subprocess.Popen, [0]

    def popen(*given: Any, **options: Any) -> Any:
        process = plain(*given, **options)
        if left[0]:
            left[0] -= 1
            os.killpg(process.pid, signal.SIGKILL)
        return process

    monkeypatch.setattr(sandbox.subprocess, "Popen", popen)
    return left


def played(kills: list[int], each: int) -> list[str]:
    world = Shell(seconds=60.0)  # on a busy machine, too
    episode = world.begin(world.example(1))
    seen = []
    for command in ("mkdir box", "cp -r . box 2>/dev/null; ls", "grep -rh '^code ' ."):
        kills[0] = each
        seen += [str(message["content"]) for message in episode.step(Message(f"Action: {command}")).messages]
    episode.close()
    return seen


def test_an_episode_in_the_shell_goes_on_as_if_nothing_had_been_killed(killed: list[int]) -> None:
    assert played(killed, ATTEMPTS - 1) == (found := played(killed, 0))
    assert "code" in found[-1]


def test_what_is_killed_again_and_again_is_told(killed: list[int]) -> None:
    killed[0] = ATTEMPTS
    result = run_python("print(1)", limits=Limits(seconds=60.0))
    assert not result.ok and result.why == "killed from outside" and killed == [0]
    assert run_python("print(1)", limits=Limits(seconds=60.0)).stdout == "1\n"
    assert played(killed, ATTEMPTS)[0] == (
        "The shell broke down (killed from outside), and files are as they were before."
    )
