"""MPI as a peer: ranks of its own, which sleep in a socket until it is their turn.

MPI waits by spinning, so a rank that waited for its turn in a call of MPI would take a core from the contender
that is measured. Here rank 0 of asynccomm starts MPI's ranks under MPI's own launcher and sends each of them, over a
unix socket, the operation to run; they answer when they are done, and sleep again. asynccomm's other ranks wait in a
barrier meanwhile.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
from asyncio import StreamReader, StreamWriter, subprocess
from collections.abc import AsyncIterator, Awaitable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TypeVar

from asynccomm.benchmarks.mpi_launcher import mpi_launcher
from asynccomm.benchmarks.rounds import Body

T = TypeVar("T")

RANK_MODULE = "asynccomm.benchmarks.mpi_rank"
START_SECONDS = 60.0  # for MPI's ranks to come up
END_SECONDS = 10.0  # for them to end when they were let go, then when they were told to
SETTLE_SECONDS = 0.002  # until asynccomm's other ranks have gone to sleep in their barrier

# The settings that Open MPI needs before it runs as root and with more ranks than cores; its releases differ in names.
# Its ranks are not bound to cores either: asynccomm's are not, and the machine may have other work. Nor do they have
# huge pages. numpy asks the kernel for these, and torch does not; another process reads them in half of the time.
_ENVIRONMENT = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "OMPI_MCA_hwloc_base_binding_policy": "none",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "PRTE_MCA_hwloc_default_binding_policy": "none",
    "NUMPY_MADVISE_HUGEPAGE": "0",
}


class MpiRanks:
    """MPI's ranks, for the one process that gives them their turns.

    Args:
        known: the operations that they can run.
    """

    def __init__(
        self,
        connections: Sequence[tuple[StreamReader, StreamWriter]],
        ended: asyncio.Task[int],
        known: Sequence[str],
    ) -> None:
        self._connections = connections
        self._ended = ended
        self._known = known

    def check_known(self, ops: Sequence[str]) -> None:
        """Raise ValueError unless they can run all of ``ops``."""
        unknown = [op for op in ops if op not in self._known]
        if unknown:
            raise ValueError(f"peer 'mpi' has no {', '.join(unknown)}: it has {', '.join(self._known)}")

    def body(self, op: str, floats: int) -> Body:
        """The contender that runs ``op`` on so many floats from each rank."""

        async def run(count: int) -> float:
            await asyncio.sleep(SETTLE_SECONDS)
            line = json.dumps({"op": op, "floats": floats, "count": count}).encode() + b"\n"
            try:
                for _, writer in self._connections:
                    writer.write(line)
                answers = [await _or_end(reader.readuntil(), self._ended) for reader, _ in self._connections]
            except (EOFError, OSError) as exc:
                raise RuntimeError(f"a rank of MPI ended during {op}: its output is above") from exc
            return max(float(answer) for answer in answers)  # only MPI's rank 0 answers with a time, the others with 0

        return run


@asynccontextmanager
async def mpi_ranks(size: int) -> AsyncIterator[MpiRanks]:
    """Start ``size`` ranks of MPI; they end with the block."""
    arrivals: asyncio.Queue[tuple[StreamReader, StreamWriter]] = asyncio.Queue()

    async def arrived(reader: StreamReader, writer: StreamWriter) -> None:
        arrivals.put_nowait((reader, writer))

    launcher = mpi_launcher()
    assert launcher is not None, "why_not() was not asked"
    with tempfile.TemporaryDirectory(prefix="asynccomm-bench-") as folder:
        path = str(Path(folder, "turns"))
        server = await asyncio.start_unix_server(arrived, path)
        process = await asyncio.create_subprocess_exec(
            launcher,
            *("-n", str(size), sys.executable, "-m", RANK_MODULE, path),
            stdin=subprocess.DEVNULL,
            env={**os.environ, **_ENVIRONMENT},
        )
        ended = asyncio.create_task(process.wait())
        connections: list[tuple[StreamReader, StreamWriter]] = []
        try:
            async with asyncio.timeout(START_SECONDS):
                while len(connections) < size:
                    connections.append(await _or_end(arrivals.get(), ended))
                first = [await _or_end(reader.readuntil(), ended) for reader, _ in connections]
            yield MpiRanks(connections, ended, json.loads(first[0]))
        finally:
            for _, writer in connections:
                writer.close()  # a rank that reads the end of its socket leaves
            server.close()
            await _end(process, ended)


async def _or_end(something: Awaitable[T], ended: asyncio.Task[int]) -> T:
    """Wait for ``something`` of MPI's ranks, or raise when they end before."""
    hoped = asyncio.ensure_future(something)
    try:
        await asyncio.wait({hoped, ended}, return_when=asyncio.FIRST_COMPLETED)
        if not hoped.done():
            raise RuntimeError(f"mpiexec ended with exit code {ended.result()}: its output is above")
        return hoped.result()
    finally:
        hoped.cancel()


async def _end(process: subprocess.Process, ended: asyncio.Task[int]) -> None:
    for stop in (None, process.terminate, process.kill):
        if stop is not None:
            stop()
        done, _ = await asyncio.wait({ended}, timeout=END_SECONDS)
        if done:
            return
