"""Watchers: the counts by which the fast path learns of them, and what they are notified of."""

import pytest
import torch

from asynccomm import Comm
from asynccomm.core.state import CallCounts
from asynccomm.core.work import Work
from asynccomm.observe.watchers import Called, Watcher, Watchers
from asynccomm.ops import Call


class Detour(Watcher):
    detours = True


def test_watchers_are_counted_by_their_kind() -> None:
    counts = CallCounts()
    watchers = Watchers(counts)
    plain, detour = Watcher(), Detour()
    watchers.add(plain)
    watchers.add(detour)
    assert (counts.watchers, counts.detours) == (1, 1)
    watchers.remove(plain)
    watchers.remove(plain)
    watchers.remove(detour)
    assert (counts.watchers, counts.detours, watchers.all) == (0, 0, ())


class Recorder(Watcher):
    def __init__(self) -> None:
        self.seen: list[str] = []

    def called(self, call: Call, work: Work[object]) -> None:
        self.seen.append(f"called {call.op.kind}")

    def finished(self, call: Called) -> None:
        self.seen.append(f"finished {call[0].kind}")


@pytest.mark.ranks(2)
async def test_each_call_is_reported_once_by_either_path(comm: Comm) -> None:
    recorder, tensor = Recorder(), torch.ones(2)
    await comm.all_reduce(tensor)
    comm._submitter.watch(recorder)
    for _ in range(20):
        await comm.all_reduce(tensor)  # one that is late goes on by the ordinary path
    async with comm.coalesce():
        for _ in range(3):
            comm.all_reduce(torch.ones(2))
    comm._submitter.unwatch(recorder)
    await comm.all_reduce(tensor)
    assert len(recorder.seen) == 23
    assert {text.split()[1] for text in recorder.seen} == {"all_reduce"}
