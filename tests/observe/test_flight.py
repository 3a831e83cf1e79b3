"""The format of torch's flight recorder; the dumps of comms are tested in tests/comm, and shapes in tests/compat."""

import asyncio
import logging
import pickle
from pathlib import Path

import pytest
import torch
from torch.distributed.flight_recorder import fr_trace
from torch.distributed.flight_recorder.components import types as fr_types

from asynccomm import CollectiveTimeoutError
from asynccomm.comm.flight import dump_comms
from asynccomm.observe.analysis import analyze
from asynccomm.observe.flight import sides_of
from asynccomm.ops import AllReduce, Barrier
from asynccomm.ops.reduce_op import ReduceOp
from asynccomm.testing.local import loopback_world

READS_ANY_BACKEND = hasattr(fr_types, "_UNEVEN_COLLECTIVES")  # else the tool refuses other names than NCCL's


async def test_torch_s_tool_and_the_analysis_name_the_same_rank(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with loopback_world(2) as comms:
        a, b = comms
        await asyncio.gather(*[comm.all_reduce(torch.ones(3)) for comm in comms])
        await asyncio.gather(*[comm.all_gather_single(torch.empty(4), torch.ones(2)) for comm in comms])
        await asyncio.gather(*[comm.reduce_scatter_single(torch.empty(2), torch.ones(4)) for comm in comms])
        with pytest.raises(CollectiveTimeoutError):
            await a.broadcast(torch.ones(2), 0, timeout=0.05)
        dumps = {comm.rank: dump_comms([(comm._submitter, [0, 1])]) for comm in comms}
        del b
    (found,) = analyze(dumps)
    assert found.suspect is not None
    assert (found.suspect.seq, found.suspect.problem, found.suspect.ranks) == (3, "missing", (1,))
    for rank, dump in dumps.items():
        if not READS_ANY_BACKEND:
            for entry in dump["entries"]:
                entry["profiling_name"] = entry["profiling_name"].replace("loopback:", "nccl:")
        (tmp_path / f"rank_{rank}").write_bytes(pickle.dumps(dump))
    with caplog.at_level(logging.INFO):
        fr_trace.main([str(tmp_path), "-o", str(tmp_path / "database")])
    said = [record.getMessage() for record in caplog.records]
    assert any("Not all ranks joining collective" in text for text in said)
    assert "missing ranks: {1}" in said
    _, database = pickle.loads((tmp_path / "database").read_bytes())
    assert [each.pass_check for each in database.collectives] == [True] * 4


def test_the_sides_of_operations_without_shapes() -> None:
    group = type("Group", (), {"size": 2, "rank": 0, "device": torch.device("cpu"), "name": "x"})()
    op = AllReduce.of(group, torch.ones(2, 3), ReduceOp.SUM).op
    assert sides_of(op, 2) == (((6,), (torch.float32,)),) * 2
    assert sides_of(Barrier(), 2) == (None, None)
