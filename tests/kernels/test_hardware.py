"""Which dtype a processor is fast in is read from what it says of itself, so it is the same every time."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from moesaic.kernels import hardware
from moesaic.kernels.hardware import Processor, instructions

CASCADE_LAKE = "fpu sse2 avx2 fma avx512f avx512dq avx512bw avx512vl avx512_vnni"
COOPER_LAKE = f"{CASCADE_LAKE} avx512_bf16"
SAPPHIRE_RAPIDS = f"{COOPER_LAKE} avx512_fp16 amx_bf16 amx_tile amx_int8"
NEOVERSE_N1 = "fp asimd evtstrm aes pmull sha1 sha2 crc32 atomics fphp asimdhp cpuid asimdrdm lrcpc dcpop asimddp"
NEOVERSE_V1 = f"{NEOVERSE_N1} sve svei8mm svebf16 i8mm bf16 dgh rng"
GRACE = f"{NEOVERSE_V1} sve2 svebitperm"

X86 = "processor\t: {n}\nvendor_id\t: GenuineIntel\nmodel name\t: Xeon\nflags\t\t: {flags}\nvmx flags\t: vnmi bf16\n\n"
ARM = "processor\t: {n}\nBogoMIPS\t: 243.75\nFeatures\t: {flags}\nCPU implementer\t: 0x41\n\n"


def cpuinfo(form: str, *cores: str) -> str:
    return "".join(form.format(n=n, flags=flags) for n, flags in enumerate(cores))


@pytest.mark.parametrize(
    ("machine", "flags", "bfloat16", "float16"),
    [
        ("x86_64", CASCADE_LAKE, None, None),
        ("x86_64", COOPER_LAKE, "avx512_bf16", None),
        ("x86_64", SAPPHIRE_RAPIDS, "amx_bf16", "avx512_fp16"),
        ("x86_64", f"{SAPPHIRE_RAPIDS} amx_fp16", "amx_bf16", "amx_fp16"),
        ("aarch64", NEOVERSE_N1, None, None),
        ("aarch64", NEOVERSE_V1, "bf16", None),
        ("aarch64", GRACE, "bf16", None),
        ("arm64", "bf16", None, None),  # macOS tells no flags, and its PyTorch uses none
        ("riscv64", "", None, None),
    ],
)
def test_a_format_is_fast_where_there_are_instructions_for_it(machine, flags, bfloat16, float16):
    here = Processor(machine, frozenset(flags.split()))
    assert instructions(torch.bfloat16, here) == bfloat16
    assert instructions(torch.float16, here) == float16
    assert instructions(torch.bfloat16, here._replace(library=False)) is None


@pytest.mark.parametrize("form", [X86, ARM])
def test_flags_are_those_that_every_core_has(form):
    assert hardware._flags(cpuinfo(form, "a b c", "a b c")) == {"a", "b", "c"}
    assert hardware._flags(cpuinfo(form, "a b c", "b c d")) == {"b", "c"}
    assert hardware._flags("") == frozenset()


@pytest.mark.parametrize(("flags", "expected"), [(CASCADE_LAKE, torch.float32), (SAPPHIRE_RAPIDS, torch.bfloat16)])
def test_the_choice_is_the_same_however_busy_the_machine_is(flags, expected, monkeypatch):
    monkeypatch.setattr(hardware, "processor", lambda: Processor("x86_64", frozenset(flags.split())))
    monkeypatch.setattr("time.perf_counter", lambda: pytest.fail("nothing is timed"))
    assert {hardware.dtype(torch.device("cpu"), torch.bfloat16) for _ in range(12)} == {expected}
    assert hardware.dtype(torch.device("cpu"), torch.float32) == torch.float32
    assert hardware.dtype(torch.device("cuda"), torch.bfloat16) == torch.bfloat16


def test_a_system_that_does_not_tell(monkeypatch):
    def missing(path: Path) -> str:
        raise FileNotFoundError(path)

    monkeypatch.setattr(Path, "read_text", missing)
    assert hardware.processor.__wrapped__().flags == frozenset()


def test_no_more_threads_than_were_asked_for(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    allowed = hardware.threads()
    for told, expected in (("1", 1), ("1,2", 1), ("9999", allowed), ("0", allowed), ("", allowed), ("many", allowed)):
        monkeypatch.setenv("OMP_NUM_THREADS", told)
        assert hardware.threads() == expected
