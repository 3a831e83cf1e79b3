"""What one rank of a case does, in a process that may be killed any time."""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import logging
import os
import re
import signal
import socket
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextvars import ContextVar
from functools import partial
from typing import Any, Final, final

import torch
import uvloop

from asynccomm.backends import registry
from asynccomm.backends.shm.progress_thread import shared_thread
from asynccomm.comm import bootstrap, connecting, joining
from asynccomm.comm.comm import Comm
from asynccomm.comm.new_comm import new_comm
from asynccomm.control.channel import ControlChannel
from asynccomm.control.transport import connection
from asynccomm.control.transport.connection import Connection
from asynccomm.core.background import reserve
from asynccomm.core.stacks import format_stacks
from asynccomm.core.work import Work
from asynccomm.errors import AsyncCommError, BrokenError, CollectiveMismatchError, CollectiveTimeoutError
from asynccomm.store.memory import MemoryStore
from tests.backends.nccl import simulation

from .inventory import Inventory, what_is_left
from .operations import LARGE, SMALL, call
from .plans import DEADLINE, GRACE, ISSUING, LOCAL, MEETING, SLOWNESS, Case
from .reports import Report, Struck
from .resource_limits import few_descriptors, full_disks, own_disk, small_files

__all__ = ["run_local", "run_rank"]

CALM: Final = 20.0  # seconds for what nothing keeps from ending
SEEN: Final = 8.0  # seconds after which a rank that has not heard of the fault says so
STEPS: Final = 4  # where nothing breaks
SHRINKING: Final = 3.0  # seconds for ranks to call shrink()
TURN_SECONDS: Final = 0.01  # between looks at whether something has happened

Tell = Callable[[object], object]


class StruckError(Exception):
    """Raised by the test, in the program of a user."""


class UnnoticedError(Exception):
    """The fault had no effect."""


