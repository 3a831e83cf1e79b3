"""A GPU and an NCCL that are none: one thread runs the streams, device memory is the host's, the ranks share a process.

It is strict where the real ones are undefined: calls of ranks that do not belong together, a message that does not fit,
calls outside of a group and groups left open are errors. Like NCCL, the first group of its kind waits in ``group_end``
until the other ranks have come that far, too. So does one that is only estimated, which tells the time of its last kind
of calls, and of no messages; what it leaves in line must be dropped before anything runs.

The first one-sided call of a communicator waits for those of all ranks, too. Puts reach the target's memory when a wait
for their signal is run there, at the latest; before that, it may show anything.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import queue
import threading
import time
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from asynccomm.backends.base import BackendContext
from asynccomm.backends.nccl.api import Config
from asynccomm.backends.nccl.backend import NcclBackend
from asynccomm.backends.nccl.shared import DeviceRuntime
from asynccomm.errors import BackendError
from asynccomm.ops.reduce_op import RedOpType

LIMIT = 60.0  # seconds after which a wait in here is a hang

DTYPES = [
    torch.int8,
    torch.uint8,
    torch.int32,
    torch.uint32,
    torch.int64,
    torch.uint64,
    torch.float16,
    torch.float32,
    torch.float64,
    torch.bfloat16,
]
REDUCTIONS = [RedOpType.SUM, RedOpType.PRODUCT, RedOpType.MAX, RedOpType.MIN, RedOpType.AVG]


class Device:
    """The thread that runs the steps of all streams: those of one stream in order, those of several side by side."""

    def __init__(self) -> None:
        self._news = threading.Condition()
        self._ready: deque[SimulatedStream] = deque()
        self._blocked: list[SimulatedStream] = []
        self._changes = 0
        self._started = False

    def run(self, stream: SimulatedStream) -> None:
        with self._news:
            self._ready.append(stream)
            self._news.notify()
            if not self._started:
                self._started = True
                threading.Thread(target=self._main, name="simulated device", daemon=True).start()

    def change(self) -> None:
        """Something has changed that a blocked stream may wait for. From any thread."""
        with self._news:
            self._changes += 1
            if self._blocked:
                self._ready.extend(self._blocked)
                self._blocked.clear()
                self._news.notify()

    def _main(self) -> None:
        while True:
            with self._news:
                if not self._ready and not self._news.wait(1.0 if self._blocked else None):
                    self._ready.extend(self._blocked)  # to look at the clock
                    self._blocked.clear()
                if not self._ready:
                    continue
                stream, changes = self._ready.popleft(), self._changes
            if not stream.advance():
                with self._news:
                    (self._blocked if changes == self._changes else self._ready).append(stream)


device = Device()


class Passed(threading.Event):
    def set(self) -> None:
        super().set()
        device.change()


class SimulatedEvent:
    def __init__(self) -> None:
        self.passed = Passed()
        self.released = False


class Threads:
    """Threads that are started once and lent again and again: a start costs more than what most are needed for."""

    def __init__(self) -> None:
        self._idle: list[queue.SimpleQueue[Callable[[], object]]] = []

    def run(self, step: Callable[[], object]) -> None:
        """Run ``step`` on a thread on which nothing else runs meanwhile."""
        try:
            inbox = self._idle.pop()
        except IndexError:
            inbox = queue.SimpleQueue()
            threading.Thread(target=self._main, args=(inbox,), name="simulated stream", daemon=True).start()
        inbox.put(step)

    def _main(self, inbox: queue.SimpleQueue[Callable[[], object]]) -> None:
        while True:
            inbox.get()()
            self._idle.append(inbox)


class SimulatedStream:
    """Runs what is queued, in order, on the thread of ``device``."""

    threads = Threads()

    handles = itertools.count(1)
    by_handle: weakref.WeakValueDictionary[int, SimulatedStream] = weakref.WeakValueDictionary()

    def __init__(self) -> None:
        self.handle = next(self.handles)
        self.by_handle[self.handle] = self
        self._lock = threading.Lock()
        self._queue: deque[Callable[[], bool]] = deque()
        self._busy = False
        self.runs = False  # whether anything but events was queued
        self.ended = False

    def attempt(self, step: Callable[[], bool]) -> None:
        """Queue a step that returns at once; False: it is to be called again when something has changed."""
        with self._lock:
            self._queue.append(step)
            if self._busy:
                return
            self._busy = True
        device.run(self)

    def advance(self) -> bool:
        """Run the steps up to one that has to wait; returns whether there is none. On the thread of ``device``."""
        while True:
            with self._lock:
                if not self._queue:
                    self._busy = False
                    return True
                step = self._queue[0]
            if not step():
                return False
            self._queue.popleft()

    def put(self, step: Callable[[], object]) -> None:
        """Queue a step that may block: it has a thread of its own."""
        self.runs = True
        started, done = False, Passed()

        def attempt() -> bool:
            nonlocal started
            if not started:
                started = True
                self.threads.run(lambda: (step(), done.set()))
            return done.is_set()

        self.attempt(attempt)

    def record(self, *, captured: bool = False) -> SimulatedEvent:
        event = SimulatedEvent()
        self.attempt(lambda: (event.passed.set(), True)[1])
        return event

    def wait(self, event: SimulatedEvent) -> None:
        assert not event.released
        assert not self.ended
        self.runs = True
        self.attempt(event.passed.is_set)

    def run(self, step: Callable[[], object]) -> None:
        """Queue a step that does not block."""
        self.runs = True
        self.attempt(lambda: (step(), True)[1])


class UserStream:
    """What the test does on the host counts as queued here, so waiting is waiting."""

    handle = 0
    runs = True

    def record(self, *, captured: bool = False) -> SimulatedEvent:
        event = SimulatedEvent()
        event.passed.set()
        return event

    def wait(self, event: SimulatedEvent) -> None:
        assert event.passed.wait(LIMIT)

    def run(self, step: Callable[[], object]) -> None:
        step()


class ReadOnly(TorchDispatchMode):
    """Torch's operations may make tensors, but write none."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert not func._schema.is_mutable, f"{func} in place of an allocation"
        return func(*args, **(kwargs or {}))


