"""Rewards of slides, and a policy that learns by them: what it is shown, and what is left of it after a kill."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from moesaic.align import slides_page
from moesaic.align.align import align
from moesaic.align.rewards import judge, weighted_rewards
from moesaic.align.rewards.slides import Slides, slide_of
from moesaic.data.tasks import tasks
from moesaic.errors import UserError
from moesaic.train.report.metrics import read_metrics
from moesaic.worlds.browser import chromium
from moesaic.worlds.browser.chromium import end_shared, find_chromium, shared_chromium
from moesaic.worlds.browser.chromium_window import Tab
from moesaic.worlds.judges import Answer
from tests.align.made import recipe_of

METRICS = ("content", "collisions", "aspect", "whitespace", "balance")
ENTRIES = [{"name": "slides", "metric": metric} for metric in METRICS]
WANTED = {"title": "Rain", "points": ["warm air"], "picture": "river"}
PARTS = ['<h1 class="x1 y0 w10">Rain</h1>', '<p class="x1 y3 w5">warm air</p>', '<img class="x7 y2 w4 h4" alt="river">']


@pytest.fixture(scope="module", autouse=True)
def one_browser() -> Iterator[None]:
    assert find_chromium(), "these tests need a Chromium: apt-get install chromium"
    yield
    end_shared()


def answer(text: str) -> Answer:
    return Answer("Slide: Rain", text, facts={"slide": WANTED})


def scores(text: str) -> dict[str, float | None]:
    (judged,) = judge(weighted_rewards(ENTRIES), [answer(text)])
    return judged.parts


def test_a_tidy_slide_is_worth_more_than_one_whose_parts_collide() -> None:
    tidy, crowded = "\n".join(PARTS), "\n".join(PARTS).replace("x7 y2", "x1 y3")
    assert scores(tidy)["slides.content"] == scores(tidy)["slides.collisions"] == scores(tidy)["slides.aspect"] == 1
    assert scores(crowded)["slides.content"] == 1 and scores(crowded)["slides.collisions"] == 0.5


def test_leaving_out_what_is_hard_to_place_is_worth_less_in_every_metric() -> None:
    assert scores(PARTS[0])["slides.collisions"] == pytest.approx(1 / 3)
    assert set(scores("").values()) == {0.0}
    assert scores("<script>1</script>")["slides.aspect"] == 0


def test_the_slide_is_what_stands_in_a_fence_or_after_a_thought() -> None:
    assert slide_of("```html\n<p>a</p>\n```") == "<p>a</p>" == slide_of("<think>hm</think>\n<p>a</p>").strip()


def test_without_a_browser_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moesaic.worlds.slides.rendering.find_chromium", lambda: None)
    with pytest.raises(UserError, match="apt-get install chromium"):
        weighted_rewards(ENTRIES)


def test_what_asks_for_no_slide_is_a_problem_of_that_answer() -> None:
    (judged,) = judge(weighted_rewards(ENTRIES[:1]), [Answer("hello", "hello")])
    assert judged.parts == {"slides.content": None} and "was asked for" in judged.problems[0]


def test_a_browser_that_always_dies_is_a_reward_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    def die(tab: Tab, address: str) -> None:
        os.killpg(tab.browser.keeper.pid, signal.SIGKILL)
        raise chromium.BrowserGone("killed")

    monkeypatch.setattr(Tab, "show", die)
    (judged,) = judge([("slides", 1.0, Slides())], [answer("<p>never seen before</p>")])
    assert judged.total == 0 and "ended again and again" in judged.problems[0]


def test_pictures_of_the_start_and_of_now(tmp_path) -> None:
    first, second = "\n".join(PARTS), "\n".join(PARTS[:2])
    Slides().show([answer(first)], tmp_path)
    start = (tmp_path / "slides" / "1-start.png").read_bytes()
    Slides().show([answer(second)], tmp_path)
    assert (tmp_path / "slides" / "1-start.png").read_bytes() == start
    assert (tmp_path / "slides" / "1-now.png").read_bytes() != start
    page = (tmp_path / slides_page.FILE).read_text()
    assert page.count("data:image/png;base64,") == 2 and "<td>0.67</td>" in page


def test_a_policy_learns_from_slides_and_is_measured_on_held_out_ones(base, tmp_path, monkeypatch) -> None:
    """The browser is killed at every step."""
    plain = Slides.each

    def killed_before(reward: Slides, answers):
        os.killpg(shared_chromium().keeper.pid, signal.SIGKILL)
        return plain(reward, answers)

    monkeypatch.setattr(Slides, "each", killed_before)
    rewards = ", ".join(f"{{name: slides, metric: {metric}}}" for metric in METRICS[:2])
    recipe = recipe_of(
        tmp_path,
        f'{{name: policy, steps: 2, lr: 0.001, data: [{{path: "builtin:slides"}}], rewards: [{rewards}], prompts: 1, '
        "group: 2, max_tokens: 6, evaluate_every: 1, evaluate: 2, normalise: each}",
    )
    shown: list[bool] = []
    show = slides_page.write

    def noted(out, *rest) -> None:
        shown.append((out / "checkpoints").exists())
        show(out, *rest)

    monkeypatch.setattr(slides_page, "write", noted)
    align(recipe, base, tmp_path / "out", quiet=True)
    assert len(shown) == 3 and not shown[0]  # the pictures of the start are of the model from before the first step
    lines = read_metrics(tmp_path / "out")
    assert {f"held_out/slides.{metric}" for metric in METRICS[:2]} <= lines[-1].keys()
    assert all(line.get("reward_problems", 0) == 0 for line in lines)
    assert tasks("slides", "test", 0).metadata["title"] in (tmp_path / "out" / slides_page.FILE).read_text()
