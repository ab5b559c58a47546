"""The result of each stage of the quickstart, as rows of a table."""

from __future__ import annotations

from typing import Any

from moesaic.units import plural, readable_bytes, readable_count, readable_duration

Rows = list[tuple[str, str]]


def machine(known: dict[str, Any]) -> Rows:
    return [(name, str(value)) for name, value in known.items() if name != "seconds"]


def data(known: dict[str, Any]) -> Rows:
    return [
        (source["name"], f"{plural(source['documents'], 'document')}, {readable_count(source['tokens'])} tokens")
        for source in known["sources"]
    ] + [("vocabulary", f"{known['vocabulary']:,} tokens (BPE, trained on this text)")]


def law(known: dict[str, Any]) -> Rows:
    return [("predicted", f"loss {known['predicted']:.3f} after {plural(known['steps'], 'step')} ({_time(known)})")]


def base(known: dict[str, Any]) -> Rows:
    predicted = f"; predicted {known['predicted']:.3f}" if known.get("predicted") else ""
    tokens = readable_count(known["tokens"])
    return [
        ("loss", f"{known['first_loss']:.3f} to {known['loss']:.3f}{predicted}"),
        ("throughput", f"{known['tokens_per_second']:,.0f} tokens/s, {tokens} tokens ({_time(known)})"),
    ]


def aligned(known: dict[str, Any]) -> Rows:
    steps = plural(known["policy_steps"], "step")
    return [
        ("SFT", f"accuracy {known['before']:.1%} on held-out questions"),
        ("GRPO", f"accuracy {known['after']:.1%} after {steps} ({_time(known)})"),
        ("trainer vs. engine", f"log-probabilities differ by {known['mismatch']:g} at most"),
    ]


def upcycled(known: dict[str, Any]) -> Rows:
    before = f"{readable_count(known['parameters_before'])} upcycled to " if known["upcycled"] else ""
    active = readable_count(known["active"])
    return [("parameters", f"{before}{readable_count(known['parameters'])}, {active} active per token")]


def sft(known: dict[str, Any]) -> Rows:
    loss = f"{known['first_loss']:.3f} to {known['loss']:.3f}"
    return [("loss", f"{loss} in {plural(known['step'], 'step')} ({_time(known)})")]


def small(known: dict[str, Any]) -> Rows:
    sizes = f"{readable_bytes(known['bytes_before'])} to {readable_bytes(known['bytes'])}"
    return [("size", f"{sizes}, {known['bits_per_weight']:.2f} bits per weight ({_time(known)})")]


def evaluated(known: dict[str, Any]) -> Rows:
    return [
        (name, f"accuracy {found['accuracy']:.1%} ({found['accuracy_low']:.0%} to {found['accuracy_high']:.0%}), "
               f"{plural(round(found['answer_tokens']), 'token')} per response")
        for name, found in known["models"].items()
    ]  # fmt: skip


def _time(known: dict[str, Any]) -> str:
    return readable_duration(known["seconds"])