@final
class Part:
    """One rank's part in a case.

    Args:
        tell: for what must be known before the process ends.
        running: the ranks of this process that have not come to an end.
        mounted: there is a file system of its own to fill.
    """

    def __init__(
        self, case: Case, rank: int, tell: Tell, running: set[int] | None = None, *, mounted: bool = False
    ) -> None:
        self.case, self.rank = case, rank
        self.victim = rank == case.victim
        self._tell = tell
        self._channels: list[ControlChannel] = []  # that it has opened, where ranks share a process
        self._running = {rank} if running is None else running
        self._mounted = mounted
        self._error: BaseException | None = None
        self._at = 0.0
        self._refused = ""
        self._closing = 0.0
        self._after = ""
        self.problems: list[str] = []
        self.notes: list[str] = []
        brief = case.fault in ("stop", "block", "late") or case.phase in ("close", "split")
        # one that closes the comm that it had just become part of is not lost, unless its process ends
        brief = brief or (case.phase == "shrink" and case.backend in LOCAL)
        self._timeout = DEADLINE if brief else CALM
        self._hit: Callable[[], object] = lambda: None
        self._took = 0.0

    # -- the program --------------------------------------------------------------------------------------------------

    async def run(self, make: Callable[[], Awaitable[Comm]]) -> Report:
        """Be part of the job."""
        try:
            return await self._run(make)
        finally:
            self._running.discard(self.rank)

    async def _run(self, make: Callable[[], Awaitable[Comm]]) -> Report:
        case = self.case
        _CHANNELS.set(self._channels)
        try:
            comm = await self._made(make)
        except (Exception, asyncio.CancelledError) as exc:
            self._note(exc)
            return self.report()
        left = time.monotonic()
        try:
            async with comm:
                try:
                    if case.phase == "split":
                        await self._split(comm)
                    elif case.phase == "shrink":
                        await self._shrink(comm)
                    elif self.victim:
                        await self._be_struck(comm)
                    else:
                        await self._go_on(comm)
                except BaseException as exc:
                    self._note(exc)
                    self._refused = _refusal(comm) if isinstance(exc, BrokenError) else ""
                    raise
                finally:
                    left = time.monotonic()
        except BaseException as exc:
            if exc is not self._error:
                self.problems.append(f"leaving the comm raised {exc!r}")
        await comm.aclose()
        self._closing = time.monotonic() - left
        self._after = _refusal(comm)
        return self.report()

    def report(self, left: Sequence[str] = ()) -> Report:
        """How it went."""
        error = self._error
        return Report(
            rank=self.rank,
            error="" if error is None else type(error).__name__,
            text="" if error is None else str(error),
            ranks=() if error is None else named(error),
            at=self._at,
            refused=self._refused,
            closing=self._closing,
            after=self._after,
            left=tuple(left),
            problems=tuple(self.problems),
            notes=tuple(self.notes),
        )

    def _note(self, exc: BaseException) -> None:
        if self._error is None:
            self._error, self._at = exc, time.monotonic()
            print(f"rank {self.rank}:", *traceback.format_exception(exc), sep="\n", file=sys.stderr)

    def _call(self, comm: Comm, timeout: float | None = None) -> Sequence[Work[Any]]:
        case = self.case
        numel = LARGE // 6 * (6 // comm.size if comm.size < 4 else 1) if case.large else SMALL
        timeout = self._timeout if timeout is None else timeout
        return call(case.operation, comm, numel, case.number % comm.size, timeout)

    async def _warm_up(self, comm: Comm) -> None:
        await _all(self._call(comm, CALM))
        await comm.barrier(timeout=CALM)
        began = time.monotonic()
        await _all(self._call(comm, CALM))
        self._took = time.monotonic() - began

    async def _until_broken(self, comm: Comm) -> None:
        end = time.monotonic() + SEEN
        while time.monotonic() < end:
            await _all(self._call(comm))
            await asyncio.sleep(0)
        raise UnnoticedError

    async def _steps(self, comm: Comm) -> None:
        for _ in range(STEPS):
            await _all(self._call(comm))

    async def _go_on(self, comm: Comm) -> None:
        await self._warm_up(comm)
        await (self._steps(comm) if is_quiet(self.case) else self._until_broken(comm))

    # -- the faults ---------------------------------------------------------------------------------------------------

    def _strike(self, comm: Comm | None = None, task: asyncio.Task[Any] | None = None) -> None:
        """From any thread."""
        self._tell(Struck(time.monotonic()))
        match self.case.fault:
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "abort" | "slow abort":
                assert comm is not None
                comm.abort("struck")
            case "cut":
                assert comm is not None
                cut(comm)
            case "lose":
                self._lose()
            case "block":
                time.sleep(DEADLINE + GRACE)
            case "cancel":
                assert task is not None
                task.cancel()

    def _strike_later(self, seconds: float, comm: Comm) -> threading.Timer:
        """From another thread: the loop may be busy then."""
        timer = threading.Timer(seconds, self._strike, [comm])
        timer.daemon = True
        timer.start()
        return timer

    async def _be_struck(self, comm: Comm) -> None:
        case = self.case
        await self._warm_up(comm)
        if case.phase == "close":
            await self._close_and_be_struck(comm)
            return
        match case.fault:
            case "slow" | "memory" | "descriptors":
                await self._steps(comm)
            case "lose":
                if case.phase != "before":
                    self._call(comm)
                await asyncio.sleep(self._offset())
                self._strike(comm)
                await self._be_lost()
            case "abandon":
                await self._abandon(comm)
            case "mismatch":
                self._tell(Struck(time.monotonic()))
                await _all(call_another(case, comm))
                await self._until_broken(comm)
            case "late":
                self._tell(Struck(time.monotonic()))
                while True:  # hears of it
                    await comm.ready()
                    await asyncio.sleep(0.01)
            case "raise":
                await self._raise(comm)
            case "cancel":
                async with asyncio.TaskGroup() as group:
                    for _ in range(2 if case.phase != "before" else 0):
                        group.create_task(self._wait_for(self._call(comm)))
                    group.create_task(self._raise(None))
            case _ if case.phase == "before":
                await asyncio.sleep(0.005 * case.delay)
                self._strike(comm)
                await self._until_broken(comm)
            case _:
                works = self._call(comm)
                timer = self._strike_later(self._offset(), comm)
                await _all(works)
                await self._until_broken(comm)
                timer.join()

    def _offset(self) -> float:
        """Seconds from issuing an operation to the fault."""
        return self._took * (0.75 + 0.25 * self.case.delay if self.case.phase == "tail" else self.case.delay)

    async def _raise(self, comm: Comm | None) -> None:
        if comm is not None and self.case.phase != "before":
            self._call(comm)
        await asyncio.sleep(self._offset() if self.case.phase != "before" else 0.0)
        self._tell(Struck(time.monotonic()))
        raise StruckError("struck")

    async def _be_lost(self, connecting: asyncio.Future[Comm] | None = None) -> None:
        """Call nothing, like the dead, until the others have ended; then leave, as a process must.

        Args:
            connecting: what this rank was at.
        """
        gone = {self.case.victim, other_victim(self.case)} if self.case.phase == "shrink" else {self.case.victim}
        while not self._running <= gone:
            self._lose()  # what it has opened meanwhile, too
            await asyncio.sleep(TURN_SECONDS)
        if connecting is not None:
            connecting.cancel()
            await asyncio.wait([connecting])
            if _is_there(connecting):
                connecting.result().abort("lost")
                await connecting.result().aclose()
        raise StruckError("lost")

    def _lose(self) -> None:
        """End what this rank has of control channels without a word, as its death would."""
        for channel in self._channels:
            channel.call(channel._begin_closing)

    async def _wait_for(self, works: Sequence[Work[Any]]) -> None:
        await _all(works)

    async def _abandon(self, comm: Comm) -> None:
        for _ in range(STEPS):
            works = self._call(comm)
            tasks = [asyncio.create_task(self._wait_for([work])) for work in works]
            await asyncio.sleep(0)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _close_and_be_struck(self, comm: Comm) -> None:
        if self.case.number % 2:  # with something in flight
            self._call(comm)
        closing = asyncio.create_task(comm.aclose())
        for _ in range(int(6 * self.case.delay)):
            await asyncio.sleep(0)
        self._strike(comm, closing)
        await closing

    # -- beginning ----------------------------------------------------------------------------------------------------

    async def _made(self, make: Callable[[], Awaitable[Comm]]) -> Comm:
        case = self.case
        if not self.victim:
            return await make()
        _IS_VICTIM.set(True)
        if case.fault in ("slow", "slow abort") and case.backend not in LOCAL:
            be_slow()
        if case.phase != "init":
            return await make()
        if case.fault in ("memory", "descriptors"):
            with self._little():
                return await make()
        if case.detail == "start":
            if case.fault == "cancel":
                self._tell(Struck(time.monotonic()))
                raise StruckError
            self._strike()
            return await make()
        task = asyncio.current_task()
        assert task is not None
        # a rank that stops once it has mapped the memory is missed only by the first operation
        delay = 0.0 if case.fault == "stop" and case.backend == "shm" else 0.01 * case.delay
        strike_at(case.detail, lambda: self._strike(None, task), delay)
        return await make()

    @contextlib.contextmanager
    def _little(self) -> Any:
        """With little of something."""
        match self.case.detail:
            case "limit":
                little = small_files()
            case "full" | "spare" as what:
                little = full_disks(mounted=self._mounted, only=what == "full")
            case _:
                little = few_descriptors(max(Inventory.take().descriptors) + 1 + int(16 * self.case.delay))
        self._tell(Struck(time.monotonic()))
        with little:
            yield

    # -- splitting ----------------------------------------------------------------------------------------------------

    async def _split(self, comm: Comm) -> None:
        """The fault comes while another comm is split off; what becomes of that is noted, this one is closed."""
        await self._warm_up(comm)
        connecting = asyncio.ensure_future(comm.dup(timeout=MEETING))
        if self.victim:
            await self._be_struck_while(connecting, comm)
        try:
            async with await connecting as child:
                try:
                    await self._use(child, comm)
                except BaseException as exc:
                    self._note(exc)
                    raise
        except (Exception, asyncio.CancelledError) as exc:
            self._note(exc)
            if self.case.fault in ("kill", "cut", "lose") and not isinstance(exc, StruckError):  # not only the new one
                with contextlib.suppress(BrokenError):
                    await self._until_broken(comm)
                self._refused = _refusal(comm)

    async def _use(self, child: Comm, comm: Comm) -> None:
        case = self.case
        if case.fault in ("slow", "descriptors", "memory"):
            await self._steps(child)
        elif case.fault in ("cancel", "lose"):
            if self.victim:
                raise StruckError
            await self._until_broken(child)
        else:
            await self._until_broken(comm)

    async def _be_struck_while(self, connecting: asyncio.Future[Comm], comm: Comm) -> None:
        case = self.case
        match case.fault:
            case "memory" | "descriptors":
                with self._little():
                    await asyncio.wait([connecting])
            case "cancel" | "abort":
                await asyncio.sleep(0.003 * case.delay)
                self._strike(comm, connecting)
            case "slow":
                pass
            case "lose":
                await asyncio.sleep(0.003 * case.delay)
                self._strike(comm)
                await self._be_lost(connecting)
            case _:
                self._strike_later(0.02 * case.delay, comm)

    # -- shrinking ----------------------------------------------------------------------------------------------------

    async def _shrink(self, comm: Comm) -> None:
        """First another rank is lost, then the victim, while the others agree on who goes on."""
        case = self.case
        with contextlib.suppress(BrokenError):
            await self._warm_up(comm)
            if self.rank == other_victim(case):
                if case.backend in LOCAL:
                    await self._be_lost()
                os.kill(os.getpid(), signal.SIGKILL)
            await self._until_broken(comm)
        if self.victim:
            shrinking = asyncio.ensure_future(comm.shrink(timeout=SHRINKING))
            await asyncio.sleep(0.03 * case.delay)
            self._strike(comm, shrinking)
            if case.fault == "lose":
                await self._be_lost(shrinking)
            with contextlib.suppress(asyncio.CancelledError):
                late = await shrinking
                try:
                    if case.fault == "stop":  # it was part of what went on, until that went on without it
                        later = await late.shrink(timeout=SHRINKING)
                        print(f"rank {self.rank} of {late} went on as {later}, {later.parent_ranks}", file=sys.stderr)
                        await later.aclose()
                finally:
                    await late.aclose()
            return
        while True:
            comm = await comm.shrink(timeout=SHRINKING)
            if comm.size == case.size - 2:
                break
            with contextlib.suppress(BrokenError):  # the victim came along, and then left
                await self._until_broken(comm)
        self._at = time.monotonic()
        async with comm:
            total = await comm.all_reduce(torch.ones(3), timeout=CALM)
            if total.tolist() != [comm.size] * 3:
                self.problems.append(f"all_reduce on the comm that goes on gave {total}")