class SimulatedDevice:
    """Of one rank."""

    def __init__(self) -> None:
        self.user = UserStream()
        self.capture: SimulatedStream | None = None  #: the stream that is being captured, if one is
        self.joined: dict[int, int] = {}  #: captures that other streams are part of, by handles
        self.recorded = 0

    def current_stream(self) -> Any:
        return self.capture or self.user

    def new_stream(self, *, high_priority: bool) -> SimulatedStream:
        return SimulatedStream()

    def wrap(self, stream: Any) -> Any:
        return stream

    def capturing(self) -> bool:
        return self.capture is not None

    def capture_of(self, stream: Any) -> int:
        assert stream is not self.capture or stream.handle
        return stream.handle if stream is self.capture else self.joined.get(stream.handle, 0)

    def here(self) -> contextlib.AbstractContextManager[object]:
        return contextlib.nullcontext()

    def reduces(self, dtype: torch.dtype) -> bool:
        return True

    def owns(self, tensor: Tensor) -> bool:
        return tensor.numel() % 5 != 0  # some of what is sent plays the host's part

    def allocating(self, stream: Any) -> contextlib.AbstractContextManager[object]:
        """Nothing may be written on a stream that otherwise runs nothing: others fill its memory."""
        return contextlib.nullcontext() if stream.runs else ReadOnly()

    def empty(self, nbytes: int, stream: Any) -> Tensor:
        with torch.inference_mode(False):
            return torch.full((nbytes,), 0xA5, dtype=torch.uint8)

    def bytes_at(self, address: int, nbytes: int, owner: object) -> Tensor:
        buffer = (ctypes.c_char * nbytes).from_address(address)
        buffer.owner = owner  # type: ignore[attr-defined]
        with torch.inference_mode(False):
            return torch.frombuffer(buffer, dtype=torch.uint8)

    def synchronize(self) -> None:
        pass

    def lend(self, tensor: Tensor, stream: Any) -> None:
        pass

    def query(self, event: SimulatedEvent) -> bool:
        assert not event.released
        return event.passed.is_set()

    def enter(self) -> None:
        pass

    def looking(self) -> contextlib.AbstractContextManager[object]:
        return contextlib.nullcontext()

    def end_stream(self, stream: Any) -> None:
        assert not stream.ended
        stream.ended = True

    def release(self, event: SimulatedEvent) -> None:
        assert not event.released, "released twice"
        event.released = True


