"""Events of torch's profiler."""

from __future__ import annotations

import torch
from torch.profiler import profile

from asynccomm.interop.profiling import is_profiling, recorded


def test_a_call_is_an_event_with_the_shapes_of_its_tensors() -> None:
    values = [torch.ones(2), 1, [torch.ones(3, 1)], None]
    call = recorded("asynccomm:sum", values, lambda *numbers, start=0: sum(numbers, start))
    assert not is_profiling()
    with profile(record_shapes=True, acc_events=True) as seen:
        assert is_profiling()
        assert call(1, 2, start=3) == 6
    assert [event.input_shapes for event in seen.events() if event.name == "asynccomm:sum"] == [[[2], [3, 1]]]
    assert call(1) == 1
