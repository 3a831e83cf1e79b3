"""The methods that observe a comm: copies, and a comm that is closed; the rest is in tests/observe."""

import copy
import pickle
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


async def test_events_hooks_and_traces_are_never_copied(tmp_path: Path) -> None:
    async with loopback_world(1) as (comm,):
        for made, name in (
            (comm.events(), "events"),
            (comm.add_hook(), "add_hook"),
            (comm.trace(tmp_path / "a"), "trace"),
        ):
            assert copy.copy(made) is made
            assert copy.deepcopy([made]) == [made]
            with pytest.raises(TypeError, match=rf"belongs to this process: call comm\.{name}\(\) there"):
                pickle.dumps(made)
