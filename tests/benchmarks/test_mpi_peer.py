"""MPI as a peer."""

import pytest

from asynccomm.benchmarks.mpi_launcher import why_not
from asynccomm.benchmarks.mpi_peer import MpiRanks, mpi_ranks
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