def is_quiet(case: Case) -> bool:
    """Whether nothing is to break."""
    return case.fault in ("abandon", "slow", "descriptors") or case.detail == "spare"


def ends_by_deadline(case: Case) -> bool:
    """Whether only the time that is allowed for connecting ends it for the others."""
    if case.phase != "init" or case.fault == "memory":
        return False
    return case.fault in ("stop", "descriptors") or case.detail in ("start", "meeting")


def _is_there(connecting: asyncio.Future[Comm]) -> bool:
    return connecting.done() and not connecting.cancelled() and connecting.exception() is None


def other_victim(case: Case) -> int:
    """Of a comm that shrinks: who is lost first."""
    return (case.victim + 1) % case.size


async def _all(works: Sequence[Work[Any]]) -> None:
    for work in works:
        await work


def _refusal(comm: Comm) -> str:
    """What a call raises."""
    try:
        comm.barrier()
    except AsyncCommError as exc:
        return "BrokenError" if isinstance(exc, BrokenError) else type(exc).__name__
    return "nothing"


def call_another(case: Case, comm: Comm) -> Sequence[Work[Any]]:
    """Not what the others call."""
    name, root = case.operation, case.number % comm.size
    match case.detail:
        case "kind" if name == "agreed":
            return [comm.barrier(tag=tag) for tag in "abc"]
        case "kind":
            return call("all_reduce" if name == "barrier" else "barrier", comm, SMALL, root, CALM)
        case "dtype":
            return call(name, comm, SMALL, root, CALM, torch.int32)
        case "size":
            return call(name, comm, SMALL + 12, root, CALM)
        case _:
            return call(name, comm, SMALL, (root + 1) % comm.size, CALM)


