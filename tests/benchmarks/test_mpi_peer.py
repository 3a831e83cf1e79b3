"""MPI as a peer."""

import os
import subprocess
import sys

import pytest

from asynccomm.benchmarks.mpi_launcher import why_not
from asynccomm.benchmarks.mpi_peer import _ENVIRONMENT, MpiRanks, mpi_ranks
from asynccomm.benchmarks.operations import OPS


@pytest.mark.skipif(why_not() is not None, reason="the extra 'bench' is not installed")
async def test_mpi_runs_every_operation() -> None:
    async with mpi_ranks(2) as ranks:
        ranks.check_known(list(OPS))
        for op in OPS:
            for floats in (1, 7):
                assert await ranks.body(op, floats)(3) > 0, op


def test_operations_that_mpi_has_not_are_refused_before_any_is_measured() -> None:
    with pytest.raises(ValueError, match="peer 'mpi' has no juggle, sort: it has all_reduce"):
        MpiRanks([], None, ["all_reduce"]).check_known(["all_reduce", "juggle", "sort"])  # type: ignore[arg-type]


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel of Linux lists the pages")
@pytest.mark.real_python  # numpy reads the environment when it is imported
def test_the_memory_of_its_ranks_has_pages_as_that_of_torch_has() -> None:
    program = """
import numpy
data = numpy.ones(4 << 20, numpy.float32)
place = data.ctypes.data + data.nbytes // 2  # the first page is apart
inside = False
for line in open("/proc/self/smaps"):
    ends = line.split()[0].split("-")
    if len(ends) == 2:
        inside = int(ends[0], 16) <= place < int(ends[1], 16)
    elif inside and line.startswith("VmFlags"):
        print("flags:", *line.split()[1:])
"""
    pytest.importorskip("numpy")
    command = [sys.executable, "-c", program]
    ended = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **_ENVIRONMENT}, timeout=60)
    flags = ended.stdout.split()
    assert flags[:1] == ["flags:"], ended.stderr
    assert "hg" not in flags, "the advice to use huge pages"
