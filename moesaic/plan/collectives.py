"""Seconds and bytes of a message among devices: which link it crosses, by which algorithm.

A group of `size` ranks whose members are `stride` devices apart lies inside one NVLink domain or spans several. Inside
it messages run at `link`; between domains at `network`, of which every device has its share. Groups that span domains
are hierarchical, as NCCL makes them: the part inside a domain and the part between overlap, so the slower one counts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from moesaic.plan.hardware import Device


@dataclass(frozen=True)
class Group:
    """Ranks that exchange messages: how many there are, and how many of them share one domain."""

    size: int
    inside: int

    @property
    def domains(self) -> int:
        return self.size // self.inside


def group(size: int, stride: int, device: Device) -> Group:
    """`size` ranks, each `stride` devices after the last. An awkward number counts its largest even division."""
    fit = max(1, min(size, device.domain // stride if stride <= device.domain else 1))
    inside = max(count for count in range(1, fit + 1) if size % count == 0)
    return Group(size, inside)


def reduce_scatter(bytes_: float, among: Group, device: Device) -> float:
    """Each rank begins with `bytes_` and ends with its share of the sum. An all-gather is the same backwards."""
    if among.size == 1 or not bytes_:
        return 0.0
    link, network = device.link * device.link_share, device.network * device.network_share
    local = bytes_ * (among.inside - 1) / among.inside / link
    # Between domains every device carries the slice of its domain that the ranks beside it do not.
    wide = bytes_ / among.inside * (among.domains - 1) / among.domains / network
    steps = math.log2(among.size)
    latency = device.link_latency if among.domains == 1 else device.network_latency
    return max(local, wide) + latency * steps


all_gather = reduce_scatter


def all_reduce(bytes_: float, among: Group, device: Device) -> float:
    return 2 * reduce_scatter(bytes_, among, device)


def expert_exchange(
    rows: float, row_bytes: float, topk: int, among: Group, device: Device, imbalance: float = 1.0
) -> float:
    """Tokens to the ranks of their experts, or back: one row for each chosen expert inside a domain, but only one for
    each domain between them, where the domain's ranks pass it on (redundancy-bypassing dispatch)."""
    if among.size == 1 or not rows:
        return 0.0
    link, network = device.link * device.link_share, device.network * device.network_share
    choices = rows * topk * row_bytes
    local = choices * (among.inside - 1) / among.inside / link
    reached = among.domains * (1 - (1 - 1 / among.domains) ** topk) if among.domains > 1 else 0.0
    wide = rows * row_bytes * reached * (among.domains - 1) / among.domains / network
    latency = device.link_latency if among.domains == 1 else device.network_latency
    return max(local, wide) * imbalance + latency * math.log2(among.size)


def send(bytes_: float, crosses_domain: bool, device: Device) -> float:
    if crosses_domain:
        return bytes_ / (device.network * device.network_share) + device.network_latency
    return bytes_ / (device.link * device.link_share) + device.link_latency