_NAMES: Final = re.compile(r"ranks? \[?(\d+(?:, \d+)*)")
_ABSENT: Final = re.compile(
    r"not arrived: ranks \[(\d+(?:, \d+)*)\]|ranks? \[?(\d+(?:, \d+)*)\]? ha(?:s|ve) not|^  rank (\d+):", re.M
)


def named(exc: BaseException) -> tuple[int, ...]:
    """The ranks that an error puts the blame on."""
    text = str(exc)
    found: set[int] = set()
    if isinstance(exc, CollectiveTimeoutError):
        return exc.missing
    if isinstance(exc, CollectiveMismatchError):
        return exc.rank, exc.other_rank
    pattern = _ABSENT if "CollectiveTimeoutError" in text else _NAMES
    for groups in pattern.finditer(text):
        for group in groups.groups():
            found.update(int(number) for number in (group or "").split(", ") if number)
    return tuple(sorted(found))


def cut(comm: Comm) -> None:
    """End the control connections of this rank as a failing network would. From any thread."""
    channel = comm._session.identity.job.channel
    assert channel is not None

    def shut() -> None:
        for link in channel._router.links:
            assert isinstance(link, Connection)
            if link._transport is not None:
                link._transport.get_extra_info("socket").shutdown(socket.SHUT_RDWR)

    channel.call(shut)


