"""Chat with a model in the terminal.

moesaic chat out/smollm2
moesaic chat out/smollm2 --sampling min_p=0.05 --sampling dry_multiplier=0.8
moesaic chat out/smollm2 --system "Answer in one sentence." --temperature 0
echo "Name three rivers." | moesaic chat out/smollm2 > answers.txt
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from moesaic.cli.options import (
    Device,
    Dtype,
    ExpertCache,
    ModelDirectory,
    Offload,
    OffloadFrom,
    SamplingParams,
    Threads,
)
from moesaic.errors import UserError

if TYPE_CHECKING:
    from moesaic.serve.terminal import TerminalChat

ORDER = 71


def command(
    directory: ModelDirectory,
    system: Annotated[str, typer.Option(metavar="TEXT", help="The system prompt.")] = "",
    temperature: Annotated[
        float | None, typer.Option(help="Sampling temperature; 0: greedy. Default: what the model recommends, or 0.7.")
    ] = None,
    top_p: Annotated[
        float | None,
        typer.Option(help="Nucleus sampling. Default: what the model recommends, or 0.95."),
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option(help="Tokens of a response; default: as many as fit in the context.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of sampling; default: random.")] = None,
    sampling: SamplingParams = None,
    branches: Annotated[
        int, typer.Option(min=1, max=64, help="Parts of a response written in parallel, by a model trained to (APAR).")
    ] = 1,
    dtype: Dtype = None,
    device: Device = None,
    offload: Offload = None,
    offload_from: OffloadFrom = None,
    expert_cache_gb: ExpertCache = None,
    threads: Threads = None,
) -> None:
    """Chat with a model in the terminal; from a pipe, every line is a message.

    Ctrl-C stops a response, Ctrl-D quits, /help lists the commands.
    """
    from moesaic.serve.core.engine import Engine
    from moesaic.serve.core.request import Sampling
    from moesaic.serve.core.sampling_defaults import recommended
    from moesaic.serve.core.sampling_text import parse_sampling
    from moesaic.serve.offload.loading import load_served, offload_options
    from moesaic.serve.terminal import Screen, TerminalChat

    flags: dict[str, Any] = {"temperature": temperature, "top_p": top_p, "max_tokens": max_tokens, "seed": seed}
    given = parse_sampling(sampling or ()) | {name: value for name, value in flags.items() if value is not None}
    Sampling(**given)  # wrong ones are refused before the model is loaded
    offloaded = offload_options(offload, offload_from, expert_cache_gb)
    model = load_served(directory, dtype=dtype, device=device, threads=threads, **offloaded)
    engine = Engine(model, max_requests=branches)
    params = Sampling(**{"temperature": 0.7, "top_p": 0.95, **recommended(engine.tokenizer), **given})
    person = sys.stdin is not None and sys.stdin.isatty()
    styled = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    chat = TerminalChat(engine, Screen(sys.stdout, sys.stderr, styled), params, system, branches)
    if person:
        template = chat.tokenizer.chat_template is not None
        kind = "" if template else " It has no chat template: it continues your text."
        chat.screen.note(
            f"{directory.resolve().name}.{kind} /help lists commands, Ctrl-C stops a response, Ctrl-D quits."
        )
        _talk(chat, typed())
    else:
        _talk(chat, piped(), strict=True)


def _talk(chat: TerminalChat, lines: Iterator[str], strict: bool = False) -> None:
    """`strict` ends at the first mistake: nobody is there to correct it."""
    from moesaic.serve.terminal import Left

    try:
        for line in lines:
            try:
                chat.take(line)
            except UserError as error:
                if strict:
                    raise
                chat.screen.note(str(error))
    except Left:
        return


def piped() -> Iterator[str]:
    """The lines of a pipe, which are UTF-8 whatever this machine's own encoding is; none where input is closed."""
    for number, line in enumerate(sys.stdin.buffer if sys.stdin is not None else (), 1):
        try:
            yield line.decode().rstrip("\r\n")
        except UnicodeDecodeError:
            raise UserError(f"standard input, line {number}", "is not UTF-8 text", "Correct it.") from None


def typed() -> Iterator[str]:
    """What a person types, until Ctrl-D."""
    import readline  # noqa: F401 (importing it is what gives input() editing and history)

    while True:
        try:
            line = input("> ")
            while line.endswith("\\"):
                line = f"{line[:-1]}\n{input('  ')}"
        except EOFError:
            print()
            return
        except KeyboardInterrupt:  # throws away the line, not the conversation
            print()
            continue
        yield line
