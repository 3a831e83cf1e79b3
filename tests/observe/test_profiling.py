"""Events of torch's profiler."""

from __future__ import annotations

import pytest
import torch
from torch.profiler import profile

from asynccomm import Comm
from asynccomm.observe.profiling import is_profiling, record_comm, recorded


def test_a_call_is_an_event_with_the_shapes_of_its_tensors() -> None:
    values = [torch.ones(2), 1, [torch.ones(3, 1)], None]
    call = recorded("asynccomm:sum", values, lambda *numbers, start=0: sum(numbers, start))
    assert not is_profiling()
    with profile(record_shapes=True, acc_events=True) as seen:
        assert is_profiling()
        assert call(1, 2, start=3) == 6
    assert [event.input_shapes for event in seen.events() if event.name == "asynccomm:sum"] == [[[2], [3, 1]]]
    assert call(1) == 1


@pytest.mark.ranks(2)
async def test_the_calls_of_a_comm_are_events_also_those_of_the_fast_path(comm: Comm) -> None:
    tensor = torch.ones(3)
    for _ in range(2):
        await comm.all_reduce(tensor)
    with profile(record_shapes=True, acc_events=True) as seen:
        await comm.all_reduce(tensor)
        await comm.all_gather_single(torch.empty(4), torch.ones(2))
        async with comm.coalesce():
            comm.barrier()
        await comm.all_gather_object(3)
        await (comm.send_object(3, 1) if comm.rank == 0 else comm.recv_object(0))
        with record_comm("asynccomm::mine"):
            work = comm.all_reduce(tensor)
        await work
    found = [(event.name, event.input_shapes) for event in seen.events() if event.name.startswith("asynccomm::")]
    assert found == [
        ("asynccomm::all_reduce", [[3]]),
        ("asynccomm::all_gather_single", [[2], [4]]),
        ("asynccomm::barrier", []),
        ("asynccomm::all_gather_object", []),
        ("asynccomm::send_object" if comm.rank == 0 else "asynccomm::recv_object", []),
        ("asynccomm::mine", [[3]]),
    ]
    with pytest.raises(TypeError, match="name must be a str, got 1"), record_comm(1):  # type: ignore[arg-type]
        pass
    await comm.all_reduce(tensor)