@dataclass
class Group:
    """The ranks of one communicator."""

    unique_id: bytes
    size: int
    lock: threading.Condition = field(default_factory=threading.Condition)
    joined: set[int] = field(default_factory=set)
    left: set[int] = field(default_factory=set)  # by abort: their memory may be gone
    known: set[tuple[object, ...]] = field(default_factory=set)
    announced: defaultdict[object, set[int]] = field(default_factory=lambda: defaultdict(set))
    collectives: defaultdict[int, dict[int, Ready]] = field(default_factory=lambda: defaultdict(dict))
    messages: defaultdict[tuple[int, int, int], dict[str, Ready]] = field(default_factory=lambda: defaultdict(dict))
    windows: defaultdict[int, dict[int, tuple[int, int]]] = field(default_factory=lambda: defaultdict(dict))
    one_sided: set[int] = field(default_factory=set)  # ranks that have made a one-sided call
    puts: defaultdict[tuple[int, int], deque[Callable[[], object]]] = field(default_factory=lambda: defaultdict(deque))


@dataclass(frozen=True)
class SimulatedWindow:
    """One rank's handle: the number of the window among those of its communicator, and where its memory is."""

    number: int
    address: int
    nbytes: int


@dataclass
class Ready:
    """One call that has come to be run."""

    name: str
    source: int
    target: int
    count: int
    dtype: int = 1
    op: int = -1
    peer: int = -1
    factor: int = 0  #: of PREMUL_SUM: where it is
    done: bool = False


@dataclass(eq=False)
class SimulatedComm:
    group: Group
    rank: int
    blocking: bool
    error: str = ""
    aborted: bool = False
    ended: bool = False
    collectives: int = 0
    estimates: int = 0
    queued: bool = False  #: something that was only estimated
    launch: threading.Thread | None = None  #: launches the latest group of a communicator that does not block
    messages: defaultdict[tuple[int, int], int] = field(default_factory=lambda: defaultdict(int))
    reductions: dict[int, int] = field(default_factory=dict)  # PREMUL_SUM: address of the factor
    windows: list[SimulatedWindow] = field(default_factory=list)
    registered: dict[int, tuple[int, int]] = field(default_factory=dict)  # by handle: address and size

    @property
    def launches(self) -> bool:
        return self.launch is not None and self.launch.is_alive()


