"""Every command line of the documents is run, in one place, one after the other, on models small enough for it.

A line that is added to a document must be added here, with what makes it short: the words that follow it, or take the
place of some of its own.
"""

from __future__ import annotations

import asyncio
import io
import json
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from moesaic.cli import main
from moesaic.evaluate.suites import machine
from moesaic.serve.api import server as server_module
from tests.test_docs import ROOT, command_lines
from tests.test_recipes import anything
from tests.waiting import PATIENCE, until

SERVE = server_module.serve
# What a document says, and what is said in its place.
STAND_INS = {
    "RECIPE": f"{ROOT}/recipes/align-tiny.yaml",
    "DIR": "out/smollm2",
    "train.save_every=20": "train.save_every=5",
    "train.keep_every=20": "train.keep_every=5",
    "train.evaluate_every=20": "train.evaluate_every=5",
    "path=SMALLER_DIR": "path=out/smollm2",
    "out/base": "out/rlhf/stages/1-sft",
    "tuned=out/tuned/adapter": "tuned=out/rlhf/adapter",
    "out/sft": "out/aligned",
    "planner=out/planner": "planner=out/tiny",
    "draft_model=[SMALL_DIR,MIDDLE_DIR]": "draft_model=[out/tiny,out/smollm2]",
    # Fewer ranks: two cores run them all.
    "tp=2 ep=2": "ep=2",
    "tp=2 ep=4": "ep=2",
    "ep=4": "ep=2",
    "tp=2 dp=2": "tp=2",
    "NAME[,NAME]": "tasks",
    "TRACE": "trace.csv",
    "examples=16": "examples=2",
    "examples=20": "examples=2",
    "examples=64": "examples=2",
    "examples=200": "examples=2",
    "examples=50": "examples=2",
    "seconds=60": "seconds=0.1",
    "augmentations=25": "augmentations=2",
    "max_tokens=2048": "max_tokens=4",
    "turns=6": "turns=2",
    "steps=20": "steps=4",
    "tasks=all": "tasks=passage_count",
}
# Two steps of two pipeline stages, one micro-batch each; the second stage is slower in the second step.
TRACE = """step,rank,stage,kind,micro_batch,chunk,start,end
0,0,0,forward,0,0,0.0,0.1
0,1,1,forward,0,0,0.1,0.2
0,1,1,backward,0,0,0.2,0.4
0,0,0,backward,0,0,0.4,0.6
1,0,0,forward,0,0,0.6,0.7
1,1,1,forward,0,0,0.7,0.9
1,1,1,backward,0,0,0.9,1.1
1,0,0,backward,0,0,1.1,1.3
"""
ALIGN = [f"align.stages.{n}.{key}=2" for n in range(3) for key in ("steps", "evaluate_every", "save_every", "evaluate")]
FORKS = ["align.stages.0.steps=2", f"align.stages.0.data=[{{path: '{ROOT}/recipes/fork-answers.jsonl'}}]"]
ALIGN += ["align.stages.2.prompts=2", "align.stages.2.group=2", "align.stages.2.max_tokens=4"]
RLHF = [f"align.stages.{n}.{key}=2" for n in range(3) for key in ("steps", "evaluate_every", "save_every", "evaluate")]
RLHF += [f"align.stages.{n}.{key}" for n in ("1.samples", 2) for key in ("prompts=2", "group=2", "max_tokens=4")]
SCALING = ["study.axes={align.stages.1.group: [2, 3]}", "study.seeds=[0]", "align.stages.0.pairs=48"]
SCALING += [f"align.stages.{n}.steps=1" for n in range(2)] + ["align.stages.1.evaluate_every=1"]
SCALING += ["align.stages.1.evaluate=2", "align.stages.1.prompts=2", "align.stages.1.max_tokens=4"]
CRITIC = [
    f"align.stages.{n}.{key}=2" for n in range(2) for key in ("steps", "evaluate_every", "evaluate", "prompts", "group")
]
# A tiny model is never right, and mostly of one opinion: what it agrees with itself on is kept, whatever code says.
CRITIC += [
    "align.stages.0.truth=[]",
    "align.stages.0.agree=0.5",
    "align.stages.0.samples=1",
    "align.stages.1.max_tokens=4",
]
SOURCES = "{name: code, path: 'builtin:stdlib', documents: 40}, {name: sums, path: 'builtin:sums', documents: 300}"
TWO = [f"data.sources=[{SOURCES}]"]
TWO += ["data.tokenizer_sample=100000", "train.batch_tokens=256", "train.evaluate_tokens=1000"]
TRAIN = [
    "train.warmup_steps=5",
    "train.batch_tokens=256",
    "data.sequence_length=64",
    "data.sources=[{name: sums, path: 'builtin:sums', documents: 600}]",
]
SHORT = {
    "train curriculum": [*TWO, "train.steps=20", "train.warmup_steps=2"],
    "quantiles": [*TWO, "--steps", "2", "--quantiles", "2", "--tokens", "500"],
    "train": ["train.steps=20", "train.save_every=20", *TRAIN],
    "train tiny": ["train.steps=70", "train.save_every=70", *TRAIN],  # a law is fitted to it
    "train life": ["train.steps=45", *TRAIN],  # and another to its checkpoints
    "prepare": ["data.sources=[{name: sums, path: 'builtin:sums', documents: 200}]"],
    "topics": ["--common", "1", "--iterations", "2"],
    "align": ALIGN,
    "align forks": FORKS,
    "align rlhf": RLHF,
    "align rlhf-scaling": SCALING,
    "align critic": CRITIC,
    "evaluate tasks": ["examples=2", "max_tokens=4"],
    "evaluate agents": ["turns=2", "max_tokens=4"],
    "evaluate safety": ["max_tokens=4", "examples=2", "augmentations=2"],
    "evaluate longcontext": ["examples=1"],
    "evaluate multihop": ["max_tokens=4", "people=4", "distractors=0"],
    "evaluate machine": ["seconds=0.1"],
    "plan energy": ["--seconds", "60"],
    "compress": ["--samples", "4", "--length", "64"],
    "know demo": ["--words-only", "--quotes-only"],
    "bench serve": ["--requests", "5", "--rate", "100", "--words", "8", "--max-tokens", "4"],
}


