"""Remove every method's idea in turn, and demand that a test notices.

    python -m tests.mutations                          all ideas: a table, and exit code 1 if one is not missed
    python -m tests.mutations --only muon cropi        those of methods or ideas whose name has one of these words
    python -m tests.mutations --json out.json          the same as JSON too
    python -m tests.mutations --only muon --find tests/train       which tests there miss it, the quickest first

`tests/ideas/` says for each method what is replaced by what in its source, and which test claims it. The claimed test
must pass as the code stands, and fail by an assertion of its own once the idea is gone: a mutant that merely crashes
shows nothing. The changed file is compiled, and functions whose code differs get the new code in place, so that the
change reaches whoever holds them already. `tests/test_mutations.py` does this for the quick ones in every `make test`.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import io
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

import pytest
from hypothesis import Phase, settings

from moesaic.atomic import write_json
from tests import conftest  # noqa: F401  environment and profiles of every test
from tests.ideas import IDEAS, Idea

TESTS = Path(__file__).parent
PACKAGE = TESTS.parent / "moesaic"
# Of pytest: nobody reads what they say, and the last two collect all garbage of the process after every idea.
UNWANTED = ("terminal", "cacheprovider", "unraisableexception", "threadexception")
SECONDS = 1800  # a mutant may never come to an end
# Who fails is asked for, not for the smallest example of it.
settings.register_profile("mutant", phases=(Phase.explicit, Phase.generate), deadline=None, database=None)
ASSERTIONS = (AssertionError, pytest.fail.Exception)  # the latter is that of pytest.raises


class Stale(Exception):
    """A line of the table that the code has moved away from."""


@contextmanager
def removed(idea: Idea) -> Iterator[None]:
    """The project without it."""
    path = PACKAGE / idea.path
    source = path.read_text() if path.is_file() else ""
    found = source.count(idea.has)
    if found != 1:
        raise Stale(f"{idea.path} has {idea.has!r} {found} times; it must be there once: mend its line in tests/ideas/")
    module = importlib.import_module("moesaic." + idea.path.removesuffix(".py").replace("/", "."))
    assert module.__file__ is not None
    before = _functions(compile(source, module.__file__, "exec"))
    after = _functions(compile(source.replace(idea.has, idea.without), module.__file__, "exec"))
    changed = {name: code for name, code in after.items() if code != before.get(name)}
    held = [function for function in _held(module) if function.__code__.co_qualname in changed]
    if not held:
        raise Stale(f"{idea.path} without {idea.has!r} has the same functions")
    kept = [function.__code__ for function in held]
    try:
        for function in held:
            function.__code__ = changed[function.__code__.co_qualname]
        yield
    finally:
        for function, code in zip(held, kept, strict=True):
            function.__code__ = code


def _held(module: ModuleType) -> Iterator[FunctionType]:
    """The functions of a file, in its classes and below decorators too."""
    below = [*vars(module).values()]
    seen: set[int] = set()
    while below:
        found = below.pop()
        if id(found) in seen:
            continue
        seen.add(id(found))
        if isinstance(found, FunctionType):
            below += [vars(found).get("__wrapped__")]
            if found.__code__.co_filename == module.__file__:
                yield found
        elif isinstance(found, type) and found.__module__ == module.__name__:
            below += vars(found).values()
        elif isinstance(found, staticmethod | classmethod):
            below.append(found.__func__)
        elif isinstance(found, property):
            below += [found.fget, found.fset]
        elif isinstance(found, functools.cached_property):
            below.append(found.func)
        elif isinstance(found, functools._lru_cache_wrapper):
            below.append(found.__wrapped__)


def _functions(code: CodeType) -> dict[str, CodeType]:
    inner = [part for part in code.co_consts if isinstance(part, CodeType)]
    return {part.co_qualname: part for part in inner} | {
        name: found for part in inner for name, found in _functions(part).items()
    }


@dataclass
class Outcome:
    """What became of tests: each one's phase, error and time, as the plugin of the run that it is."""

    failures: dict[str, BaseException] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    passed: int = 0

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[Any]:
        report = yield
        self.seconds[item.nodeid] = self.seconds.get(item.nodeid, 0.0) + call.duration
        if report.failed and call.excinfo is not None:
            self.failures.setdefault(item.nodeid, call.excinfo.value)
        self.passed += report.passed and call.when == "call"
        return report

    def noticed(self) -> list[str]:
        """Tests that an assertion of their own, or of a library of assertions, has failed."""
        return [node for node, error in self.failures.items() if isinstance(error, ASSERTIONS) and not _ours(error)]

    def problem(self) -> str:
        return "; ".join(f"{type(error).__name__}: {str(error).splitlines()[:1]}" for error in self.failures.values())