class SimulatedNccl:
    """The binding of one rank. ``calls`` lists the names of what was called, with ``[`` and ``]`` around groups."""

    version = 23007
    groups: dict[bytes, Group] = {}
    ids = itertools.count(1)
    comms: list[SimulatedComm] = []  # of all ranks, that have not ended
    memory: dict[int, object] = {}  # of all ranks, that was allocated and not freed, by address
    registry = threading.Lock()  # held while these change: the ranks come and go on threads of their own

    def __init__(
        self,
        *,
        native: Sequence[str] = ("all_to_all", "gather", "scatter", "estimate", "windows", "register"),
        connects: bool = True,
    ) -> None:
        self.dtypes = {dtype: number for number, dtype in enumerate(DTYPES)}
        self.reductions = {kind: number for number, kind in enumerate(REDUCTIONS)}
        self.native = frozenset(native)
        self.connects = connects
        self.calls: list[str] = []
        self.configs: list[Config] = []
        self.fail: dict[str, str] = {}  #: by name of the call, what it is to fail with
        self._open = threading.local()

    def unique_id(self) -> bytes:
        return next(self.ids).to_bytes(128, "big")  # the latest is the greatest

    def init(self, size: int, rank: int, unique_id: bytes, config: Config) -> SimulatedComm:
        self._note("init")
        self.configs.append(config)
        with self.registry:
            group = self.groups.setdefault(unique_id, Group(unique_id, size))
            assert group.size == size
            comm = SimulatedComm(group, rank, config.blocking)
            with group.lock:
                assert rank not in group.joined
                group.joined.add(rank)
                group.lock.notify_all()
            self.comms.append(comm)
        if config.blocking:
            with group.lock:
                assert group.lock.wait_for(lambda: len(group.joined) == size or comm.aborted, LIMIT)
        return comm

    def progress(self, comm: SimulatedComm) -> bool:
        if comm.error:
            raise BackendError(comm.error)
        return len(comm.group.joined) == comm.group.size and not comm.launches

    def finalize(self, comm: SimulatedComm) -> None:
        self._note("finalize")

    def destroy(self, comm: SimulatedComm) -> None:
        self._note("destroy")
        self._end(comm)

    def abort(self, *comms: SimulatedComm) -> None:
        self._note("abort")
        for comm in comms:
            with comm.group.lock:
                comm.aborted = True
                comm.group.left.add(comm.rank)
                comm.group.lock.notify_all()
            device.change()
            self._end(comm)

    def _end(self, comm: SimulatedComm) -> None:
        assert comm.aborted or not (comm.reductions or comm.registered or comm.windows)
        group = comm.group
        with self.registry:
            assert not comm.ended
            comm.ended = True
            self.comms.remove(comm)
            if len(group.joined) == group.size and not any(other.group is group for other in self.comms):
                self.groups.pop(group.unique_id)  # with everything that was ever sent

    def pre_mul_sum(self, scalar: int, dtype: int, comm: SimulatedComm, *, on_device: bool) -> int:
        assert on_device
        number = 100 + next(self.ids)  # none of those that there always are
        comm.reductions[number] = scalar
        return number

    def drop_reduction(self, op: int, comm: SimulatedComm) -> None:
        del comm.reductions[op]

    def register(self, comm: SimulatedComm, buf: int, nbytes: int) -> int:
        self._one_call("register", comm)
        number = next(self.ids)
        comm.registered[number] = (buf, nbytes)
        return number

    def deregister(self, comm: SimulatedComm, handle: int) -> None:
        self._one_call("deregister", comm)
        del comm.registered[handle]

    def mem_alloc(self, nbytes: int) -> int:
        self._one_call("mem_alloc", None)
        memory = (ctypes.c_char * (nbytes + 4096))()
        address = (ctypes.addressof(memory) + 4095) // 4096 * 4096
        ctypes.memset(address, 0xA5, nbytes)
        self.memory[address] = memory
        return address

    def mem_free(self, address: int) -> None:
        self._note("mem_free")
        del self.memory[address]

    def window_register(self, comm: SimulatedComm, buf: int, nbytes: int) -> SimulatedWindow:
        self._one_call("window_register", comm)
        assert buf % 4096 == nbytes % 4096 == 0
        window = SimulatedWindow(len(comm.windows), buf, nbytes)
        comm.windows.append(window)
        group = comm.group
        with group.lock:
            places = group.windows[window.number]
            places[comm.rank] = (buf, nbytes)
            assert len({size for _, size in places.values()}) == 1, "a window must have one size"
            group.lock.notify_all()
            assert group.lock.wait_for(lambda: comm.aborted or len(places) == group.size, LIMIT)
        return window

    def window_deregister(self, comm: SimulatedComm, window: SimulatedWindow) -> None:
        self._one_call("window_deregister", comm)
        comm.windows.remove(window)

    def put_signal(
        self, buf: int, nbytes: int, peer: int, window: SimulatedWindow, offset: int, comm: SimulatedComm, stream: int
    ) -> None:
        self._one_sided("put_signal", comm)
        assert any(each.address <= buf and buf + nbytes <= each.address + each.nbytes for each in comm.windows)
        assert nbytes > 0
        address, size = comm.group.windows[window.number][peer]
        assert offset + nbytes <= size

        def run() -> None:
            data = ctypes.string_at(buf, nbytes)  # the origin may change its memory when the stream has passed this
            self._signal(comm, peer, lambda: ctypes.memmove(address + offset, data, nbytes))

        SimulatedStream.by_handle[stream].run(run)

    def signal(self, peer: int, comm: SimulatedComm, stream: int) -> None:
        self._one_sided("signal", comm)
        SimulatedStream.by_handle[stream].run(lambda: self._signal(comm, peer, lambda: None))

    def _signal(self, comm: SimulatedComm, peer: int, write: Callable[[], object]) -> None:
        with comm.group.lock:
            comm.group.puts[comm.rank, peer].append(write)
        device.change()

    def wait_signal(self, counts: Mapping[int, int], comm: SimulatedComm, stream: int) -> None:
        self._one_sided("wait_signal", comm)
        group = comm.group
        wanted = {peer: count for peer, count in counts.items() if count}
        assert wanted == counts

        limit = Limit()

        def attempt() -> bool:
            puts = {peer: group.puts[peer, comm.rank] for peer in wanted}
            with group.lock:
                come = all(len(puts[peer]) >= count for peer, count in wanted.items())
                if come and not comm.aborted:
                    for peer, count in wanted.items():
                        for _ in range(count):
                            puts[peer].popleft()()
                if not come and limit.over():
                    comm.error = f"rank {comm.rank} waits for {wanted} signals"
                return come or comm.aborted or bool(comm.error)

        SimulatedStream.by_handle[stream].attempt(attempt)

    def _one_call(self, name: str, comm: SimulatedComm | None) -> None:
        """A call outside of all groups."""
        self._note(name)
        if comm is not None:
            assert not comm.ended, "use of a communicator that has ended"
        assert getattr(self._open, "calls", None) is None, f"{name} in a group"
        if name in self.fail:
            raise BackendError(self.fail[name])

    def _one_sided(self, name: str, comm: SimulatedComm) -> None:
        self._one_call(name, comm)
        group = comm.group
        with group.lock:
            group.one_sided.add(comm.rank)
            group.lock.notify_all()
            met = group.lock.wait_for(lambda: comm.aborted or len(group.one_sided) == group.size, LIMIT)
            assert met, f"rank {comm.rank} waited for the others' one-sided calls for ever"

    def group_start(self) -> None:
        self._note("[")
        assert getattr(self._open, "calls", None) is None, "a group within a group"
        self._open.calls = []

    def group_end(self) -> None:
        calls, self._open.calls = self._open.calls, None
        self._note("]")
        if any(call is None for call in calls):
            raise BackendError("a call of the group was wrong")
        if calls:
            comm, stream = calls[0][1], calls[0][2]
            assert all(call[1] is comm and call[2] == stream for call in calls)
            assert not comm.queued, "what was only estimated would run"
            assert not comm.launches, "a group before the communicator is ready"
            launch = partial(self._launch, comm, stream, [self._number(ready, comm) for ready, _, _ in calls])
            if comm.blocking:
                launch()
            else:
                comm.launch = threading.Thread(target=launch, daemon=True)
                comm.launch.start()

    def _launch(self, comm: SimulatedComm, stream: int, numbered: Sequence[tuple[Ready, object]]) -> None:
        if self.connects:
            self._meet(comm, numbered)
        SimulatedStream.by_handle[stream].attempt(Running(comm, numbered))

    def group_estimate(self) -> float:
        calls, self._open.calls = self._open.calls, None
        self._note("?")
        if any(call is None for call in calls):
            raise BackendError("a call of the group was wrong")
        comm = calls[0][1]
        assert comm.blocking, "NCCL would run it"
        assert comm.group.size > 1, "NCCL has run it"
        assert not comm.queued
        comm.queued = True
        comm.estimates += 1
        if self.connects:
            self._meet(comm, [(ready, ("estimate", comm.estimates, i)) for i, (ready, _, _) in enumerate(calls)])
        last = calls[-1][0]
        if last.name in ("send", "recv", "gather", "scatter", "all_to_all"):
            return -1e-6
        alike = [
            ready for ready, _, _ in calls if (ready.name, ready.dtype, ready.op) == (last.name, last.dtype, last.op)
        ]
        return 1e-6 + 1e-9 * sum(ready.count * DTYPES[ready.dtype].itemsize for ready in alike)

    def drop_queued(self, comm: SimulatedComm, buf: int, stream: int) -> None:
        assert buf
        self._note("drop")
        comm.queued = False

    def _number(self, ready: Ready, comm: SimulatedComm) -> tuple[Ready, object]:
        if ready.name in ("send", "recv"):
            ends = (comm.rank, ready.peer) if ready.name == "send" else (ready.peer, comm.rank)
            side = (0 if ready.name == "send" else 1, ready.peer)
            number = comm.messages[side]
            comm.messages[side] += 1
            return ready, (*ends, number)
        number = comm.collectives
        comm.collectives += 1
        return ready, number

    def _meet(self, comm: SimulatedComm, calls: Sequence[tuple[Ready, object]]) -> None:
        group = comm.group
        with group.lock:
            for ready, key in calls:
                message = ready.name in ("send", "recv")
                group.announced[key].add(2 * comm.rank + (ready.name == "send") if message else comm.rank)
            group.lock.notify_all()
            for ready, key in calls:
                kind = (ready.name, ready.peer, comm.rank)
                if kind in group.known:
                    continue
                needed = 2 if ready.name in ("send", "recv") else group.size
                met = group.lock.wait_for(
                    lambda key=key, needed=needed: comm.aborted or len(group.announced[key]) == needed, LIMIT
                )
                assert met, f"rank {comm.rank} waited for {ready} for ever"
                group.known.add(kind)

    def _note(self, what: str) -> None:
        self.calls.append(what)

    def _call(self, ready: Ready, comm: SimulatedComm, stream: int) -> None:
        self._note(ready.name)
        assert not comm.ended, "use of a communicator that has ended"
        calls = getattr(self._open, "calls", None)
        assert calls is not None, f"{ready.name} outside of a group"
        if ready.name in self.fail:
            calls.append(None)
            raise BackendError(self.fail[ready.name])
        ready.factor = comm.reductions.get(ready.op, 0)
        calls.append((ready, comm, stream))

    def all_reduce(self, send: int, recv: int, count: int, dtype: int, op: int, comm: Any, stream: int) -> None:
        self._call(Ready("all_reduce", send, recv, count, dtype, op), comm, stream)

    def broadcast(self, send: int, recv: int, count: int, dtype: int, root: int, comm: Any, stream: int) -> None:
        self._call(Ready("broadcast", send, recv, count, dtype, peer=root), comm, stream)

    def reduce(self, send: int, recv: int, count: int, dtype: int, op: int, root: int, comm: Any, stream: int) -> None:
        self._call(Ready("reduce", send, recv, count, dtype, op, root), comm, stream)

    def all_gather(self, send: int, recv: int, count: int, dtype: int, comm: Any, stream: int) -> None:
        self._call(Ready("all_gather", send, recv, count, dtype), comm, stream)

    def reduce_scatter(self, send: int, recv: int, count: int, dtype: int, op: int, comm: Any, stream: int) -> None:
        self._call(Ready("reduce_scatter", send, recv, count, dtype, op), comm, stream)

    def all_to_all(self, send: int, recv: int, count: int, dtype: int, comm: Any, stream: int) -> None:
        assert "all_to_all" in self.native
        self._call(Ready("all_to_all", send, recv, count, dtype), comm, stream)

    def gather(self, send: int, recv: int, count: int, dtype: int, root: int, comm: Any, stream: int) -> None:
        assert "gather" in self.native
        self._call(Ready("gather", send, recv, count, dtype, peer=root), comm, stream)

    def scatter(self, send: int, recv: int, count: int, dtype: int, root: int, comm: Any, stream: int) -> None:
        assert "scatter" in self.native
        self._call(Ready("scatter", send, recv, count, dtype, peer=root), comm, stream)

    def send(self, buf: int, count: int, dtype: int, peer: int, comm: Any, stream: int) -> None:
        self._call(Ready("send", buf, 0, count, dtype, peer=peer), comm, stream)

    def recv(self, buf: int, count: int, dtype: int, peer: int, comm: Any, stream: int) -> None:
        self._call(Ready("recv", 0, buf, count, dtype, peer=peer), comm, stream)