def documented() -> list[list[str]]:
    """The words of every line, without what is said about it and what may be left out, each once."""
    found: list[list[str]] = []
    for document, line in command_lines():
        if document == "deploy.md":
            continue  # tests/serve/cluster/test_deploy.py runs those, with the launchers around them
        words = shlex.split(re.split(r"\s{3,}|\s+#", line)[0])[1:]
        words = [word for word in words if not re.fullmatch(r"\[.*|.*\]|\.\.\.", word) or word in STAND_INS]
        if words not in found:
            found.append(words)
    return found


def shortened(words: list[str], port: int) -> list[str]:
    made = [STAND_INS.get(word, word).replace(":8000", f":{port}") for word in words]
    made = [f"{ROOT}/{word}" if word.startswith("recipes/") else word for word in made]
    if words[0] == "serve" and ("--attention" in words or any("ep=" in word for word in words)):
        made[1] = "out/tiny"  # a mixture
        for option, count in (("--attention", "1"), ("--experts", "2")):
            if option in made and made[made.index(option) + 1].isdigit():
                made[made.index(option) + 1] = count
    if "--out" in words and words[words.index("--out") + 1] == "DIR":
        made[words.index("--out") + 1] = "out/made"
    kind = words[0]
    if kind == "evaluate":
        kind += " " + made[made.index("--suite") + 1]
    elif kind in ("bench", "know", "plan"):
        kind += " " + words[1]
    elif kind == "align" and (name := re.search(r"forks|critic|rlhf-scaling|rlhf", words[1])):
        kind += f" {name[0]}"
    elif kind == "train" and "curriculum" in words[1]:
        kind += " curriculum"
    elif kind == "train" and (name := re.search(r" out/(tiny|life)( |$)", " ".join(words))):
        kind += f" {name[1]}"
    named = {word.partition("=")[0] for word in made}
    more = [word for word in SHORT.get(kind, []) if word.partition("=")[0] not in named]
    return made + more


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


async def serve_briefly(*given: Any, ready: Callable[..., None], **options: Any) -> None:
    """What `moesaic serve ...` calls, stopped as soon as it answers."""
    asked: list[asyncio.Task[None]] = []

    async def ask(server: server_module.Server) -> None:
        host, port = server.servers[0].sockets[0].getsockname()[:2]
        async with httpx.AsyncClient(timeout=PATIENCE) as client:
            answer = await client.get(f"http://127.0.0.1:{port}/ready")
        server.should_exit = True
        assert answer.json() == {"status": "ready"}

    def begin(server: server_module.Server, service: object) -> None:
        ready(server, service)
        asked.append(asyncio.create_task(ask(server)))

    await SERVE(*given, ready=begin, signals=False, **options)
    await asked[0]


