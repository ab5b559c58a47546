"""Which system calls a shut-in program may make: a seccomp filter, which `jail.py` installs between fork and exec."""

from __future__ import annotations

import sys

PROCESSORS = ("x86_64", "aarch64")
NEW_MOUNTS, NEW_NAMES, NEW_IPC, NEW_USERS = 0x20000, 0x4000000, 0x8000000, 0x10000000
NEW_PROCESSES, NEW_NETWORK, NEW_CGROUPS = 0x20000000, 0x40000000, 0x2000000
THREAD = 0x10000  # CLONE_THREAD
AUDIT = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}

# What no program may call, wherever it runs: numbers on x86-64 and on arm64 (None: there is no such call).
# First what makes namespaces and mounts, then what reads other processes, then what is a rich source of kernel bugs.
NEVER: tuple[tuple[int | None, int | None], ...] = (
    *((272, 97), (308, 268), (165, 40), (166, 39), (155, 41), (161, 51), (428, 428), (429, 429), (430, 430)),
    *((431, 431), (432, 432), (433, 433), (442, 442), (304, 265)),
    *((101, 117), (310, 270), (311, 271), (312, 272)),
    *((321, 280), (298, 241), (248, 217), (249, 218), (250, 219), (323, 282), (425, 425), (426, 426), (427, 427)),
)
# What it may not call either where it still sees our own processes, files and network. In this order: sockets; signals
# and handles of processes; priorities of processes; fork; shared memory, semaphores and queues that outlive it; modes,
# owners, times and attributes of files, which Landlock does not know.
NOT_AMONG_US: tuple[tuple[int | None, int | None], ...] = (
    *((41, 198), (53, 199), (49, 200), (42, 203), (50, 201)),
    *((62, 129), (200, 130), (234, 131), (129, 138), (297, 240), (424, 424), (434, 434), (438, 438), (440, 440)),
    *((141, 140), (203, 122), (144, 119), (142, 118), (314, 274), (251, 30), (256, 238), (279, 239)),
    *((57, None), (58, None)),
    *((29, 194), (64, 190), (68, 186), (240, 180)),
    *((90, None), (91, 52), (268, 53), (452, 452), (92, None), (93, 55), (94, None), (260, 54)),
    *((132, None), (235, None), (261, None), (280, 88)),
    *((188, 5), (189, 6), (190, 7), (197, 14), (198, 15), (199, 16), (463, 463), (466, 466)),
)
CLONE, CLONE3, FCNTL, PRLIMIT = (56, 220), (435, 435), (72, 25), (302, 261)
F_SETOWN, F_SETSIG, F_SETOWN_EX = 8, 10, 15  # they make the kernel send a signal to anybody


def call_filter(among_us: bool, processor: str) -> bytes:
    """The instructions of the filter, packed; `among_us`: the program sees our own processes, files and network."""
    machine = PROCESSORS.index(processor)
    load, equal, at_least, any_bit, give = 0x20, 0x15, 0x35, 0x45, 0x06
    allow, kill, denied, missing = 0x7FFF0000, 0x80000000, 0x50001, 0x50026  # EPERM, ENOSYS
    steps = [(load, 0, 0, 4), (equal, 1, 0, AUDIT[processor]), (give, 0, 0, kill), (load, 0, 0, 0)]
    if machine == 0:
        steps += [(at_least, 0, 1, 512), (give, 0, 0, denied)]  # the same calls under other numbers (x32)

    def deny(number: int | None, answer: int = denied) -> None:
        if number is not None:
            steps.extend([(equal, 0, 1, number), (give, 0, 0, answer)])

    def when(number: int, argument: int, *tests: tuple[int, int, int]) -> None:
        """(test, value, answer if it holds); a call that none of them answers is allowed."""
        steps.append((equal, 0, 2 + 2 * len(tests), number))
        steps.append((load, 0, 0, 16 + 8 * argument))
        for test, value, answer in tests:
            steps.extend([(test, 0, 1, value), (give, 0, 0, answer)])
        steps.append((give, 0, 0, allow))

    for numbers in NEVER + (NOT_AMONG_US if among_us else ()):
        deny(numbers[machine])
    deny(CLONE3[machine], missing)  # its flags cannot be seen from here; the C library then takes clone
    spaces = NEW_MOUNTS | NEW_NAMES | NEW_IPC | NEW_USERS | NEW_PROCESSES | NEW_NETWORK | NEW_CGROUPS
    if among_us:
        when(CLONE[machine], 0, (any_bit, THREAD, allow), (at_least, 0, denied))
        when(FCNTL[machine], 1, *((equal, what, denied) for what in (F_SETOWN, F_SETSIG, F_SETOWN_EX)))
        when(PRLIMIT[machine], 0, (equal, 0, allow), (at_least, 0, denied))
    else:
        when(CLONE[machine], 0, (any_bit, spaces, denied))
    steps.append((give, 0, 0, allow))

    return b"".join(
        code.to_bytes(2, sys.byteorder) + bytes((yes, no)) + value.to_bytes(4, sys.byteorder)
        for code, yes, no, value in steps
    )