class Limit:
    """The time that a step may wait, from its first attempt on."""

    def __init__(self) -> None:
        self._end = 0.0

    def over(self) -> bool:
        self._end = self._end or time.monotonic() + LIMIT
        return time.monotonic() > self._end


class Running:
    """A step of a stream: all calls of a group, side by side, until all are done."""

    def __init__(self, comm: SimulatedComm, calls: Sequence[tuple[Ready, Any]]) -> None:
        self._comm, self._calls, self._limit = comm, calls, Limit()
        self._mine: list[Ready] | None = None

    def __call__(self) -> bool:
        comm = self._comm
        with comm.group.lock:
            if self._mine is None:
                self._mine = [self._arrive(ready, key) for ready, key in self._calls]
                device.change()
            over = comm.aborted or all(ready.done for ready in self._mine)
            if not over and self._limit.over():
                comm.error = f"rank {comm.rank} hangs in {[ready.name for ready in self._mine]}"
                return True
            return over

    def _arrive(self, ready: Ready, key: Any) -> Ready:
        comm, group = self._comm, self._comm.group
        if isinstance(key, int):
            arrived = group.collectives[key]
            arrived[comm.rank] = ready = _scaled(ready, group.size) if ready.factor else ready
            if len(arrived) == group.size and not group.left:
                _perform(comm, [arrived[rank] for rank in range(group.size)])
        else:
            ends = group.messages[key]
            ends[ready.name] = ready
            if len(ends) == 2 and not group.left:
                _transfer(comm, ends["send"], ends["recv"])
        return ready


