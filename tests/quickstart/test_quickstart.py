"""The quickstart in small: from nothing to a model that answers, stopped on the way, looked at in a real browser."""

from __future__ import annotations

import json
import os
import pty
import random
import re
import signal
import subprocess
import time
from pathlib import Path

import jinja2
import pytest
from playwright.sync_api import Browser, expect
from rich.console import Console

import moesaic
from moesaic.errors import UserError
from moesaic.quickstart import summaries
from moesaic.quickstart.gpu import GpuLife, check_gpu
from moesaic.quickstart.tiny import TinyLife
from moesaic.serve.core.sampling_defaults import recommended
from tests import forked
from tests.waiting import PATIENCE

SMALL = [
    "train.steps=140",
    "train.warmup_steps=4",
    "train.batch_tokens=256",
    "train.save_every=20",
    "model.hidden=32",
    "data.sources.0.documents=8",
    "data.sources.1.documents=600",
    "align.stages.0.steps=20",
    "align.stages.0.evaluate_every=10",
    "align.stages.0.evaluate=8",
    "align.stages.1.steps=4",
    "align.stages.1.prompts=4",
    "align.stages.1.group=4",
    "align.stages.1.evaluate_every=2",
    "align.stages.1.evaluate=8",
    "align.stages.1.save_every=2",
]
ASKED = "State the final answer to the following arithmetic problem:"
STAGES = ["machine", "data", "law", "base", "aligned", "small", "evaluated"]


def command(out: Path, *more: str) -> list[str]:
    return ["quickstart", "--out", str(out), *SMALL, *more]


