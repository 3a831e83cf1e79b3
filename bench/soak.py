"""Random operations and random faults for as long as you like: what breaks, what leaks, how long recovery takes.

    python bench/soak.py --minutes 10 --ranks 4 --backend shm --seed 1 --json out.json

The ranks run rounds. What a round does follows from the seed and its number: some acts, each of them operations of
many kinds in flight at once, whose results are all checked; and in most rounds one fault, which hits one rank in the
middle of an act. After a fault that breaks the comm the survivors shrink it, the others come in again (a process that
was killed is replaced by another one, one that was only left out comes back itself), and the next round begins with
all ranks, in another order. Acts:

    forms     every way to move and to reduce tensors, messages included; awaited in an order of each rank's own
    objects   objects and dicts of tensors, to all and from rank to rank
    scope     operations of all kinds in a scope of coalesce()
    split     the ranks in two comms, with operations in both and in the whole at the same time
    agreed    a comm in agreed order, used by tasks that each rank starts in an order of its own

Faults, of which the first three break nothing:

    none      a round without one
    pause     SIGSTOP, and SIGCONT after less than a second
    cancel    tasks that await operations are cancelled
    kill      kill -9
    killtwo   kill -9 of two ranks, the second while the others recover
    freeze    SIGSTOP, and SIGCONT when the others have given the rank up
    abort     comm.abort()
    raise     an exception leaves ``async with comm``
    mismatch  one rank calls another collective than the others

Some of the newcomers are killed while they come in. A run fails if a result is wrong, an error comes where none is due,
a process ends otherwise than it should, nothing has happened for --patience seconds (the stacks of all ranks are shown
then), or if a rank that has lived from beginning to end has grown: memory, descriptors, threads.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ctypes
import faulthandler
import gc
import math
import multiprocessing
import os
import random
import signal
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any, NamedTuple

import torch
from report import median, print_table, write_rows
from torch import distributed as dist

from asynccomm.comm.comm import Comm
from asynccomm.comm.join_comm import join_comm
from asynccomm.comm.new_comm import new_comm
from asynccomm.core import stacks
from asynccomm.core.work import Work
from asynccomm.errors import (
    BrokenError,
    CollectiveTimeoutError,
    LeftOutError,
    RendezvousError,
)
from asynccomm.ops.reduce_op import ReduceOp
from asynccomm.runner import run
from asynccomm.store.client import StoreClient
from asynccomm.store.server import listen, serve
from asynccomm.testing.conformance.argument_forms import Forms, StartedOp, expect_finished
from asynccomm.testing.conformance.data import FLOATS, INTS, sample
from asynccomm.testing.conformance.objects import expect_same

TIMEOUT = 30.0  # seconds of an operation; a rank that is merely slow must not exceed it
EXCUSED = 3.0  # for the kill of a second rank, or of a newcomer, to be felt
SHORT = 2.0  # of one that is to exceed it
SHAPES = [(), (0,), (12,), (3, 5), (257,), (4096,), (20_011,), (300_007,)]
HARMLESS = ("none", "pause", "cancel")
DEADLY = ("kill", "killtwo")
FAULTS = (*HARMLESS, *DEADLY, "freeze", "abort", "raise", "mismatch")
ACTS = ("forms", "forms", "objects", "scope", "split", "agreed")
WARM = 0.25  # of the run, after which growth counts
# how much more a rank may have in the end
SLACK = {"private_mb": 48.0, "shared_mb": 48.0, "fds": 8.0, "threads": 3.0, "tasks": 4.0}
KEYS = 12  # per rank and comm: a comm leaves its keys in the store
GLOO_THREADS = 1 / 20  # per recovery: gloo leaves some behind, and says so
PRELOADED = ["torch", "uvloop", "asynccomm.comm.comm", "asynccomm.comm.new_comm", "asynccomm.testing.conformance"]


_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc has it


# -- what happens in a round ------------------------------------------------------------------------------------------


class Plan:
    """What a round does, the same on all ranks: it follows from the seed, the number and who takes part."""

    def __init__(self, seed: int, number: int, members: Sequence[str], faults: Sequence[str]) -> None:
        chance = self.chance = random.Random(f"{seed}/{number}")
        self.fault = chance.choice(faults)
        self.acts = [chance.choice(ACTS) for _ in range(chance.randint(2, 5))]
        self.hit = chance.randrange(len(self.acts))  # the act in whose middle the fault comes
        # the first process is never killed, so that one lives long enough to be seen growing; but the rest hits it, too
        mortal = [rank for rank, name in enumerate(members) if name != "0" or self.fault not in DEADLY]
        self.victims = chance.sample(mortal, min(2, len(mortal)))
        self.delay = chance.choice([0.0, chance.uniform(0, 0.005), chance.uniform(0, 0.05)])
        self.second = chance.uniform(0, 0.3)  # seconds from the first kill to the second
        self.order = chance.sample(range(1000), 1000)  # of the ranks, when newcomers come in


def forms_of(comm: Comm, chance: random.Random) -> tuple[Forms, list[Callable[[], Iterator[StartedOp]]]]:
    """Some of the ways to move or to reduce, not called yet."""
    dtype = chance.choice([dtype for dtype in (*FLOATS, *INTS) if dtype is not torch.uint64])  # it has no MAX
    forms = Forms(comm, chance.choice(SHAPES), dtype, torch.clone)
    op = ReduceOp.SUM if chance.random() < 0.7 else ReduceOp.MAX
    parts: list[Callable[[], Iterator[StartedOp]]] = [
        forms.lists,
        forms.copies,
        forms.singles,
        forms.messages,
        lambda: forms.reductions(op),
        lambda: forms.scattered_reductions(op),
    ]
    return forms, chance.sample(parts, chance.randint(1, len(parts)))


async def forms_act(comm: Comm, chance: random.Random) -> list[str]:
    forms, parts = forms_of(comm, chance)
    started = [one for part in parts for one in part()]
    random.shuffle(started)
    await expect_finished(started, "in a soak")
    forms.expect_inputs_untouched("in a soak")
    return [one.name for one in started]


async def scope_act(comm: Comm, chance: random.Random) -> list[str]:
    forms, parts = forms_of(comm, chance)
    async with comm.coalesce(max_ops=chance.choice([None, 3])) as batch:
        started = [one for part in parts for one in part()]
    await batch
    await expect_finished(started, "in a scope")
    forms.expect_inputs_untouched("in a scope")
    return [f"{one.name} (scope)" for one in started]


async def objects_act(comm: Comm, chance: random.Random) -> list[str]:
    size, rank = comm.size, comm.rank
    following, previous = (rank + 1) % size, (rank - 1) % size
    root, length = chance.randrange(size), chance.choice([0, 10, 5_000, 200_000])
    tensors = {"a": sample(root, (length,)), "b": [sample(1, (3, 4)), "text"]}
    parts: list[tuple[str, Work[Any], object]] = [
        ("all_gather_object", comm.all_gather_object((rank, "x" * length)), [(r, "x" * length) for r in range(size)]),
        ("broadcast_object", comm.broadcast_object({"n": length} if rank == root else None, root), {"n": length}),
        ("gather_object", comm.gather_object(rank, root), list(range(size)) if rank == root else None),
        ("scatter_object_list", comm.scatter_object_list(list(range(size)) if rank == root else None, root), rank),
        ("broadcast_tensor_dict", comm.broadcast_tensor_dict(tensors if rank == root else None, root), tensors),
        ("send_object", comm.send_object((rank, length), following, 5), None),
        ("recv_object", comm.recv_object(previous, 5), (previous, length)),
        ("barrier", comm.barrier(), None),
    ]
    random.shuffle(parts)
    for name, work, expected in parts:
        expect_same(await work, expected, f"{name} in a soak")
    return [name for name, _, _ in parts]


async def split_act(comm: Comm, chance: random.Random) -> list[str]:
    cut = chance.randint(1, comm.size)
    ranks = chance.sample(range(comm.size), comm.size)
    mine = ranks[:cut] if comm.rank in ranks[:cut] else ranks[cut:]
    seed = chance.random()
    async with comm.split(mine, "part") as part:
        assert part is not None
        assert part.parent_ranks == tuple(mine)
        both = await asyncio.gather(
            forms_act(part, random.Random(f"{seed}/{mine}")), forms_act(comm, random.Random(seed))
        )
    return ["split", *both[0], *both[1]]


async def agreed_act(comm: Comm, chance: random.Random, address: tuple[str, int]) -> list[str]:
    tags = [f"tag {i}" for i in range(chance.randint(1, 30))]
    size = comm.size
    store = await StoreClient.connect(*address, timeout=TIMEOUT)
    try:
        async with new_comm(
            comm.backend, name="agreed", store=store, rank=comm.rank, size=size, ordering="agreed", timeout=TIMEOUT / 4
        ) as agreed:

            async def one(tag: str) -> None:
                await asyncio.sleep(random.choice([0.0, 0.0, 0.001]))
                total = await agreed.all_reduce(torch.tensor([float(agreed.rank + len(tag))]), tag=tag)
                assert total.item() == sum(range(size)) + size * len(tag), f"{tag}: {total}"

            async with asyncio.TaskGroup() as tasks:
                for tag in random.sample(tags, len(tags)):
                    tasks.create_task(one(tag))
    finally:
        await store.aclose()
    return ["new_comm"] + ["all_reduce (agreed)"] * len(tags)


async def cancel_act(comm: Comm, chance: random.Random) -> list[str]:
    """Whoever awaits is cancelled, at times of each rank's own; the operations are not."""
    forms, parts = forms_of(comm, chance)
    started = [one for part in parts for one in part()]

    async def give_up(one: StartedOp) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(random.choice([0.0, 0.0001, 0.001])):
                await one.work

    tasks = [asyncio.ensure_future(give_up(one)) for one in started]
    await asyncio.sleep(0)
    for task in random.sample(tasks, len(tasks) // 2):
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await expect_finished(started, "after being cancelled")
    forms.expect_inputs_untouched("after being cancelled")
    return [one.name for one in started]


# -- a rank -----------------------------------------------------------------------------------------------------------


class Sample(NamedTuple):
    """How large a process is."""

    private_mb: float  #: resident memory of its own
    shared_mb: float  #: resident shared memory
    fds: int
    threads: int
    tasks: int  #: of the event loop


def measure() -> Sample:
    gc.collect()
    if _trim is not None:
        _trim(0)  # what is free and kept, for each thread that ever was, is no growth
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return Sample(
        int(status["RssAnon"].split()[0]) / 1024,
        int(status["RssShmem"].split()[0]) / 1024,
        len(os.listdir("/proc/self/fd")),
        len(os.listdir("/proc/self/task")),
        len(asyncio.all_tasks()),
    )


class Job(NamedTuple):
    """What a process is told when it starts."""

    name: str
    rank: int  #: -1: it is to come in later
    ranks: int
    backend: str
    faults: Sequence[str]
    seed: int
    until: float  #: when to end, by time.monotonic()
    address: tuple[str, int]  #: of the store
    doom: float | None  #: seconds after which it is to be killed while it comes in


class Raised(Exception):
    """The exception that leaves ``async with``."""


class Rank:
    """One process's part."""

    def __init__(self, job: Job, pipe: Connection) -> None:
        self._job = job
        self._pipe = pipe
        self._lock = threading.Lock()
        self._comm: Comm | None = None
        self._number = 0  # of the round
        self._members: list[str] = []  # names, in rank order
        self._broken: tuple[float, str] | None = None  # when the comm broke and by what fault, until all is well again
        self._fault = "none"  # of the round
        self._excused = 0.0  # until when the second kill of a round may come

    def say(self, *what: object) -> None:
        """Tell the driver."""
        with self._lock:
            self._pipe.send(what)

    async def run(self) -> None:
        if self._job.rank >= 0:
            self._comm = await new_comm(self._job.backend, name="soak", timeout=TIMEOUT)
        while True:
            try:
                if self._comm is None:
                    self._comm = await self._come_in()
                comm = await self._whole(self._comm)
                if await self._over(comm):
                    break
                await self._round(comm)
            except LeftOutError as error:
                self._expected(error)
                await self._end()
            except Raised:
                self._comm = None
            except BrokenError as error:
                await self._after(error)
        await comm.aclose()
        self.say("done", measure())

    async def _end(self) -> None:
        """This rank is out."""
        assert self._comm is not None
        comm, self._comm = self._comm, None
        await comm.aclose()

    async def _come_in(self) -> Comm:
        doom = None if self._job.doom is None or self._members else self._die(self._job.doom, "newcomer")
        comm = await join_comm(name="soak", timeout=TIMEOUT * 10)
        self._excused = time.monotonic() + EXCUSED  # others may be killed when they are just in
        if doom is not None:
            doom.cancel()
            self.say("dying", "")
        return comm

    async def _over(self, comm: Comm) -> bool:
        """Whether this is the end; also the begin of a round."""
        late = self._number > 0 and time.monotonic() > self._job.until
        over = await comm.broadcast_object(late if comm.rank == 0 else None, 0)
        self.say("round", self._number, measure())
        return bool(over)

    async def _whole(self, comm: Comm) -> Comm:
        """All ranks on one round, and as many as there should be."""
        while True:
            said: list[Any] = await comm.all_gather_object((self._number, self._job.name))
            self._number, self._members = max(number for number, _ in said), [name for _, name in said]
            if self._broken is not None:
                when, fault = self._broken
                self._broken = None
                self.say("recovered", fault, time.monotonic() - when)
            if comm.size == self._job.ranks:
                self._fault = self._plan().fault
                return comm
            self._excused = time.monotonic() + EXCUSED  # newcomers may be killed when they are just in
            waiting = await self._newcomers(comm) if comm.rank == 0 else None
            names: Any = await comm.broadcast_object(waiting, 0, timeout=math.inf)
            order = self._plan().order
            everyone: list[int | str] = [*range(comm.size), *names[: self._job.ranks - comm.size]]
            comm = await go_on(comm, [who for _, who in sorted(zip(order, everyone, strict=False))])
            self._comm = comm
            self.say("grown")

    def _plan(self) -> Plan:
        return Plan(self._job.seed, self._number, self._members, self._job.faults)

    async def _newcomers(self, comm: Comm) -> list[str]:
        while True:
            if names := await comm.newcomers():
                return names
            await asyncio.sleep(0.02)

    async def _after(self, error: BrokenError) -> None:
        """What follows a broken comm: a smaller one, unless this rank is out."""
        if self._broken is None:
            self._broken = time.monotonic(), self._fault
        self._expected(error)
        self._number += 1
        assert self._comm is not None
        try:
            self._comm = await go_on(self._comm)
        except LeftOutError as left_out:
            self._expected(left_out)
            self._broken = None
            await self._end()

    def _expected(self, error: Exception) -> None:
        """The driver is told of errors for which there is no reason."""
        self.say("broken", self._fault, type(error).__name__)
        alive = isinstance(error, LeftOutError) and self._fault != "freeze"
        if alive or (self._fault in HARMLESS and time.monotonic() > self._excused):
            self.say("surprise", f"round {self._number} ({self._fault}): {type(error).__name__}: {error}")

    async def _round(self, comm: Comm) -> None:
        plan = self._plan()
        for number, act in enumerate(plan.acts):
            seed = plan.chance.random()
            if number == plan.hit:
                await self._strike(comm, plan)
            done = await self._act(comm, act, random.Random(seed))
            self.say("ops", Counter(name.split(",")[0] for name in done))
        if plan.fault in DEADLY and comm.rank == plan.victims[0]:
            await comm.loop.create_future()  # so that the end of a round is the end of its fault
        await comm.barrier()
        if plan.fault not in HARMLESS:
            self.say("surprise", f"round {self._number}: the fault {plan.fault!r} has broken nothing")
        self._number += 1

    async def _act(self, comm: Comm, act: str, chance: random.Random) -> list[str]:
        match act:
            case "forms":
                return await forms_act(comm, chance)
            case "objects":
                return await objects_act(comm, chance)
            case "scope":
                return await scope_act(comm, chance)
            case "split":
                return await split_act(comm, chance)
            case _:
                try:
                    return await agreed_act(comm, chance, self._job.address)
                except (BaseExceptionGroup, BrokenError, RendezvousError):
                    if self._fault in HARMLESS:
                        raise
                    await comm.barrier()  # this one breaks, too
                    raise

    async def _strike(self, comm: Comm, plan: Plan) -> None:
        """The fault of this round, as it is for this rank."""
        me = comm.rank
        first, *rest = plan.victims
        if me == first:
            self.say("fault", plan.fault)
        match plan.fault:
            case "kill" | "killtwo":
                if me == first:
                    self._die(plan.delay, plan.fault)
                elif plan.fault == "killtwo" and me in rest:
                    self._die(plan.delay + plan.second, plan.fault)
                if plan.fault == "killtwo":
                    self._excused = time.monotonic() + plan.second + EXCUSED
            case "pause" if me == first:
                self.say("stop", 0.1 + 10 * plan.delay)
            case "cancel":
                self.say("ops", Counter(await cancel_act(comm, random.Random(plan.second))))
            case "freeze":
                await comm.barrier()
                if me == first:
                    self.say("stop", SHORT + 4.0)
                    await comm.recv(torch.ones(1), (me + 1) % comm.size, 77, timeout=math.inf)  # never comes
                with contextlib.suppress(CollectiveTimeoutError):
                    await comm.all_reduce(torch.ones(3), timeout=SHORT)
            case "abort" if me == first:
                await asyncio.sleep(plan.delay)
                comm.abort("a soak")
            case "raise" if me == first:
                with contextlib.suppress(BrokenError):
                    await asyncio.sleep(plan.delay)
                    async with comm:
                        raise Raised
            case "mismatch":
                tensor = torch.ones(3)
                await (comm.broadcast(tensor, first) if me == first else comm.all_reduce(tensor))
            case _:
                pass

    def _die(self, delay: float, why: str) -> threading.Timer:
        """Be killed, in the middle of whatever it is."""
        self.say("dying", why)
        timer = threading.Timer(delay, os.kill, (os.getpid(), signal.SIGKILL))
        timer.daemon = True
        timer.start()
        return timer


async def go_on(comm: Comm, members: Sequence[int | str] = ()) -> Comm:
    """The comm that takes the place of ``comm``."""
    while True:
        try:
            return await (comm.reconfigure(members) if members else comm.shrink())
        except ValueError:
            # a loss while newcomers were taken in: some had not heard of them, and asked for something else. All were
            # refused, and all ask again
            members = ()


def be_rank(job: Job, pipe: Connection) -> None:
    """A process, from beginning to end."""
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    torch.set_num_threads(1)
    random.seed(f"{job.seed}/{job.name}")
    rank = Rank(job, pipe)

    async def main() -> None:
        loop, thread = asyncio.get_running_loop(), threading.get_ident()

        def heed(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
            text = str(context.get("message"))
            if "never retrieved" not in text:  # Works of an act that has failed are nobody's
                rank.say("surprise", f"{text}: {context.get('exception')!r}")

        loop.set_exception_handler(heed)

        def answer() -> None:
            with contextlib.suppress(EOFError, OSError):
                while True:
                    pipe.recv()
                    rank.say("stacks", stacks.format_stacks(thread, loop))

        threading.Thread(target=answer, name="soak answers", daemon=True).start()
        await rank.run()

    try:
        run(main())
    except BaseException:
        rank.say("failed", f"round {rank._number} ({rank._fault}), members {rank._members}:\n{traceback.format_exc()}")
        os._exit(1)


# -- the driver -------------------------------------------------------------------------------------------------------


@dataclass
class Process:
    """A rank as the driver sees it."""

    job: Job
    process: ForkServerProcess
    pipe: Connection
    dying: str = ""  # why it is to be killed
    done: bool = False
    samples: list[tuple[float, Sample]] = field(default_factory=list)
    stacks: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovery:
    """Seconds from the error on a rank until the survivors communicate again."""

    fault: str
    faults: int  #: how often it came
    recoveries: int  #: by ranks
    p50_ms: float | None
    p99_ms: float | None
    max_ms: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """Of the process that has lived from beginning to end, and of the machine."""

    what: str
    warm: float  #: after the first part of the run
    end: float
    allowed: float
    ok: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """A whole run."""

    backend: str
    ranks: int
    seed: int
    seconds: float
    rounds: int
    processes: int
    operations: dict[str, int]
    errors: dict[str, int]  #: how comms broke, by fault and error, over all ranks
    surprises: list[str]
    failures: list[str]


class Failed(Exception):
    """What the soak has found."""


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Hold back interruptions: a process that is being started is not known yet, and nobody would end it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class Driver:
    """Starts the ranks, replaces those that die, stops and wakes them, and watches."""

    def __init__(self, args: argparse.Namespace, port: int) -> None:
        self._args = args
        self._address = ("127.0.0.1", port)
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(PRELOADED)
        first = self._context.Process(target=time.monotonic)
        first.start()  # importing torch takes seconds, which are no part of the run
        first.join()
        self._chance = random.Random(args.seed)
        self._started = time.monotonic()
        self._until = self._started + args.minutes * 60
        self._alive: list[Process] = []
        self._elder: Process | None = None
        self.processes = 0
        self._stopped: list[tuple[float, int]] = []
        self._progress = time.monotonic()
        self._store = dist.TCPStore(*self._address, is_master=False)
        self.faults: Counter[str] = Counter()
        self.ops: Counter[str] = Counter()
        self.errors: Counter[str] = Counter()
        self.recovered: dict[str, list[float]] = {}
        self.grown = 0  # how often ranks have taken newcomers in
        self.surprises: list[str] = []
        self.rounds = 0
        self.machine: list[tuple[float, dict[str, float]]] = []
        self._interrupted = False
        self._over = False  # a rank has said that all have agreed on the end

    def interrupt(self, *_: object) -> None:
        """End the run soon. A handler of signals, which the second one ends at once.

        An exception out of the first could come in a destructor, where Python drops it, or while results are written.
        """
        if self._interrupted:
            raise KeyboardInterrupt
        self._interrupted = True

    def start(self, rank: int = -1) -> None:
        doomed = rank < 0 and self._chance.random() < 0.2
        job = Job(
            str(self.processes),
            rank,
            self._args.ranks,
            self._args.backend,
            self._args.faults,
            self._args.seed,
            self._until,
            self._address,
            self._chance.uniform(0, 0.5) if doomed else None,
        )
        self.processes += 1
        variables = {"RANK": str(max(rank, 0)), "WORLD_SIZE": str(self._args.ranks)}
        ours, theirs = self._context.Pipe()
        process = self._context.Process(target=_begin, args=(job, theirs, variables, self._address), daemon=True)
        one = Process(job, process, ours)
        with undisturbed():
            process.start()
            self._alive.append(one)
        theirs.close()
        if self._elder is None:
            self._elder = one

    def run(self) -> None:
        """Until all have ended. Raises: Failed, KeyboardInterrupt."""
        for rank in range(self._args.ranks):
            self.start(rank)
        last = 0.0
        # a rank that is killed after all have agreed on the end is replaced in vain: no rank is left to add another
        while any(not one.done and (one.samples or not self._over) for one in self._alive):
            whose: dict[object, Process] = {one.pipe: one for one in self._alive}
            whose |= {one.process.sentinel: one for one in self._alive}
            sentinels = [one.process.sentinel for one in self._alive]
            found = wait([*(one.pipe for one in self._alive), *sentinels], timeout=0.1)
            if self._interrupted:  # looked at first: the ranks may have been told to end, too
                raise KeyboardInterrupt
            for ready in found:
                one = whose[ready]
                if one not in self._alive:
                    continue  # its pipe has told that it has ended
                if ready is one.pipe or one.pipe.poll():
                    self._hear(one)
                else:
                    self._ended(one)
            now = time.monotonic()
            for due, pid in [stop for stop in self._stopped if stop[0] <= now]:
                self._stopped.remove((due, pid))
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)
            if now - last > 1.0:
                last = now
                self.machine.append((now, self._measure()))
            if now - self._progress > self._args.patience:
                raise Failed(f"nothing has happened for {self._args.patience:g} s\n{self._stacks()}")

    def _hear(self, one: Process) -> None:
        try:
            what, *rest = one.pipe.recv()
        except (EOFError, OSError):
            self._ended(one)
            return
        match what, rest:
            case "round", [number, size]:
                self._progress = time.monotonic()
                self.rounds = max(self.rounds, number)
                one.samples.append((self._progress, size))
            case "ops", [counts]:
                self._progress = time.monotonic()
                self.ops.update(counts)
            case "fault", [fault]:
                self.faults[fault] += 1
            case "dying", [why]:
                one.dying = why
            case "stop", [seconds]:
                pid = one.process.pid
                assert pid is not None
                os.kill(pid, signal.SIGSTOP)
                self._stopped.append((time.monotonic() + seconds, pid))
            case "broken", [fault, error]:
                self.errors[f"{fault}: {error}"] += 1
            case "recovered", [fault, seconds]:
                self.recovered.setdefault(fault, []).append(seconds)
            case "grown", []:
                self.grown += 1
            case "surprise", [text]:
                self.surprises.append(f"{one.job.name}: {text}")
                print(f"process {one.job.name}: {text}", file=sys.stderr, flush=True)
            case "stacks", [text]:
                one.stacks = text
            case "failed", [text]:
                raise Failed(f"process {one.job.name}: {text}")
            case "done", [size]:
                self._over = True
                one.samples.append((time.monotonic(), size))
                one.done = True
            case _:
                pass

    def _ended(self, one: Process) -> None:
        one.process.join()
        code = one.process.exitcode
        self._alive.remove(one)
        if one.done and code == 0:
            one.pipe.close()
            self._progress = time.monotonic()
            return
        if code != -signal.SIGKILL or not one.dying:
            raise Failed(f"process {one.job.name} ended with {code}")
        if one.dying == "newcomer":
            self.faults[one.dying] += 1
        one.pipe.close()
        self.start()

    def _stacks(self) -> str:
        """Of all processes: what they say, and what they print if they cannot say anything."""
        for one in self._alive:
            with contextlib.suppress(OSError):
                one.pipe.send("stacks")
        until = time.monotonic() + 3
        while time.monotonic() < until:
            for ready in wait([one.pipe for one in self._alive], timeout=0.1):
                with contextlib.suppress(Failed):
                    self._hear(next(one for one in self._alive if one.pipe is ready))
        for one in self._alive:
            if not one.stacks and one.process.pid:
                os.kill(one.process.pid, signal.SIGUSR1)
        return "\n".join(f"-- process {one.job.name}, pid {one.process.pid}\n{one.stacks}" for one in self._alive)

    def _measure(self) -> dict[str, float]:
        sockets = set()  # ours: others may use this machine, too
        for one in self._alive:
            with contextlib.suppress(OSError):
                for entry in os.scandir(f"/proc/{one.process.pid}/fd"):
                    sockets.add(os.readlink(entry.path).removeprefix("socket:[").removesuffix("]"))
        lines = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()]
        return {
            "/dev/shm": len(os.listdir("/dev/shm")),
            "unix names": sum(len(line) > 7 and line[6] in sockets for line in lines),
            "store keys": self._store.num_keys(),
        }

    def end(self) -> None:
        for one in self._alive:
            if one.process.pid is not None:
                one.process.kill()
                one.process.join()

    def growth(self) -> list[Growth]:
        """What the first process and the machine had after the warm-up, and have in the end, as far as it was seen."""
        rows = []
        samples = [] if self._elder is None else self._elder.samples
        recoveries = sum(count for fault, count in self.faults.items() if fault not in HARMLESS)
        allowed = dict(SLACK)
        if self._args.backend != "shm":
            allowed["threads"] += recoveries * GLOO_THREADS
        for name in Sample._fields:
            series = [(when, float(getattr(size, name))) for when, size in samples]
            rows += self._grown(name, series, allowed[name])
        for name in ("/dev/shm", "unix names", "store keys"):
            more = KEYS * self._args.ranks * self.comms if name == "store keys" else 10.0
            rows += self._grown(name, [(when, sizes[name]) for when, sizes in self.machine], more)
        return rows

    @property
    def comms(self) -> float:
        """How many have been made."""
        by_ranks = self.grown + sum(map(len, self.recovered.values())) + self.ops["split"] + self.ops["new_comm"]
        return float(by_ranks / self._args.ranks)

    def _grown(self, what: str, series: list[tuple[float, float]], allowed: float) -> list[Growth]:
        if not series:
            return []
        warm = self._started + WARM * (self._until - self._started)
        early = [value for when, value in series if when <= warm][-5:] or [value for _, value in series[:5]]
        late = [value for _, value in series[-5:]]
        first, last = median(early), median(late)
        return [Growth(what=what, warm=first, end=last, allowed=allowed, ok=last <= first + allowed)]