_kept: list[Tensor] = []


def _scaled(ready: Ready, size: int) -> Ready:
    """As a plain sum of what this rank brings times its factor."""
    dtype = DTYPES[ready.dtype]
    count = ready.count * size if ready.name == "reduce_scatter" else ready.count
    scaled = (_memory(ready.source, count, dtype) * _memory(ready.factor, 1, dtype)).to(dtype)
    _kept.append(scaled)
    return Ready(ready.name, scaled.data_ptr(), ready.target, ready.count, ready.dtype, 0, ready.peer)


def _memory(address: int, count: int, dtype: torch.dtype) -> Tensor:
    assert address, "no memory was given"
    nbytes = count * dtype.itemsize
    return torch.frombuffer((ctypes.c_char * nbytes).from_address(address), dtype=torch.uint8).view(dtype)


def _transfer(comm: SimulatedComm, send: Ready, recv: Ready) -> None:
    if (send.count, send.dtype) != (recv.count, recv.dtype):
        comm.error = f"a message does not fit: {send} {recv}"
    else:
        dtype = DTYPES[send.dtype]
        _memory(recv.target, recv.count, dtype).copy_(_memory(send.source, send.count, dtype))
    send.done = recv.done = True


def _perform(comm: SimulatedComm, ranks: Sequence[Ready]) -> None:
    first, size = ranks[0], len(ranks)
    for ready in ranks:
        if (ready.name, ready.count, ready.dtype, ready.op, ready.peer) != (
            first.name,
            first.count,
            first.dtype,
            first.op,
            first.peer,
        ):
            comm.error = f"calls do not belong together: {first} {ready}"
            break
    else:
        _move(first.name, ranks, size, first.count, DTYPES[first.dtype], first.op, first.peer)
    for ready in ranks:
        ready.done = True


