"""Kill writers of a model directory, again and again, and look at what they leave. Run by test_directory.py.

python -m tests.model.atomic_rounds FOLDER

Prints a JSON object for each way of replacing a directory: how often a writer died, how often it left something lying
about, what was wrong.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from moesaic import atomic
from moesaic.errors import UserError
from moesaic.model import directory
from moesaic.model.config import Dense, GroupedQuery, Layer, ModelConfig, Rope
from moesaic.model.formats.checkpoint import Checkpoint
from moesaic.model.formats.matching import match
from moesaic.model.transformer import Model

CONFIG = ModelConfig("llama", 50, 16, GroupedQuery(2, 1, 8), Rope(8), (Layer(Dense(24)),) * 2)


def model_of(version: int) -> Model:
    model = Model(CONFIG)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(version)
    return model


def save(version: int, target: Path) -> None:
    files = {"tokenizer.json.version": b"", "generation_config.json": json.dumps({"eos_token_id": version}).encode()}
    directory.save(model_of(version), target, files=files, life=[{"stage": str(version)}], shard_bytes=8000)


def version_of(target: Path) -> int:
    """The version of a directory, all of whose files must agree."""
    source = Checkpoint(target)
    match(source)
    life = json.loads((target / "moesaic.json").read_text())["life"]
    found = {json.loads(source.files["generation_config.json"])["eos_token_id"], int(life[0]["stage"])}
    for name in source.shapes():
        values = source.tensor(name)
        found |= {int(values.min()), int(values.max())}
    if len(found) > 1:
        raise UserError(target, f"holds versions {sorted(found)}")
    return found.pop()


def fork(work: Callable[[], None]) -> int:
    child = os.fork()
    if child == 0:
        status = 1
        try:
            work()
            status = 0
        finally:
            os._exit(status)
    return child


def killed_at_event(count: int, version: int, target: Path) -> Callable[[], None]:
    """A writer that dies at the `count`-th thing it asks of the file system (opening, renaming, removing)."""
    left = count

    def hook(event: str, _: object) -> None:
        nonlocal left
        if event == "open" or event.startswith(("os.", "shutil.", "ctypes.dlsym")):
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    def work() -> None:
        sys.addaudithook(hook)
        save(version, target)

    return work


def rounds(folder: Path, exchange: bool) -> dict[str, object]:
    target = folder / "model [1]*"  # a name that means something else to a glob
    if not exchange:
        atomic._exchange = lambda a, b: False
    version = 1
    save(version, target)
    start = time.perf_counter()
    save(version, target)
    usual = time.perf_counter() - start
    deaths = leftovers = 0
    wrong: list[str] = []
    chooser = random.Random(1)

    def check(low: int, high: int) -> int:
        nonlocal leftovers
        leftovers += len(os.listdir(folder)) > 1
        try:
            found = version_of(target)
            if not low <= found <= high:
                wrong.append(f"version {found}, not {low} to {high}")
            return found
        except UserError as error:
            wrong.append(str(error))
            return high

    for count in range(1, 1000):
        child = fork(killed_at_event(count, version + 1, target))
        _, status = os.waitpid(child, 0)
        version = check(version, version + 1)
        if os.waitstatus_to_exitcode(status) == 0:
            break
        assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL
        deaths += 1
    for _ in range(12):
        first = version + 1

        def forever(first: int = first) -> None:
            for number in range(first, first + 10_000):
                save(number, target)

        child = fork(forever)
        time.sleep(chooser.uniform(0, 6 * usual))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        deaths += 1
        version = check(version, version + 10_000)
    save(version + 1, target)
    swept = sorted(os.listdir(folder)) == [target.name]
    return {"deaths": deaths, "leftovers": leftovers, "wrong": wrong, "swept": swept}


if __name__ == "__main__":
    torch.set_num_threads(1)
    report = {}
    for way in ("exchange", "rename"):
        folder = Path(sys.argv[1]) / way
        folder.mkdir()
        report[way] = rounds(folder, way == "exchange")
    print(json.dumps(report))