# Set in the task that is to be struck: others of the process may come to the same point.
_IS_VICTIM: Final[ContextVar[bool]] = ContextVar("is_victim", default=False)


_CHANNELS: Final[ContextVar[list[ControlChannel]]] = ContextVar("channels")


def keep_channels() -> None:
    """From now on, each task that has set ``_CHANNELS`` finds the control channels that it opens there."""
    open_channel = bootstrap._open_channel

    async def open_and_keep(*args: Any) -> ControlChannel | None:
        channel = await open_channel(*args)
        if channel is not None:
            _CHANNELS.get().append(channel)
        return channel

    bootstrap._open_channel = open_and_keep


def strike_at(point: str, strike: Callable[[], object], delay: float) -> None:
    """Have ``strike`` called when this process, becoming part of a comm, comes to ``point``."""

    def wrapped(function: Callable[..., Any], *, after: bool) -> Callable[..., Any]:
        async def call_it(*args: Any, **kwargs: Any) -> Any:
            if not after and _IS_VICTIM.get():
                strike()
            result = await function(*args, **kwargs)
            if after and _IS_VICTIM.get():
                strike()
            return result

        return call_it

    connect_first = connecting._connect_first

    async def connect_while(*args: Any) -> None:
        if not _IS_VICTIM.get():
            await connect_first(*args)
            return
        loop = asyncio.get_running_loop()
        due = loop.time() + delay
        late = loop.call_at(due, strike)
        try:
            await connect_first(*args)
        finally:
            if loop.time() < due:  # it was quicker
                late.cancel()
                strike()

    match point:
        case "meeting":
            joining.Joining.meet = wrapped(joining.Joining.meet, after=False)
        case "met":
            joining.Joining.meet = wrapped(joining.Joining.meet, after=True)
        case "attached":
            bootstrap._open_channel = wrapped(bootstrap._open_channel, after=True)
        case _:
            connecting._connect_first = connect_while


def be_slow() -> None:
    """From now on, what goes over the control connection to the rank above arrives late, either way."""
    connect = connection.local_connection

    async def connect_slowly(address: str) -> socket.socket:
        far = await connect(address)
        far.setblocking(True)
        near, ours = socket.socketpair()
        threading.Thread(target=_slow_line, args=(ours, far), daemon=True, name="slow line").start()
        near.setblocking(False)
        return near

    connection.local_connection = connect_slowly


def _slow_line(near: socket.socket, far: socket.socket) -> None:
    """Carry what comes either way, until both sides have ended."""
    with near, far:
        back = threading.Thread(target=_pump, args=(far, near), daemon=True, name="slow line back")
        back.start()
        _pump(near, far)
        back.join()


def _pump(source: socket.socket, target: socket.socket) -> None:
    while data := _received(source):
        time.sleep(SLOWNESS)
        with contextlib.suppress(OSError):
            target.sendall(data)
    time.sleep(SLOWNESS)
    with contextlib.suppress(OSError):
        target.shutdown(socket.SHUT_WR)


def _received(sock: socket.socket) -> bytes:
    try:
        return sock.recv(1 << 16)
    except OSError:
        return b""


# -- running it -------------------------------------------------------------------------------------------------------