def _move(name: str, ranks: Sequence[Ready], size: int, n: int, dtype: torch.dtype, op: int, root: int) -> None:
    def sources(count: int) -> list[Tensor]:
        return [_memory(ready.source, count, dtype).clone() for ready in ranks]

    def put(rank: int, values: Tensor) -> None:
        _memory(ranks[rank].target, len(values), dtype).copy_(values)

    if name == "all_reduce":
        total = _reduced(sources(n), dtype, op)
        for rank in range(size):
            put(rank, total)
    elif name == "reduce":
        put(root, _reduced(sources(n), dtype, op))
    elif name == "reduce_scatter":
        total = _reduced(sources(n * size), dtype, op)
        for rank in range(size):
            put(rank, total[rank * n : (rank + 1) * n])
    elif name == "broadcast":
        values = _memory(ranks[root].source, n, dtype).clone()
        for rank in range(size):
            put(rank, values)
    elif name == "all_gather":
        values = torch.cat(sources(n))
        for rank in range(size):
            put(rank, values)
    elif name == "gather":
        put(root, torch.cat(sources(n)))
    elif name == "scatter":
        values = _memory(ranks[root].source, n * size, dtype).clone()
        for rank in range(size):
            put(rank, values[rank * n : (rank + 1) * n])
    elif name == "all_to_all":
        given = sources(n * size)
        for rank in range(size):
            put(rank, torch.cat([values[rank * n : (rank + 1) * n] for values in given]))
    else:
        raise AssertionError(name)


