"""Charts are well-formed, draw what they are given, and stay inside their frame."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from moesaic.report.charts import HEIGHT, LEFT, RIGHT, TOP, WIDTH, Curve, lines, shares


def parsed(chart: str) -> ElementTree.Element:
    return ElementTree.fromstring(chart)


def points(chart: str, number: int = 0) -> list[tuple[float, float]]:
    drawn = [e for e in parsed(chart).iter() if e.tag == "polyline"][number].attrib["points"]
    return [(float(x), float(y)) for x, y in (pair.split(",") for pair in drawn.split())]


def test_a_line_runs_from_corner_to_corner() -> None:
    found = points(lines([Curve("a < b", [0, 5, 10], [1.0, 2.0, 3.0])], "T", "step"))
    assert found == [(LEFT, HEIGHT - 34), ((LEFT + WIDTH - RIGHT) / 2, (TOP + HEIGHT - 34) / 2), (WIDTH - RIGHT, TOP)]


def test_what_is_not_a_number_is_left_out() -> None:
    chart = lines([Curve("x", [0, 1, 2], [1.0, float("nan"), 3.0])], "T", "step")
    assert len(points(chart)) == 2
    assert lines([Curve("x", [0], [float("nan")])], "T", "step") == ""


@pytest.mark.parametrize("options", [{}, {"from_zero": True}, {"percent": True}, {"logarithmic": True}])
def test_everything_stays_inside(options: dict[str, bool]) -> None:
    curves = [Curve("a", range(1, 900), [1 / n for n in range(1, 900)]), Curve("b", [3], [0.5], "dots")]
    chart = lines(curves, "T", "step", **options)
    assert all(LEFT <= x <= WIDTH - RIGHT and TOP - 0.1 <= y <= HEIGHT - 33.9 for x, y in points(chart))
    assert len(points(chart)) <= 400


def test_a_faint_curve_has_the_colour_of_its_smooth_one() -> None:
    chart = parsed(lines([Curve("l", [0, 1], [1, 2], "faint"), Curve("l", [0, 1], [1, 2])], "T", "step"))
    assert [e.attrib["class"].split()[0] for e in chart.iter() if e.tag == "polyline"] == ["c0", "c0"]
    assert [e.text for e in chart.iter() if e.tag == "span"] == ["l"]


def test_shares_are_darker_where_more_work_is() -> None:
    chart = parsed(shares([[3, 1], [2, 2]], [1, 50], "T", "step"))
    dark = [float(e.attrib["style"].removeprefix("opacity:")) for e in chart.iter() if e.tag == "rect"]
    assert dark == [0.75, 0.25, 0.5, 0.5]
