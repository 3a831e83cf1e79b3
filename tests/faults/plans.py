"""What goes wrong where: cases of one fault each, drawn from all combinations that make sense. Pure.

A case is a job of a few ranks that runs one kind of operation again and again. One rank, the victim, is struck by the
fault at one phase; the others must learn of it, or must not be disturbed, as ``Expected`` says.
"""

from __future__ import annotations

import itertools
import random
from collections import deque
from collections.abc import Iterator
from typing import Final, NamedTuple

__all__ = [
    "BACKENDS",
    "COMBINATIONS",
    "FAULTS",
    "HOSTS",
    "LOCAL",
    "NETWORKS",
    "OPERATIONS",
    "PHASES",
    "Case",
    "Expected",
    "expected",
    "plan",
]

LOCAL: Final = ("loopback", "nccl")  # all ranks share a process; NCCL is simulated
NETWORKS: Final = ("gloo", "hierarchical")  # those that use gloo
BACKENDS: Final = ("shm", *NETWORKS, *LOCAL)
HOSTS: Final = "aabb"  # the host of each rank, with the hierarchical backend
ROOTED: Final = ("broadcast", "reduce", "scatter", "gather", "broadcast_object")
SIZED: Final = (
    "all_reduce",
    "broadcast",
    "reduce",
    "all_gather",
    "all_gather_single",
    "reduce_scatter",
    "reduce_scatter_single",
    "scatter",
    "gather",
    "all_to_all",
    "all_to_all_single",
    "messages",
    "scope",
    "agreed",
)
OPERATIONS: Final = (*SIZED, "barrier", "all_gather_object", "broadcast_object")
FAULTS: Final = (
    "kill",  # the process ends
    "lose",  # the same where ranks share a process: its control connections end, and it calls nothing more
    "stop",  # it is stopped for longer than the deadline, and then goes on
    "raise",  # an exception leaves ``async with comm``
    "cancel",  # a group of tasks that use the comm is cancelled
    "abandon",  # only awaits are cancelled
    "abort",
    "cut",  # the control connections end, and nothing else does
    "slow",  # what goes over them is late
    "slow abort",
    "memory",  # there is no shared memory to be had
    "descriptors",  # or no descriptors
    "mismatch",  # the victim calls something else
    "block",  # its loop is blocked for longer than the deadline
    "late",  # it does not call at all
)
PHASES: Final = ("before", "flight", "tail", "init", "split", "close", "shrink")
SHORTAGES: Final = (  # of shared memory
    "limit",  # files, memfds too, may not get large
    "full",  # there are no memfds, and the file systems are full
    "spare",  # there are no memfds, and /dev/shm is full, but there is room elsewhere
)
INIT_POINTS: Final = ("start", "meeting", "met", "attached", "connecting")
DEADLINE: Final = 0.5  # seconds for operations, where the deadline is to be what ends them
MEETING: Final = 3.0  # seconds to become a comm, where somebody does not come
AT_ONCE: Final = 1.0  # seconds until a death or an abort must be known
FAREWELL: Final = 2.0  # seconds that rank 0 stays for the others to hear who did not come
PULSE: Final = 1.5  # seconds between the heartbeats of the control channel, and some
GRACE: Final = 1.5  # seconds beyond a deadline: the ranks are asked what they are at
SLOWNESS: Final = 0.2  # seconds that messages are late


class Case(NamedTuple):
    """One fault on one job."""

    number: int
    backend: str
    operation: str
    fault: str
    phase: str
    size: int
    victim: int
    detail: str  #: what differs, or where in the beginning
    large: bool
    delay: float  #: how far into the phase: a fraction of 1
    uvloop: bool

    def __str__(self) -> str:
        parts = [self.backend, self.operation, self.fault, self.phase, self.detail, "large" if self.large else ""]
        return "-".join([*(part.replace(" ", "_") for part in parts if part), f"r{self.victim}of{self.size}"])