def run_rank(case: Case, rank: int, tell: Tell) -> None:
    """Be one rank of a job, and tell of it."""
    scarce = rank == case.victim and case.detail in ("full", "spare")
    mounted = scarce and own_disk(only=case.detail == "full")

    async def main(problems: list[str]) -> list[Report]:
        part = Part(case, rank, tell, mounted=mounted)
        if scarce and not mounted:
            part.notes.append("a full file system was only feigned: users may not have namespaces here")
        timeout = MEETING if ends_by_deadline(case) else CALM
        ordering = "agreed" if case.operation == "agreed" else "program"
        hints = {"hostname": "127.0.0.1"} if case.backend == "hierarchical" else {}
        return [await part.run(lambda: new_comm(case.backend, timeout=timeout, ordering=ordering, hints=hints))]

    _run(case, main, tell)


def run_local(case: Case, tell: Tell) -> None:
    """Be all ranks of a job in one process, and tell of them."""

    if case.fault in ("slow", "slow abort"):
        be_slow()
    keep_channels()
    backend, hints = case.backend, {}
    if backend == "nccl":
        registry.BUILTIN["simulated"] = simulation.__name__, "SimulatedBackend"
        # nothing ends an init that blocks; what is connected then is tried both ways
        blocking = case.phase in ISSUING and case.number % 2
        backend, hints = "simulated", {"side": "loopback", "blocking": str(int(blocking))}
    timeout = MEETING if ends_by_deadline(case) else CALM
    ordering = "agreed" if case.operation == "agreed" else "program"

    async def main(problems: list[str]) -> list[Report]:
        store, running = MemoryStore(), set(range(case.size))

        def make(rank: int) -> Awaitable[Comm]:
            return new_comm(
                backend,
                name="main",
                store=store,
                rank=rank,
                size=case.size,
                timeout=timeout,
                ordering=ordering,
                hints=hints,
            )

        parts = [Part(case, rank, tell, running) for rank in range(case.size)]
        reports = await asyncio.gather(*(part.run(partial(make, part.rank)) for part in parts))
        problems += [f"communicator of rank {left.rank} left open" for left in simulation.SimulatedNccl.comms]
        return list(reports)

    _run(case, main, tell)


def _run(case: Case, main: Callable[[list[str]], Coroutine[Any, Any, list[Report]]], tell: Tell) -> None:
    problems: list[str] = []
    warnings.simplefilter("always")
    warnings.showwarning = lambda message, *_, **__: problems.append(f"warning: {message}")
    for name in ("asynccomm", "asyncio"):
        logging.getLogger(name).addHandler(_Keeper(problems))

    async def everything() -> list[Report]:
        loop = asyncio.get_running_loop()
        for make in (shared_thread, reserve):
            make()  # a thread that stays as long as the process
        loop.set_exception_handler(lambda _, context: _complain(problems, context, case.fault == "descriptors"))
        before = Inventory.take()
        reports = await main(problems)
        left = await what_is_left(before)
        if any(what.startswith("thread") for what in left):
            faulthandler.dump_traceback()
        first = reports[0]
        if case.fault == "descriptors":  # where asyncio and gloo stop halfway, they do not clean up
            left = [what for what in left if "socket:" not in what or case.backend != "gloo"]
            noise = "unclosed event loop", "accept() out of system resource"
            problems[:] = [text for text in problems if not any(words in text for words in noise)]
        reports[0] = first._replace(left=tuple(left), problems=(*first.problems, *problems))
        return reports

    factory = uvloop.new_event_loop if case.uvloop else asyncio.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        loop = runner.get_loop()
        signal.signal(
            signal.SIGUSR2, lambda *_: print(format_stacks(threading.get_ident(), loop), file=sys.stderr, flush=True)
        )
        reports = runner.run(everything())
    for report in reports:
        tell(report)


def _complain(problems: list[str], context: dict[str, Any], scarce: bool) -> None:
    """Of what nobody has looked at; that operations failed which nobody waits for is as it should be."""
    if scarce and isinstance(context.get("exception"), OSError):
        return  # asyncio itself has no descriptor for who comes
    if not isinstance(context.get("exception"), AsyncCommError):
        problems.append(f"{context.get('message')}: {context.get('exception')!r}")


@final
class _Keeper(logging.Handler):
    def __init__(self, problems: list[str]) -> None:
        super().__init__(logging.ERROR)
        self._problems = problems

    def emit(self, record: logging.LogRecord) -> None:
        self._problems.append(self.format(record))