def _reduced(rows: Sequence[Tensor], dtype: torch.dtype, op: int) -> Tensor:
    kind = REDUCTIONS[op]
    wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
    if dtype in (torch.uint32, torch.uint64):
        assert kind is not RedOpType.AVG
        wide = torch.int64
    total = rows[0].view(torch.int64).clone() if dtype == torch.uint64 else rows[0].to(wide)
    for row in rows[1:]:
        values = row.view(torch.int64) if dtype == torch.uint64 else row.to(wide)
        if kind is RedOpType.PRODUCT:
            total = total * values
        elif kind is RedOpType.MIN:
            total = torch.minimum(total, values)
        elif kind is RedOpType.MAX:
            total = torch.maximum(total, values)
        else:
            total = total + values
    if kind is RedOpType.AVG:
        total = total / len(rows)
    return total.view(torch.uint64) if dtype == torch.uint64 else total.to(dtype)


class SimulatedBackend(NcclBackend):
    """The NCCL backend on such a device."""

    name = "simulated"
    devices = frozenset({"cpu"})
    settings: dict[str, Any] = {}

    @classmethod
    def _platform_for(cls, context: BackendContext) -> DeviceRuntime:
        return DeviceRuntime(SimulatedNccl(**cls.settings), SimulatedDevice())

    @property
    def nccl(self) -> SimulatedNccl:
        nccl = self._platform.nccl
        assert isinstance(nccl, SimulatedNccl)
        return nccl

    @property
    def device(self) -> SimulatedDevice:
        assert isinstance(self._device, SimulatedDevice)
        return self._device
