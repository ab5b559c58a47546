"""Devices and clusters, as people write them; and the curves of single operations."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moesaic.errors import UserError
from moesaic.plan.collectives import all_reduce, expert_exchange, group, reduce_scatter
from moesaic.plan.cost import attention, elementwise, matmul
from moesaic.plan.hardware import catalogue, load_cluster, load_device

NAMES = ["A100", "H100", "H200", "H800", "B200", "GB200", "GB300", "MI300X", "L40S", "RTX 4090", "CPU"]


@pytest.mark.parametrize("name", NAMES)
def test_catalogue_is_whole(name: str) -> None:
    device = load_device(name)
    assert device.peak("bf16") > 0 and device.memory_bytes > 0 and device.bandwidth > 0
    assert device.link > 0 and device.network > 0 and device.power > device.idle_power
    assert device.price > 0 and device.sources


@pytest.mark.parametrize(
    ("text", "count", "name"), [("64xH200", 64, "h200"), ("2x8xh100", 16, "h100"), ("GB200", 1, "gb200")]
)
def test_clusters(text: str, count: int, name: str) -> None:
    cluster = load_cluster(text)
    assert (cluster.count, cluster.device.name) == (count, name)


@pytest.mark.parametrize("text", ["0xH100", "H100x8 please", "64x", "-3xH100", "8xZ900"])
def test_nonsense_clusters(text: str) -> None:
    with pytest.raises(UserError):
        load_cluster(text)


def test_own_devices_extend_known_ones(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("mine:\n  base: h100\n  memory_bytes: 96.0e+9\n  matmul: {fp8: 0.5}\n")
    mine = load_device("mine", file)
    assert mine.memory_bytes == 96e9
    assert mine.bandwidth == load_device("h100").bandwidth
    assert mine.sustained("fp8") == 0.5 * mine.peak("fp8")
    assert mine.sustained("bf16") == load_device("h100").sustained("bf16")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("mine: {base: h101}", "no device h101"),
        ("mine: {base: h100, memroy_bytes: 3}", "unknown key"),
        ("mine: {base: h100, bandwidth: fast}", "number above zero"),
        ("mine: {base: h100, bandwidth: -1}", "number above zero"),
        ("mine: {bandwidth: 1.0e+12}", "is missing"),
        ("just text", "not a list of devices"),
    ],
)
def test_nonsense_hardware(text: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(text)
    with pytest.raises(UserError, match=message):
        load_device("mine", file)


@given(
    m=st.integers(1, 20_000),
    n=st.integers(1, 20_000),
    k=st.integers(1, 20_000),
    name=st.sampled_from(sorted(catalogue())),
)
def test_no_matmul_beats_its_roofline(m: int, n: int, k: int, name: str) -> None:
    device = load_device(name)
    seconds = matmul(m, n, k, device)
    assert seconds >= 2 * m * n * k / device.peak("bf16")
    assert seconds >= 2 * (m * k + n * k + m * n) / device.bandwidth
    assert matmul(2 * m, n, k, device) >= seconds * (1 - 1e-9)
    assert matmul(m, n, 2 * k, device) >= seconds
    faster = replace(
        device, bandwidth=2 * device.bandwidth, flops={kind: 2 * rate for kind, rate in device.flops.items()}
    )
    assert matmul(m, n, k, faster) <= seconds


def test_large_matmuls_run_at_the_measured_share() -> None:
    """A100 sustains some 250, H100 some 700 TFLOP/s in bf16 on large matmuls."""
    for name, rate in (("a100", 245e12), ("h100", 690e12)):
        size = 16384
        assert 2 * size**3 / matmul(size, size, size, load_device(name)) == pytest.approx(rate, rel=0.05)


def test_short_operations_cost_a_launch() -> None:
    device = load_device("h100")
    assert matmul(1, 16, 16, device) == pytest.approx(device.launch, rel=0.1)
    assert elementwise(0, device) == 0
    assert attention(0, 0, device) == 0


class TestMessages:
    def test_groups_lie_in_domains(self) -> None:
        device = load_device("h100")
        assert group(8, 1, device).domains == 1
        assert group(16, 1, device).domains == 2
        assert group(16, 8, device).inside == 1  # one rank per node
        assert group(64, 1, load_device("gb200")).domains == 1

    def test_textbook_bytes(self) -> None:
        device = replace(load_device("h100"), link_latency=1e-12, network_latency=1e-12)
        link, network = device.link * device.link_share, device.network * device.network_share
        among = group(8, 1, device)
        assert reduce_scatter(8e9, among, device) == pytest.approx(7e9 / link)
        assert all_reduce(8e9, among, device) == pytest.approx(14e9 / link)
        assert expert_exchange(1, 8e9, 1, among, device) == pytest.approx(7e9 / link)
        wide = group(4, 8, device)
        assert reduce_scatter(8e9, wide, device) == pytest.approx(6e9 / network)

    def test_a_token_crosses_the_network_once_per_node(self) -> None:
        device = replace(load_device("h100"), link_latency=1e-12, network_latency=1e-12)
        among = group(16, 1, device)
        rows, size, topk = 4096, 4096, 8
        once = expert_exchange(rows, size, topk, among, device)
        reached = 2 * (1 - 0.5**topk)
        network = device.network * device.network_share
        assert once == pytest.approx(rows * size * reached / 2 / network)
        assert once < rows * topk * size / 2 / network / 3  # than if every choice of an expert crossed by itself

    @given(size=st.integers(1, 4096), stride=st.sampled_from([1, 2, 8, 64]), bytes_=st.floats(1, 1e12))
    def test_faster_links_never_hurt(self, size: int, stride: int, bytes_: float) -> None:
        device = load_device("h100")
        faster = replace(device, link=2 * device.link, network=2 * device.network)
        for collective in (reduce_scatter, all_reduce):
            slow, fast = (collective(bytes_, group(size, stride, kind), kind) for kind in (device, faster))
            assert fast <= slow
        exchanges = [expert_exchange(64, bytes_ / 64, 8, group(size, stride, kind), kind) for kind in (device, faster)]
        assert exchanges[1] <= exchanges[0]