class Expected(NamedTuple):
    """What ranks that are not the victim must see."""

    errors: tuple[str, ...]  #: names of types; any of them; empty: nothing at all
    within: float  #: seconds from the fault
    named: bool = True  #: the error says who the victim is
    optional: bool = False  #: it may also be that nothing happens


Combination = tuple[str, str, str, str]  # fault, phase, backend, detail

ISSUING: Final = ("before", "flight", "tail")
WHERE: Final[dict[str, tuple[str, ...]]] = {
    "kill": PHASES,
    "lose": (*ISSUING, "split", "shrink"),
    "stop": PHASES,
    "raise": ISSUING,
    "cancel": (*ISSUING, "init", "split", "close", "shrink"),
    "abandon": ("flight",),
    "abort": (*ISSUING, "split", "close"),
    "cut": (*ISSUING, "split"),
    "slow": ("flight", "split"),
    "slow abort": ("before", "flight"),
    "memory": ("init", "split"),
    "descriptors": ("init", "split"),
    "mismatch": ("before",),
    "block": ("before",),
    "late": ("before",),
}
LOCAL_FAULTS: Final = {  # that can strike one of several ranks in one process
    "lose",
    "raise",
    "cancel",
    "abandon",
    "abort",
    "cut",
    "slow",
    "slow abort",
    "mismatch",
    "late",
}


COMPOSED: Final = {  # of the hierarchical backend; the others strike its parts
    ("kill", "before"),
    ("kill", "flight"),
    ("kill", "tail"),
    ("kill", "shrink"),
    ("kill", "split"),
    ("stop", "flight"),
    ("raise", "flight"),
    ("cancel", "init"),
    ("abort", "flight"),
    ("cut", "flight"),
    ("mismatch", "before"),
    ("late", "before"),
}


def _details(fault: str, phase: str) -> tuple[str, ...]:
    if fault == "mismatch":
        return ("kind", "dtype", "size", "root")
    if fault == "memory":
        return SHORTAGES
    if phase == "init" and fault in ("kill", "stop", "cancel"):
        return INIT_POINTS
    return ("",)


def _combinations() -> Iterator[Combination]:
    for fault, phases in WHERE.items():
        for phase, backend in itertools.product(phases, BACKENDS):
            if backend in LOCAL and fault not in LOCAL_FAULTS:
                continue
            if backend not in LOCAL and fault == "lose":
                continue
            if fault == "memory" and backend != "shm":
                continue
            if backend == "hierarchical" and (fault, phase) not in COMPOSED:
                continue
            for detail in _details(fault, phase):
                yield fault, phase, backend, detail


COMBINATIONS: Final = tuple(_combinations())


def _operations(combination: Combination) -> tuple[str, ...]:
    """That this can be done to."""
    fault, phase, _, detail = combination
    if phase in ("init", "split", "close", "shrink"):
        return ("all_reduce",)
    if phase == "tail":
        return tuple(name for name in SIZED if name not in ("scope", "agreed"))
    if fault == "mismatch":
        if detail == "root":
            return ROOTED
        if detail == "size":  # all_to_all and all_gather may be uneven, an object of any size
            return tuple(name for name in SIZED if name not in ("all_to_all", "all_gather", "agreed"))
        if detail == "kind":  # messages are apart from the rest
            return tuple(name for name in OPERATIONS if name != "messages")
        return SIZED
    return OPERATIONS


def plan(seed: int, count: int) -> list[Case]:
    """``count`` cases: all combinations in turn, each round in another order, with other operations."""
    choose = random.Random(seed)
    decks: dict[Combination, deque[str]] = {}
    cases: list[Case] = []
    while len(cases) < count:
        # a fault that can strike in many ways comes once for some of them in each round, so that others come as often
        for combination in choose.sample(COMBINATIONS, len(COMBINATIONS)):
            deck = decks.setdefault(combination, deque())
            if not deck:
                names = list(_operations(combination))
                choose.shuffle(names)
                deck.extend(names)
            cases.append(_case(len(cases), combination, deck.popleft(), choose))
    return cases[:count]