def _ours(error: BaseException) -> bool:
    """Whether the package raised it: the mutant contradicts itself, and no test has looked at what it does."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and Path(trace.tb_frame.f_code.co_filename).is_relative_to(PACKAGE)


def outcome(nodes: Sequence[str]) -> Outcome:
    """Run tests in this process, which has imported what they need."""
    _forget()
    seen = Outcome()
    options = ["-o", "addopts=--import-mode=importlib", "--capture=no", "--rootdir", str(TESTS.parent)]
    plugins = [part for name in UNWANTED for part in ("-p", f"no:{name}")]
    alone = os.environ.get("PYTEST_DISABLE_PLUGIN_AUTOLOAD")
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # others take longer to begin than most of these tests to run
    alarm = signal.signal(signal.SIGALRM, _too_long)
    signal.alarm(SECONDS)
    settings.load_profile("mutant")
    try:
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            pytest.main([*options, *plugins, *(str(TESTS / node) for node in nodes)], plugins=[seen])
    finally:
        settings.load_profile("moesaic")
        signal.alarm(0)
        signal.signal(signal.SIGALRM, alarm)
        if alone is None:
            del os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"]
        _forget()
    return seen


def _too_long(*_: object) -> None:
    raise TimeoutError(f"took more than {SECONDS} s")


def _forget() -> None:
    """What tests keep for each other was made with other code."""
    for name, module in list(sys.modules.items()):
        if name.startswith("tests."):
            for value in list(vars(module).values()):
                if isinstance(value, functools._lru_cache_wrapper):
                    value.cache_clear()


def survives(idea: Idea) -> str:
    """Why nothing is known of its test, or an empty string: the test has noticed."""
    try:
        with removed(idea):
            seen = outcome([idea.test])
    except Stale as problem:
        return str(problem)
    if seen.noticed():
        return ""
    return f"crashed ({seen.problem()})" if seen.failures else "survived" if seen.passed else "no such test ran"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutations", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="+", metavar="WORD", help="methods or ideas whose name has one of these words")
    parser.add_argument(
        "--find", nargs="*", metavar="PATH", help="run these tests, or the claimed ones, and list what notices"
    )
    parser.add_argument("--json", metavar="FILE", help="write the table as JSON too")
    parser.add_argument("--patched-only", action="store_true", help="the claimed tests are known to pass as it stands")
    options = parser.parse_args(arguments)
    words = options.only or [""]
    chosen = [idea for idea in IDEAS if any(word in f"{idea.method} {idea.idea}" for word in words)]
    if options.find is not None:
        return _find(chosen, options.find)
    rows: list[dict[str, str]] = []
    noticed = 0
    for idea in chosen:
        start = time.process_time()
        result = "" if options.patched_only else _stands(idea)
        result = result or survives(idea) or "noticed"
        seconds = time.process_time() - start
        rows.append({"method": idea.method, "idea": idea.idea, "test": idea.test, "result": result})
        print(f"{idea.method:40} {idea.idea[:60]:60} {result:12} {seconds:6.1f} s  {idea.test}", flush=True)
        noticed += result == "noticed"
        if options.json:  # each time: a run takes an hour, and may be cut off
            said = {"ideas": len(chosen), "removed": len(rows), "noticed": noticed, "rows": rows}
            write_json(Path(options.json), said, indent=1)
    print(f"mutation run complete: {len(rows)} ideas, {noticed} noticed")
    return int(noticed != len(rows))


def _stands(idea: Idea) -> str:
    seen = outcome([idea.test])
    return f"fails as it stands ({seen.problem()})" if seen.failures else "" if seen.passed else "no such test"


def _find(ideas: Sequence[Idea], paths: Sequence[str]) -> int:
    for idea in ideas:
        with removed(idea):
            seen = outcome([str(Path(path).resolve()) for path in paths] or [idea.test])
        print(f"{idea.method}: {idea.idea}: {len(seen.noticed())} notice, {seen.passed} pass")
        for node in sorted(seen.failures, key=lambda node: seen.seconds[node]):
            kind = "notices" if node in seen.noticed() else f"crashes {type(seen.failures[node]).__name__}"
            print(f"  {seen.seconds[node]:6.2f} s {kind}: {node}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