def _begin(job: Job, pipe: Connection, variables: dict[str, str], address: tuple[str, int]) -> None:
    """In the new process."""
    os.environ.update(variables)
    os.environ.update(MASTER_ADDR=address[0], MASTER_PORT=str(address[1]), TORCHELASTIC_USE_AGENT_STORE="True")
    be_rank(job, pipe)


def recoveries(driver: Driver) -> list[Recovery]:
    rows = []
    for fault in (*FAULTS, "newcomer"):
        times = sorted(1e3 * seconds for seconds in driver.recovered.get(fault, []))
        rows.append(
            Recovery(
                fault=fault,
                faults=driver.faults[fault],
                recoveries=len(times),
                p50_ms=median(times) if times else None,
                p99_ms=times[int(len(times) * 0.99)] if times else None,
                max_ms=times[-1] if times else None,
            )
        )
    return rows


def show(summary: Summary, rows: Sequence[Recovery], grown: Sequence[Growth]) -> None:
    def ms(value: float | None) -> str:
        return "" if value is None else f"{value:.0f}"

    print_table(
        ["fault", "times", "recoveries of ranks", "p50 ms", "p99 ms", "max ms"],
        [(row.fault, row.faults, row.recoveries, ms(row.p50_ms), ms(row.p99_ms), ms(row.max_ms)) for row in rows],
        f"{summary.backend}, {summary.ranks} ranks, seed {summary.seed}: {summary.rounds} rounds in "
        f"{summary.seconds:.0f} s, {sum(summary.operations.values())} operations of {len(summary.operations)} kinds, "
        f"{summary.processes} processes",
        left={"fault"},
    )
    print_table(
        ["growth of", "after warm-up", "in the end", "allowed more"],
        [(row.what, f"{row.warm:.0f}", f"{row.end:.0f}", f"{row.allowed:.0f}") for row in grown],
        left={"growth of"},
    )
    for how, count in sorted(summary.errors.items()):
        print(f"{count:6} x {how}")
    for text in [*summary.surprises, *summary.failures]:
        print(text)


