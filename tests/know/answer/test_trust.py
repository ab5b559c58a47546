"""Trust among agents: planted liars who collude outvote the honest, and do not out-trust them."""

from __future__ import annotations

import pytest

from bench.know_trust import CASES, Case, simulate
from moesaic.know.answer.trust import TrustNetwork, majority, normal


def mean(case: Case, who: str, seeds: int = 4) -> float:
    return sum(simulate(case, seed)[who][1] for seed in range(seeds)) / seeds


@pytest.mark.parametrize("name", [name for name in CASES if "collude" in name])
def test_colluding_liars_win_a_vote_and_lose_trust(name: str) -> None:
    case = CASES[name]
    assert mean(case, "majority") < 0.5
    assert mean(case, "trust") > 0.75


def test_trust_costs_nothing_among_the_honest() -> None:
    case = CASES["no liars, 20 % verified"]
    assert mean(case, "trust") >= mean(case, "majority") - 0.02


def test_an_agent_that_was_right_outweighs_two_that_were_wrong() -> None:
    network = TrustNetwork()
    for number in range(8):
        network.decide({"a": f"x{number}", "b": f"y{number}", "c": f"z{number}"})
        network.verified(f"X{number}.")
    decision = network.decide({"a": "The Nile", "b": "Rhine", "c": "rhine"})
    assert decision.answer == "The Nile" and majority({"a": "The Nile", "b": "Rhine", "c": "rhine"}) == "Rhine"
    assert network.reliability("a") > 0.8 > 0.2 > network.reliability("b")
    assert decision.confidence > 0.8


def test_those_that_are_wrong_together_are_one_voice() -> None:
    network = TrustNetwork()
    for number in range(12):
        network.decide({"a": "t", "b": f"lie {number}", "c": f"lie {number}", "d": f"own {number}"})
        network.verified("t")
    groups = {frozenset(group) for group in network.groups(["a", "b", "c", "d"])}
    assert groups == {frozenset("a"), frozenset("bc"), frozenset("d")}


def test_supported_citations_are_a_head_start_and_nothing_said_is_no_answer() -> None:
    network = TrustNetwork()
    assert network.decide({"a": "Oslo", "b": "Bergen"}, {"b": True}).answer == "Bergen"
    assert network.decide({"a": "Oslo", "b": "Bergen"}, {"a": True}).answer == "Oslo"
    assert network.decide({"a": "", "b": " . "}).answer == "" and network.decide({}).confidence == 0.0
    assert normal("The New-York, ") == "new york"