def _case(number: int, combination: Combination, operation: str, choose: random.Random) -> Case:
    fault, phase, backend, detail = combination
    size = 4 if phase == "shrink" else choose.choice([2, 3, 3, 3, 4])
    return Case(
        number=number,
        backend=backend,
        operation=operation,
        fault=fault,
        phase=phase,
        size=size,
        victim=_victim(fault, size, choose),
        detail=detail,
        large=phase == "tail",
        delay=choose.random(),
        uvloop=choose.random() < 0.5,
    )


def _victim(fault: str, size: int, choose: random.Random) -> int:
    if fault == "memory":
        return 0  # who makes what all share
    return choose.randrange(1 if fault.startswith("slow") else 0, size)  # the others' connections lead to rank 0


LATE: Final = ("CollectiveTimeoutError", "AbortedError")  # who heard it from another rank's deadline has the latter


def expected(case: Case) -> Expected:
    """What the ranks that are not struck must see."""
    if case.phase == "init":
        return _expected_of_beginning(case)
    match case.fault:
        case "abandon" | "slow":
            return Expected((), 0.0)
        case "memory" if case.detail == "spare":
            return Expected((), 0.0)
        case _ if case.phase == "close":  # it may have said goodbye before
            return Expected(("PeerLostError", "BackendError", *LATE), DEADLINE + GRACE)
        case _ if case.phase == "shrink":  # the others go on
            return Expected((), 0.0)
        case "cut":  # nobody can tell which end of a connection it was
            return Expected(("PeerLostError",), AT_ONCE, named=False)
        case "kill" | "lose":
            return Expected(("PeerLostError",), AT_ONCE)
        case "stop" if case.phase == "split":
            return Expected(("BackendError", "PeerLostError", *LATE), MEETING + GRACE, named=False)
        case "raise" | "cancel":
            return Expected(("AbortedError",), AT_ONCE)
        case "abort":
            return Expected(("AbortedError",), AT_ONCE)
        case "slow abort":
            ways = 2 if case.backend in LOCAL else 1  # there, all ranks' connections are slow
            return Expected(("AbortedError",), AT_ONCE + ways * SLOWNESS)
        case "memory":
            return Expected(("BackendError", "UnsuitableError", "AbortedError"), MEETING + GRACE, named=False)
        case "descriptors":
            errors = "BackendError", "UnsuitableError", "AbortedError", "PeerLostError"
            return Expected(errors, MEETING + GRACE, named=False, optional=True)
        case "mismatch":
            return Expected(("CollectiveMismatchError",), AT_ONCE)
        case "stop" | "block" | "late":
            # who exchanges messages names whom it waits for, which may wait for the victim
            return Expected(LATE, DEADLINE + GRACE, named=case.operation != "messages")
    raise AssertionError(f"no expectation for {case}")


def _expected_of_beginning(case: Case) -> Expected:
    match case.fault:
        case "memory" if case.detail == "spare":
            return Expected((), 0.0)
        case "memory":
            return Expected(("BackendError", "UnsuitableError", "AbortedError"), MEETING + GRACE, named=False)
        case "descriptors":
            errors = "BackendError", "UnsuitableError", "AbortedError", "PeerLostError", "RendezvousError"
            return Expected(errors, MEETING + FAREWELL + GRACE, named=False, optional=True)
    if case.detail in ("start", "meeting"):
        # a store in the same process may have heard of the victim before that is cancelled
        seen = ("PeerLostError",) if case.backend in LOCAL and case.detail == "meeting" else ()
        return Expected(("RendezvousError", *seen), MEETING + FAREWELL + GRACE)
    if case.fault == "kill" and case.detail == "met":  # who is not attached yet is looked for with each pulse
        return Expected(("PeerLostError", "AbortedError"), AT_ONCE + PULSE)
    if case.fault == "kill":
        return Expected(("PeerLostError", "AbortedError"), AT_ONCE)
    if case.fault == "stop":
        errors = "BackendError", "PeerLostError", "RendezvousError", *LATE
        return Expected(errors, MEETING + FAREWELL + GRACE, named=False)
    return Expected(("AbortedError", "PeerLostError", "BackendError"), MEETING + GRACE)
