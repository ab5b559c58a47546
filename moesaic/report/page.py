"""The parts of a page that needs nothing but a browser: sections, tables, and the style that goes into it."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from importlib.resources import files


def page(title: str, body: str) -> str:
    style = files("moesaic.report").joinpath("page.css").read_text(encoding="utf-8")
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><title>{escape(title)}</title>'
        f"<style>{style}</style></head><body><main>{body}</main></body></html>\n"
    )


def section(title: str, text: str, body: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{f'<p>{text}</p>' if text else ''}{body}</section>"


def grid(charts: Sequence[str]) -> str:
    return f'<div class="charts">{"".join(charts)}</div>'


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    top = f"<thead><tr>{''.join(f'<th>{escape(name)}</th>' for name in head)}</tr></thead>" if head else ""
    body = "".join(f"<tr>{''.join(f'<td>{escape(str(cell))}</td>' for cell in row)}</tr>" for row in rows)
    return f'<div class="wide"><table>{top}<tbody>{body}</tbody></table></div>'