def run(out: Path, *more: str) -> subprocess.CompletedProcess[str]:
    return forked.run(command(out, *more))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Killed some times on the way, at moments of no importance, and then left alone."""
    out = tmp_path_factory.mktemp("life") / "quickstart"
    rng = random.Random(5)
    for _ in range(3):
        begun = forked.Forked(command(out), subprocess.DEVNULL, subprocess.PIPE, subprocess.STDOUT)
        assert begun.stdout is not None
        for _ in range(rng.randint(4, 40)):  # counted in lines, not seconds: how fast the machine is does not matter
            if not begun.stdout.readline():
                break
        begun.kill()
        begun.wait()
        begun.stdout.close()
    ended = run(out)
    assert ended.returncode == 0, ended.stderr[-2000:]
    return out, ended.stdout


def test_everything_is_made_and_told(made: tuple[Path, str]) -> None:
    out, told = made
    known = json.loads((out / "quickstart.json").read_text())
    assert list(known) == STAGES
    assert known["aligned"]["mismatch"] == 0.0  # the same model, the same kernels
    assert known["base"]["loss"] < known["base"]["first_loss"]
    assert known["small"]["bytes"] < 0.4 * known["small"]["bytes_before"]
    assert set(known["evaluated"]["models"]) == {"pretrained", "SFT", "GRPO", "4-bit"}
    assert re.search(r"Response \((right|wrong)\)", told)
    life = json.loads((out / "small" / "moesaic.json").read_text())["life"]
    assert [stage["stage"] for stage in life][-3:] == ["sft", "policy", "compress"]


def test_a_second_run_makes_nothing_again(made: tuple[Path, str]) -> None:
    out, _ = made

    def dates() -> dict[str, int]:
        return {str(file): file.stat().st_mtime_ns for file in out.rglob("*.safetensors")}

    before = dates()
    ended = run(out, "--no-serve")
    assert ended.returncode == 0 and dates() == before
    assert ended.stdout.count("(done already)") == len(STAGES)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_report_stands_alone(made: tuple[Path, str], browser: Browser, scheme, tmp_path: Path) -> None:
    out, _ = made
    page = browser.new_page(color_scheme=scheme)
    asked: list[str] = []
    problems: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.on("console", lambda message: problems.append(message.text))
    page.goto((out / "report.html").as_uri())
    assert len(asked) == 1 and problems == []
    headings = ["The machine", "Pretraining", "Supervised fine-tuning (SFT)", "Reinforcement learning (GRPO)"]
    headings += ["Quantized to 4 bits", "Samples", "Lineage"]
    assert page.locator("h2").all_text_contents() == headings
    assert page.locator("svg polyline").count() > 8
    assert page.locator("svg rect.load").count() > 8
    background = page.evaluate("getComputedStyle(document.body).backgroundColor")
    red = int(re.findall(r"\d+", background)[0])
    assert (red > 200) == (scheme == "light")
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert len(page.screenshot(path=tmp_path / "report.png", full_page=True)) > 20_000
    page.close()


def test_a_person_gets_a_page_that_answers(made: tuple[Path, str], browser: Browser) -> None:
    out, _ = made
    ours, theirs = pty.openpty()
    served = forked.Forked(command(out, "--port", "0"), theirs, theirs, subprocess.PIPE)
    os.close(theirs)
    try:
        shown = ""
        while not (found := re.search(r"http://127\.0\.0\.1:\d+", shown)):
            shown += os.read(ours, 4096).decode("utf-8", "replace")
        page = browser.new_page()
        page.goto(found[0])
        page.get_by_role("textbox").first.fill("State the final answer: 3 + 4 - 2 =")
        page.keyboard.press("Enter")
        expect(page.locator(".message")).to_have_count(2, timeout=600_000)
        page.close()
        served.send_signal(signal.SIGINT)
        end = time.monotonic() + PATIENCE
        while served.poll() is None and time.monotonic() < end:
            time.sleep(0.05)
        assert served.returncode == 0
    finally:
        served.kill()
        served.wait()
        os.close(ours)
        assert served.stderr is not None
        served.stderr.close()


def test_every_question_is_by_itself_and_the_likeliest_answer_is_given(made: tuple[Path, str]) -> None:
    for name in ("base", "aligned", "small"):
        tokenizer = moesaic.load(made[0] / name).tokenizer
        assert tokenizer is not None and recommended(tokenizer)["temperature"] == 0
        turns = [{"role": "user", "content": f"{ASKED} 1 + 1 ="}, {"role": "assistant", "content": "2"}]
        second = {"role": "user", "content": f"{ASKED} 2 + 12 - 3 ="}
        assert tokenizer.chat([*turns, second]) == tokenizer.chat([second])
        answered = tokenizer.chat(turns, reply=False)
        assert turns[0]["content"] in answered and answered.startswith(tokenizer.chat(turns[:1]))
        for bare in ("2 + 12 - 3 =", "2+12-3", "2 + 12 - 3"):
            assert tokenizer.chat([{"role": "user", "content": bare}]) == tokenizer.chat([second])


def test_a_life_for_a_gpu_wants_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(UserError, match="no GPU"):
        check_gpu()
    ended = run(tmp_path, "--gpu", "--model", "smollm2")
    assert ended.returncode == 2 and "Leave one of them out" in ended.stderr


def test_a_life_for_a_gpu_takes_only_sums_for_sums(tmp_path: Path) -> None:
    """Its recipes are whole, and what is nothing but numbers is asked as a sum."""
    life = GpuLife(tmp_path, Console())
    assert life.recipe(life.pretrains).train.steps * life.pilot > 60
    assert len(life.recipe(life.aligns).align.stages) == 2
    folder = tmp_path / "data" / "tokenizer"
    folder.mkdir(parents=True)
    (folder / "chat_template.jinja").write_text("{% for m in messages %}{{ m.role }}: {{ m.content }}|{% endfor %}")
    (tmp_path / "data" / "manifest.json").write_text('{"end_of_document": 0}')
    life._write_chat_settings()
    template = jinja2.Environment(trim_blocks=True, lstrip_blocks=True).from_string(
        (folder / "chat_template.jinja").read_text()
    )

    def asked(*contents: str) -> str:
        return template.render(messages=[{"role": "user", "content": content} for content in contents])

    assert asked("hello", "2+12-3 =") == f"user: {ASKED} 2 + 12 - 3 =|"
    assert asked("Is 7 a prime", "Spell this word backward") == "user: Spell this word backward|"


def test_one_token_is_said_as_one() -> None:
    found = {"accuracy": 0.0, "accuracy_low": 0.0, "accuracy_high": 0.1}
    models = {"short": {**found, "answer_tokens": 1.2}, "long": {**found, "answer_tokens": 31.7}}
    told = dict(summaries.evaluated({"models": models}))
    assert told["short"].endswith(", 1 token per response") and told["long"].endswith(", 32 tokens per response")


def test_any_name_of_a_directory_will_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str | None] = []
    monkeypatch.setattr(
        "moesaic.train.pretrain.pretrain",
        lambda recipe, out: asked.append(recipe.train.data) or {"outcome": "finished"},
    )
    life = TinyLife(tmp_path / "life #2: again", Console())
    life._pretrain(life.out / "base", "train.steps=7")
    assert asked == [str(life.out / "data")]


def test_a_broken_record_is_told(tmp_path: Path) -> None:
    (tmp_path / "quickstart.json").write_text("{")
    ended = run(tmp_path)
    assert ended.returncode == 2 and "to start again" in ended.stderr