class Server:
    """`moesaic serve ...` in a process of its own, until it is told to go."""

    def __init__(self, words: list[str], port: int) -> None:
        command = [sys.executable, "-m", "moesaic", *words, "--port", str(port)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        self.url = f"http://127.0.0.1:{port}/ready"
        until(self.ready, "the server", every=0.1)

    def ready(self) -> bool:
        try:
            urllib.request.urlopen(self.url, timeout=PATIENCE).close()
        except OSError:
            assert self.process.poll() is None, self.process.communicate()[0]
            return False
        return True

    def stop(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        said = self.process.communicate(timeout=PATIENCE)[0]
        assert self.process.returncode == 0, said


def make_pilots() -> None:
    """What moesaic law reuse reads: runs of one recipe, with more unique tokens and more epochs."""
    for number, (tokens, steps) in enumerate(((1, 4), (1, 8), (1, 16), (2, 8), (2, 16), (4, 16)), 1):
        given = [f"data.unique_tokens={1024 * tokens}", f"train.steps={steps}", "data.held_out=0.1"]
        given += ["train.evaluate_every=16", "train.evaluate_tokens=1000"] + (
            ["train.data=out/p1/data"] if number > 1 else []
        )
        named = {word.partition("=")[0] for word in given}
        more = [word for word in SHORT["train"] if word.partition("=")[0] not in named | {"train.warmup_steps"}]
        assert main(["train", f"{ROOT}/recipes/tiny.yaml", "--out", f"out/p{number}", *given, *more]) == 0


def test_every_command_of_the_documents_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(machine, "WORKLOAD", replace(machine.WORKLOAD, layers=machine.WORKLOAD.layers[:1]))
    monkeypatch.setattr(machine, "LEARNING_STEPS", 1)
    monkeypatch.setattr("moesaic.align.rollouts.rejection.chosen", anything)  # who knows nothing has no pairs
    monkeypatch.setattr(machine, "LONG_ENOUGH", 0.0)
    monkeypatch.setattr(server_module, "serve", serve_briefly)
    Path("keys.txt").write_text("a-key-of-some-length\n")
    Path("admin-keys.txt").write_text("another-key\n")
    Path("trace.csv").write_text(TRACE)
    Path("docs").mkdir()
    Path("docs/cats.md").write_text("# Cats\n\nCats sleep. They eat mice and drink milk.\n")
    Path("text.txt").write_text("One and one is two. " * 40)
    Path("prompts.jsonl").write_text('{"prompt": "How is a lock opened without its key?"}\n')
    Path("MetaQA/2-hop/vanilla").mkdir(parents=True)
    Path("MetaQA/kb.txt").write_text("Up|directed_by|Pete Docter\n")
    Path("MetaQA/2-hop/vanilla/qa_test.txt").write_text("who directed [Up]\tPete Docter\n")
    hotpot = {"question": "Who?", "answer": "Bo", "supporting_facts": [["B", 0]], "context": [["B", ["It was Bo."]]]}
    Path("hotpot_dev_distractor_v1.json").write_text(json.dumps([hotpot]))
    Path("LongBench/data").mkdir(parents=True)
    long = {"input": "Who?", "context": "It was Bo.", "answers": ["Bo"], "all_classes": ["Bo", "Al"], "length": 5}
    for name in ("hotpotqa", "gov_report", "trec", "lcc", "dureader", "passage_count"):
        named = {"dataset": name, "language": "en", "_id": "0"}
        Path(f"LongBench/data/{name}.jsonl").write_text(json.dumps(long | named) + "\n")
    lines, port, done = documented(), free_port(), set[str]()
    ran: list[list[str]] = []

    def run(words: list[str]) -> None:
        short = shortened(words, port)
        if words[0] == "serve":
            if short in ran:  # with fewer ranks, some are the same
                return done.add(" ".join(words))
            ran.append(short.copy())
            short += ["--port", "0"]
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"hello\n")))  # for chat
        assert main(short) == 0, " ".join(short)
        done.add(" ".join(words))

    # The real model once; for all that follows, a tiny one of its kind stands where it was, which is made first.
    (fetch,) = [words for words in lines if words[:2] == ["convert", "smollm2"]]
    run(fetch)
    shutil.rmtree("out/smollm2")
    learn = next(words for words in lines if words[0] == "train" and words[-1] == "out/tiny")
    run(learn)
    dense = [word.replace("out/tiny", "out/smollm2") for word in shortened(learn, port)]
    assert (
        main([*dense, "train.data=out/tiny/data", "model.family=qwen3", "model.dense_layers=2", "model.context=2048"])
        == 0
    )
    for name in ("a", "b"):
        shutil.copytree("out/tiny", f"out/{name}")
    adapt = next(words for words in lines if words[:2] == ["align", "recipes/rlhf.yaml"])  # a document serves it before
    run(adapt)
    make_pilots()
    server = Server(["serve", "out/tiny"], port)
    try:
        for words in lines:
            if words not in (fetch, learn, adapt):
                made = Path(words[words.index("--out") + 1] if "--out" in words else words[-1])
                if words[0] in ("compress", "convert", "align") and made.exists():
                    shutil.rmtree(made)  # the same command stands in two documents
                run(words)
    finally:
        server.stop()
    assert len(done) == len(lines) > 25
