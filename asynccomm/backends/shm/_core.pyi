"""The native executor of collectives in shared memory (``_core.c``)."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, final

from asynccomm.backends.shm.peer_memory import PeerMemory
from asynccomm.core.work import Work
from asynccomm.ops import Op

@final
class Program:
    """A program in the form that a run reads."""

@final
class Run(Iterator[bool]):
    """A run of a program; ``next`` is one pass, as of the reference executor's generator."""

    begun: bool
    steps: int
    def __next__(self) -> bool: ...
    def begin(self, first: int, words: tuple[int, int, int], /) -> None:
        """Begin a run that the fast path has prepared, at step ``first``; ``words`` as for ``Segment.run``."""

    def drive(self, patience: float, stretch: float, events: int, /) -> bool:
        """Go on without the GIL until the run is done, or Python has something to do; returns whether the run is done.

        The arguments are those of an ``executor.Pace``.
        """

@final
class Segment:
    """The segment of a rank.

    Args:
        memory: the whole segment.
        starts: of the records, the slots, the results and the message rings, in bytes.
        bells: by rank, the eventfds of its two bells, or -1.
    """

    def __new__(
        cls,
        memory: memoryview,
        rank: int,
        size: int,
        banks: int,
        chunk: int,
        piece: int,
        ring: int,
        starts: tuple[int, int, int, int],
        bells: Sequence[tuple[int, int]],
        /,
    ) -> Segment: ...
    def program(
        self,
        steps: int,
        stages: Sequence[Any],
        lending: tuple[int, int, bool] | None,
        announced: tuple[Sequence[int], Sequence[int], int] | None,
        /,
    ) -> Program:
        """Compile a ``programs.Program``. Raises: ValueError for an access outside of the segment."""

    def run(
        self,
        program: Program,
        first: int,
        words: tuple[int, int, int],
        vectors: Sequence[int | tuple[Sequence[int], Sequence[int]]],
        reductions: Sequence[tuple[int, int, int] | None],
        mismatch: Callable[[int, int], BaseException],
        /,
    ) -> Run:
        """A run from step ``first`` on.

        Args:
            words: the words that a record of this collective has on all ranks.
            vectors: addresses, or the addresses of the pieces and where they start; the memory is the caller's.
            reductions: dtype, operator and divisor, by ``reduction.DTYPES`` and ``reduction.OPERATORS``.
            mismatch: called with a rank and a step if their record differs; returns the exception to raise.
        """

    def transfer(
        self,
        transfers: tuple[tuple[int, bool, int, int, int], ...],
        frame: int,
        patience: float,
        stretch: float,
        events: int,
        /,
    ) -> list[int]:
        """Write and read DATA frames without the GIL; returns the bytes moved of each transfer.

        It ends when a transfer is done, the next frame of a peer belongs to none, or Python has something to do.

        Args:
            transfers: peer, whether it is sent, the message's ident, and address and bytes of the memory.
            frame: bytes of payload of a frame, at most.
            patience: with ``stretch`` and ``events``, an ``executor.Pace``.
        """

    def follow(self, position: RankPosition, /) -> None:
        """Have runs of unknown length take their further steps in ``position``, which the comm's collectives use."""

    def map_by(self, peers: PeerMemory, /) -> None:
        """Have ``peers`` map the tensors that other ranks lend."""

    def single_copy(self, liveness: Sequence[int], /) -> None:
        """Take part in single copy, once all ranks can read each other's memory.

        Args:
            liveness: by rank, a descriptor that is readable once the rank is lost; -1 for this rank.
        """

    def reads_all(self) -> bool:
        """Whether all ranks can read each other's memory, and do so."""

    def read(self, rank: int, to: int, source: int, nbytes: int, /) -> bool | None:
        """Copy from memory of a rank's process, without the GIL; False: it is lost, or its operation has failed.

        Returns None if the memory cannot be read.
        """

    def link(self, rank: int, /) -> LinkState:
        """The counters of the rings to and from a peer."""

    def interrupt(self) -> None:
        """Make ``Run.drive`` and ``transfer`` return soon, until ``resume``. From any thread."""

    def resume(self) -> None: ...

class RankPosition:
    """``board.RankPosition``, with the same attributes."""

class LinkState:
    """``rings.LinkState``, with the same attributes."""

@final
class FastPath:
    """The fast path of a comm's calls; ``fast_path.fast_path`` makes it, and names the arguments."""

    def __new__(cls, *arguments: Any) -> FastPath: ...
    def submit(self, timeout: Any, hints: Any, tag: Any, check: Callable[..., Any], /, *arguments: Any) -> Work[Any]:
        """Submit a call, as ``DirectCalls.call`` does."""

    def flush(self, items: list[Any], /) -> bool | None:
        """Send held calls; None: the submitter has to. See ``FastCalls.flush``."""

    def before_await(self, work: Work[Any], /) -> None:
        """Go on, before a task waits for the Work of a message that is posted here; or have the backend do so."""

    def before_block(self, work: Work[Any], /) -> None:
        """Have the backend go on, before a thread waits for such a Work."""

@final
class HeldCall:
    """A call that a scope holds, or a message that is posted; see ``base.HeldCall``."""

    op: Op
    work: Work[Any]
    nbytes: int
    arguments: tuple[Any, ...]
    run: object
    places: list[tuple[Any, int, int, tuple[int, ...], Any]]

@final
class FastWindow:
    """The fast path of a window's operations, see ``base.FastWindow``; ``ShmWindow.fast_path`` makes it."""

    queued: int  #: operations that run on the window's thread: later ones have to wait for them
    ended: bool
    def __new__(
        cls,
        path: FastPath,
        memory: memoryview,
        rank: int,
        number: int,
        signals: int,
        inline_bytes: int,
        parts: Sequence[tuple[int, int, int, Sequence[int], Sequence[int]]],
        kinds: tuple[type, ...],
        comparisons: tuple[object, ...],
        /,
    ) -> FastWindow:
        """Make the fast path.

        Args:
            memory: the window's segment.
            parts: by rank, start and bytes of its memory, the words of its first signal and of its two bells, and the
                eventfds of these.
            kinds: the classes of operations, in the order of ``_windows.c``.
            comparisons: the members of ``SignalCmpOp``.

        Raises: ValueError for a place outside of the memory.
        """

    def put(self, tensor: Any, rank: Any, offset: Any, /) -> Work[Any] | None: ...
    def get(self, tensor: Any, rank: Any, offset: Any, /) -> Work[Any] | None: ...
    def signal(self, rank: Any, slot: Any, value: Any, add: Any, /) -> Work[Any] | None: ...
    def wait_signal(self, slot: Any, value: Any, cmp: Any, /) -> Work[Any] | None: ...
    def fence(self, rank: Any, /) -> Work[Any] | None: ...

def copy(target: int, source: int, nbytes: int, /) -> None: ...
def signal(words: memoryview, index: int, value: int, add: bool, /) -> None:
    """Set the 64-bit word at ``index``, or add to it: atomic, with a full fence. Raises: ValueError for the index."""

def add_extent(address: int, nbytes: int, start: int, /) -> None:
    """Note an extent of this process's arena, at ``start`` in its file."""

def remove_extent(address: int, /) -> None:
    """Forget an extent. Raises: KeyError."""

def forget_extents() -> None:
    """Forget all extents: those of the parent, in a forked child."""