def soak(args: argparse.Namespace) -> int:
    """The whole run; returns the exit code."""
    os.environ.setdefault("MALLOC_ARENA_MAX", "2")  # or memory grows with whichever threads happen to allocate
    hosted = serve("127.0.0.1", listen("127.0.0.1", 0))
    driver = Driver(args, hosted.port)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, driver.interrupt)  # to report what was found
    failures: list[str] = []
    start = time.monotonic()
    try:
        driver.run()
    except Failed as failure:
        failures.append(str(failure))
    except BaseException as exc:  # Ctrl-C, too
        failures.append(f"it was ended by {exc!r}")
        raise
    finally:
        driver.end()
        conclude(args, driver, failures, time.monotonic() - start)
    return 1 if failures or driver.surprises else 0


def conclude(args: argparse.Namespace, driver: Driver, failures: list[str], seconds: float) -> None:
    """Report the run; adds what it finds to ``failures``."""
    grown = driver.growth()
    failures += [f"{row.what} has grown from {row.warm:.0f} to {row.end:.0f}" for row in grown if not row.ok]
    summary = Summary(
        backend=args.backend,
        ranks=args.ranks,
        seed=args.seed,
        seconds=seconds,
        rounds=driver.rounds,
        processes=driver.processes,
        operations=dict(driver.ops),
        errors=dict(driver.errors),
        surprises=driver.surprises,
        failures=failures,
    )
    rows = recoveries(driver)
    show(summary, rows, grown)
    if args.json:
        write_rows(args.json, [summary, *rows, *grown])


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--backend", choices=["shm", "gloo"], default="shm")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--faults", default=",".join(FAULTS), help="of these (default: all)")
    parser.add_argument("--patience", type=float, default=90.0, metavar="SECONDS", help="without news until it fails")
    parser.add_argument("--json", help="file to write the rows to")
    args = parser.parse_args()
    args.faults = args.faults.split(",")
    if unknown := set(args.faults) - set(FAULTS):
        parser.error(f"argument --faults: {sorted(unknown)[0]!r} is not one of {', '.join(FAULTS)}")
    if min(args.minutes, args.patience) <= 0 or args.ranks < 2:
        parser.error("arguments --minutes, --patience: must be positive; --ranks: at least 2")
    return args


if __name__ == "__main__":
    raise SystemExit(soak(parse()))
