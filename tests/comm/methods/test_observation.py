"""The methods that observe a comm, on a comm that cannot be observed any more; the rest is in tests/observe."""

from pathlib import Path

import pytest

from asynccomm import ClosedError
from asynccomm.testing.local import loopback_world


async def test_a_closed_comm_has_no_events_hooks_and_traces(tmp_path: Path) -> None:
    async with loopback_world(1) as (comm,):
        pass
    with pytest.raises(ClosedError):
        comm.events()
    with pytest.raises(ClosedError):
        comm.add_hook(post=print)
    with pytest.raises(ClosedError):
        comm.trace(tmp_path / "out.json").__enter__()
    assert not list(tmp_path.iterdir())
