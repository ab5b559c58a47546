"""The command line: run a command, and turn whatever goes wrong into one or two lines and an exit code.

0 done, 1 the work failed, 2 the request was wrong, 130 stopped by Ctrl-C. `--debug`, before or after the command, shows
the traceback as well.
"""

from __future__ import annotations

import io
import os
import sys
import traceback
from collections.abc import Iterator, MutableMapping, Sequence
from contextlib import contextmanager, redirect_stdout

import typer

from moesaic.cli.app import JSON_OUTPUT, make_app
from moesaic.errors import UserError
from moesaic.renamed import current_flags

LINE = 120  # a longer message has its remedy on a second line


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if arguments is None:  # the process is ours
        limit_spinning(os.environ)
    if "_MOESAIC_COMPLETE" in os.environ:  # the shell asks what could come next
        make_app(everything=True)(given, prog_name="moesaic")

    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="replace")  # a terminal that has no sign for something shows the rest
    ours = given[: given.index("--")] if "--" in given else given
    wanted = next((word for word in given if not word.startswith("-")), None)
    words = [*current_flags([word for word in ours if word != "--debug"], wanted or ""), *given[len(ours) :]]
    name = "moesaic"
    try:
        app = typer.main.get_command(make_app(wanted))
        if wanted in getattr(app, "commands", ()):
            name = f"moesaic {wanted}"
        with json_alone("--json" in ours), app.make_context("moesaic", words) as context:
            app.invoke(context)
        sys.stdout.flush()
    except typer.Exit as request:
        return request.exit_code
    except BrokenPipeError:
        # The reader has closed the pipe. What is still buffered must not be written at exit either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 128 + 13
    except (Exception, KeyboardInterrupt) as error:
        if "--debug" in ours:
            traceback.print_exception(error)
        code, message = explain(error, name_of_rank(name))
        if message:
            print(message, file=sys.stderr)
        return code
    return 0


def name_of_rank(name: str) -> str:
    """A process of torchrun says which rank it is."""
    rank = os.environ.get("RANK", "0")
    return name if rank == "0" else f"{name}, rank {rank}"


def limit_spinning(environment: MutableMapping[str, str]) -> None:
    """How long idle OpenMP threads spin. By default it is many milliseconds, in which they keep their core from other
    work, or from the very thread they wait for. Read once, when torch is imported."""
    if "OMP_WAIT_POLICY" not in environment:
        environment.setdefault("GOMP_SPINCOUNT", "10000")  # GNU's: about as long as a kernel waits for the next one
        environment.setdefault("KMP_BLOCKTIME", "1")  # LLVM's and Intel's, in milliseconds


@contextmanager
def json_alone(wanted: bool) -> Iterator[None]:
    """Keep standard output for the one JSON object; what a library prints goes to standard error."""
    if not wanted:
        yield
        return
    token = JSON_OUTPUT.set(sys.stdout)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        JSON_OUTPUT.reset(token)


def explain(error: BaseException, name: str) -> tuple[int, str]:
    """The exit code of an error, and its message to the user, in at most two lines."""
    match error:
        case UserError() if all_ranks_say_it():
            return 2, ""
        case UserError():
            return 2, in_two_lines(f"{name}: {error}", error.remedy)
        case typer.TyperException():
            problem = error.format_message()
            request = UserError("", problem[:1].lower() + problem[1:], f"See {name} --help.")
            return 2, in_two_lines(f"{name}: {request}", request.remedy)
        case KeyboardInterrupt() | typer.Abort():
            return 130, f"{name}: stopped"
        case MemoryError():
            return 1, f"{name}: out of memory"
        case OSError(strerror=str(problem)):
            place = f"{error.filename}: " if error.filename else ""
            return 1, in_two_lines(f"{name}: {place}{problem.lower()}")
    if came_of_stopping(error):
        return 130, f"{name}: stopped"
    remedy = "run again with --debug for the traceback"
    what = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    return 1, in_two_lines(f"{name}: internal error: {what}; {remedy}", remedy)


def came_of_stopping(error: BaseException) -> bool:
    """Whether a library made something else of a Ctrl-C, such as an import that was cut short."""
    cause = error.__cause__ or error.__context__
    return cause is not None and (isinstance(cause, KeyboardInterrupt) or came_of_stopping(cause))


def all_ranks_say_it() -> bool:
    """Whether the first rank has found the same, and says it: so it is with all that is checked before ranks meet."""
    if os.environ.get("RANK", "0") == "0":
        return False
    distributed = sys.modules.get("torch.distributed")
    return distributed is None or not distributed.is_initialized()


def in_two_lines(message: str, remedy: str = "") -> str:
    """One line, or, when that would be long, the remedy with which it ends on a line of its own."""
    message, remedy = " ".join(message.split()), " ".join(remedy.split())
    if not remedy or len(message) <= LINE or not message.endswith(remedy):
        return message
    return f"{message.removesuffix(remedy).rstrip()}\n  {remedy}"
