"""Slides: layouts by hand, the same in a real browser, hostile ones, and browsers that die."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from moesaic.data.tasks import score, tasks
from moesaic.worlds.browser.chromium import end_shared, find_chromium, shared_chromium
from moesaic.worlds.browser.chromium_window import Tab
from moesaic.worlds.slides import rendering
from moesaic.worlds.slides.layout import Item, Layout, largest_rectangle
from moesaic.worlds.slides.rendering import Renderer, layouts, picture

TIDY = (
    '<h1 class="x1 y0 w10">Rain</h1>\n<p class="x1 y2 w5">warm air</p>\n<p class="x1 y3 w5">soft light</p>\n'
    '<img class="x7 y2 w4 h4" alt="river">'
)
WANTED = {"title": "Rain", "points": ["warm air", "soft light"], "picture": "river"}


@pytest.fixture(scope="module", autouse=True)
def one_browser() -> Iterator[None]:
    assert find_chromium(), "these tests need a Chromium: apt-get install chromium"
    yield
    end_shared()


def layout_of(slide: str) -> Layout:
    (found,) = layouts([slide])
    assert isinstance(found, Layout), found
    return found


def item(*box: float, kind: str = "text", text: str = "a", shown: bool = True) -> Item:
    return Item(kind, text, (box[0], box[1], box[2], box[3]), shown)


class TestByHand:
    def test_pairs_that_collide(self):
        one, on_it, beside = item(0, 0, 100, 50), item(50, 20, 200, 80), item(100, 0, 180, 20)
        assert Layout((one, beside)).colliding == 0  # edges that touch are no collision
        assert Layout((one, on_it)).collisions() == 0.5
        assert Layout((one, on_it, beside, item(90, 10, 120, 30))).colliding == 4
        assert Layout((one, on_it, beside, item(90, 10, 120, 30))).collisions() == 0.2

    def test_what_sticks_out_makes_the_slide_larger(self):
        assert Layout((item(0, 0, 960, 540),)).aspect() == 1
        assert Layout((item(480, 0, 1920, 270),)).aspect() == 0.5
        assert Layout((item(-960, 0, 10, 10), item(0, 0, 10, 1080))).aspect() == 0.25

    def test_the_largest_hole(self):
        assert Layout((item(0, 0, 960, 540),)).whitespace() == 1
        assert Layout((item(0, 0, 480, 540),)).whitespace() == 0.5
        assert Layout((item(480, 0, 960, 540), item(0, 0, 480, 108))).whitespace() == pytest.approx(0.6)

    def test_balance(self):
        assert Layout((item(240, 120, 720, 420),)).balance() == pytest.approx(1)
        assert Layout((item(0, 0, 240, 540), item(720, 0, 960, 540))).balance() == pytest.approx(1)
        assert Layout((item(0, 0, 480, 540),)).balance() == pytest.approx(1 - 0.5 / 2**0.5)
        assert Layout((item(0, 0, 12, 12),)).balance() < 0.05

    def test_content_is_what_can_be_seen_in_its_place_once(self):
        title, points = item(0, 0, 99, 40, kind="heading", text="RAIN"), [item(0, 60, 99, 90, text="warm air")]
        points += [item(0, 120, 99, 150, text="soft  light")]
        river = item(400, 100, 700, 300, kind="picture", text="river")
        whole = (title, *points, river)
        assert Layout(whole).content(WANTED) == 1
        assert Layout(whole[:3]).content(WANTED) == 0.75
        assert Layout((*whole, points[0])).content(WANTED) == 0.8  # said twice
        assert Layout((item(0, 0, 99, 40, text="Rain"), *whole[1:])).content(WANTED) == 0.75  # not as a heading
        assert Layout((item(0, -30, 99, 10, kind="heading", text="Rain"), *whole[1:])).content(WANTED) == 0.75
        assert Layout((*whole[:3], item(*river.box, kind="picture", text="river", shown=False))).content(WANTED) == 0.75

    def test_nothing_is_worth_nothing(self):
        empty = Layout(())
        scores = (empty.collisions(), empty.aspect(), empty.whitespace(), empty.balance(), empty.content(WANTED))
        assert scores == (0, 0, 0, 0, 0)

    def test_the_largest_rectangle_is_that_of_all_rectangles(self):
        import numpy as np

        draw = np.random.default_rng(0)
        for _ in range(20):
            empty = draw.random((6, 7)) < 0.7
            every = [
                (b - t) * (r - left)
                for t in range(6)
                for b in range(t + 1, 7)
                for left in range(7)
                for r in range(left + 1, 8)
                if empty[t:b, left:r].all()
            ]
            assert largest_rectangle(empty) == max(every, default=0)


class TestTasks:
    def test_solutions_are_complete_and_tidy_ones_good_layouts(self):
        made = [tasks("slides", "train", number) for number in range(12)]
        assert all(score(task, task.solution) == 1 for task in made)
        for task, layout in zip(made, layouts([str(task.solution) for task in made]), strict=True):
            assert isinstance(layout, Layout)
            assert (layout.content(task.metadata), layout.colliding, layout.aspect()) == (1, 0, 1)

    def test_crowded_ones_are_complete_and_many_collide(self):
        made = [tasks("slides:crowded=1", "train", number) for number in range(24)]
        assert all(score(task, task.solution) == 1 for task in made)
        found = [layout for layout in layouts([str(task.solution) for task in made]) if isinstance(layout, Layout)]
        assert sum(layout.colliding > 0 for layout in found) > 12

    def test_what_is_missing_or_was_not_asked_for_counts_less(self):
        task = tasks("slides:min_points=2,max_points=2", "train", 0)
        lines = str(task.solution).splitlines()
        assert score(task, "\n".join(lines[:3])) == 0.75 and score(task, "") == 0.0
        assert score(task, "\n".join([*lines, "<p>and more</p>"])) == 0.8


class TestBrowser:
    def test_where_things_are(self):
        title, first, second, river = layout_of(TIDY).items
        assert (title.kind, first.kind, river.kind) == ("heading", "text", "picture")
        assert (second.text, river.text, river.box) == ("soft light", "river", (560, 135, 880, 405))
        assert first.box[0] == 80 and 130 < first.box[1] < 145 and 60 < first.box[2] - first.box[0] < 200
        assert layout_of(TIDY).content(WANTED) == 1 and layout_of(TIDY).colliding == 0

    def test_a_text_is_where_its_letters_are_also_beside_its_box(self):
        narrow = layout_of('<p class="x0 y0 w1" style="white-space: nowrap">many words in one line</p>')
        assert narrow.items[0].box[2] > 200

    @pytest.mark.parametrize(
        "hidden",
        [
            "opacity: 0",
            "visibility: hidden",
            "font-size: 2px",
            "color: #fdfcf8",
            "color: transparent",
            "overflow: hidden; height: 3px",
            "left: 2000px",
        ],
    )
    def test_what_cannot_be_seen_is_not_there(self, hidden):
        slide = TIDY.replace('<p class="x1 y3 w5"', f'<p class="x1 y3 w5" style="{hidden}"')
        assert layout_of(slide).content(WANTED) == 0.75

    def test_many_at_once_are_what_each_is_alone(self):
        slides = [str(tasks("slides:crowded=0.5", "train", number).solution) for number in range(40)]
        alone = [Renderer().layouts([slide])[0] for slide in slides[::8]]
        assert Renderer().layouts(slides)[::8] == alone

    def test_a_picture_is_a_png_of_the_slide(self):
        shot = picture(TIDY)
        assert shot.startswith(b"\x89PNG") and shot[16:24] == (480).to_bytes(4, "big") + (270).to_bytes(4, "big")
        assert picture(TIDY.replace("river", "field")) != shot


class Asked(BaseHTTPRequestHandler):
    seen: list[str] = []

    def do_GET(self) -> None:
        Asked.seen.append(self.path)
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


class TestHostile:
    def test_nothing_runs_and_nothing_is_asked_for(self, tmp_path):
        server = HTTPServer(("127.0.0.1", 0), Asked)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        there, secret = f"http://127.0.0.1:{server.server_port}", tmp_path / "secret.txt"
        secret.write_text("a secret")
        slide = (
            f'<base href="{there}/"><link rel="stylesheet" href="{there}/a.css"><meta http-equiv="refresh" '
            f'content="0;url={there}/b"><style>@import "{there}/c.css";'
            f"body {{ background: url({there}/d.png) }}</style>"
            f'<script>document.body.innerHTML = "<h1>Owned</h1>"; parent.document.title = "x"</script>'
            f'<img src="{there}/e.png" onerror="document.body.innerHTML = 1" class="w2 h2"><h1 class="x3 y3">Rain</h1>'
            f'<iframe src="file://{secret}"></iframe><object data="{there}/f"></object><form action="{there}/g"></form>'
            f'<svg onload="parent.document.body.remove()"></svg><a href="{there}/h" ping="{there}/i" autofocus>x</a>'
        )
        found, other = Renderer().layouts([slide, TIDY])
        server.shutdown()
        assert isinstance(found, Layout) and isinstance(other, Layout)
        assert "Rain" in [item.text for item in found.items] and other.content(WANTED) == 1
        assert Asked.seen == [] and not any("secret" in item.text for item in found.items)

    def test_a_slide_closes_no_frame_but_its_own(self):
        escaping = '"></iframe></body></html><h1>out</h1><iframe srcdoc="'
        found, other = Renderer().layouts([escaping, TIDY])
        assert isinstance(found, Layout) and isinstance(other, Layout) and other.content(WANTED) == 1

    def test_one_that_takes_for_ever_costs_only_itself(self, monkeypatch):
        monkeypatch.setattr(rendering, "TOGETHER", 1.0)
        monkeypatch.setattr(rendering, "ALONE", 8.0)
        slow = "\ud800" + "<div>" * 30_000
        found = Renderer().layouts([TIDY, slow, TIDY.replace("Rain", "Wind")])
        assert isinstance(found[1], ValueError) and [isinstance(one, Layout) for one in found] == [True, False, True]

    def test_a_page_that_does_not_answer_is_taken_apart(self, monkeypatch):
        plain = Tab.run
        together: list[int] = []

        def run(tab: Tab, script: str, *arguments: object) -> object:
            frames = tab.shows.html.count("<iframe")
            together.append(frames)
            if "NEVER" in tab.shows.html:
                tab.seconds = 0.3
                return plain(tab, "() => { for (;;) {} }")
            return plain(tab, script, *arguments)

        monkeypatch.setattr(Tab, "run", run)
        found = Renderer().layouts([TIDY, "<p>NEVER</p>", TIDY.replace("Rain", "Wind")])
        assert [isinstance(one, Layout) for one in found] == [True, False, True] and together[:2] == [3, 1]


class TestKilled:
    def test_a_browser_that_is_killed_is_started_again(self):
        renderer = Renderer()
        before = renderer.layouts([TIDY])
        os.killpg(shared_chromium().keeper.pid, signal.SIGKILL)
        assert renderer.layouts([TIDY + " "])[0] == before[0]

    def test_one_that_dies_at_every_look_is_an_error_and_no_hang(self, monkeypatch):
        plain = Tab.show

        def die(tab: Tab, address: str) -> None:
            os.killpg(tab.browser.keeper.pid, signal.SIGKILL)
            plain(tab, address)

        monkeypatch.setattr(Tab, "show", die)
        renderer = Renderer()
        (found,) = renderer.layouts([TIDY])
        assert "ended again and again" in str(found)
        monkeypatch.undo()
        assert isinstance(renderer.layouts([TIDY])[0], Layout)  # and what failed is not remembered
