"""What each stage of the quickstart came to, as rows of a table."""

from __future__ import annotations

from typing import Any

from moesaic.plural import plural
from moesaic.sizes import readable
from moesaic.train.report.display import amount, duration

Rows = list[tuple[str, str]]


def machine(known: dict[str, Any]) -> Rows:
    return [(name, str(value)) for name, value in known.items() if name != "seconds"]


def data(known: dict[str, Any]) -> Rows:
    return [
        (source["name"], f"{plural(source['documents'], 'document')}, {amount(source['tokens'])} tokens")
        for source in known["sources"]
    ] + [("vocabulary", f"{known['vocabulary']:,} tokens, made from this text")]


def law(known: dict[str, Any]) -> Rows:
    return [("predicted", f"loss {known['predicted']:.3f} after {plural(known['steps'], 'step')} ({_time(known)})")]


def base(known: dict[str, Any]) -> Rows:
    predicted = f"; the law said {known['predicted']:.3f}" if known.get("predicted") else ""
    return [
        ("loss", f"{known['first_loss']:.3f} to {known['loss']:.3f}{predicted}"),
        ("speed", f"{known['tokens_per_second']:,.0f} tokens/s, {amount(known['tokens'])} tokens ({_time(known)})"),
    ]


def aligned(known: dict[str, Any]) -> Rows:
    return [
        ("taught", f"{known['before']:.1%} of held-out questions right"),
        (
            "tried",
            f"{known['after']:.1%} right after {plural(known['policy_steps'], 'step')} of GRPO ({_time(known)})",
        ),
        ("trainer and engine", f"log-probabilities differ by {known['mismatch']:g} at most"),
    ]


def begun(known: dict[str, Any]) -> Rows:
    grown = f"{amount(known['parameters_before'])} parameters became " if known["upcycled"] else ""
    return [("model", f"{grown}{amount(known['parameters'])}, of which a token uses {amount(known['active'])}")]


def taught(known: dict[str, Any]) -> Rows:
    return [
        (
            "loss",
            f"{known['first_loss']:.3f} to {known['loss']:.3f} in {plural(known['step'], 'step')} ({_time(known)})",
        )
    ]


def small(known: dict[str, Any]) -> Rows:
    sizes = f"{readable(known['bytes_before'])} to {readable(known['bytes'])}"
    return [("size", f"{sizes}, {known['bits_per_weight']:.2f} bits a weight ({_time(known)})")]


def evaluated(known: dict[str, Any]) -> Rows:
    return [
        (name, f"{found['accuracy']:.1%} right ({found['accuracy_low']:.0%} to {found['accuracy_high']:.0%}), "
               f"{plural(round(found['answer_tokens']), 'token')} an answer")
        for name, found in known["models"].items()
    ]  # fmt: skip


def _time(known: dict[str, Any]) -> str:
    return duration(known["seconds"])
