"""Watchers: the counts by which the fast path learns of them, and what they are notified of."""

from collections.abc import Sequence

import pytest
import torch

from asynccomm import Comm
from asynccomm.core.state import CallCounts
from asynccomm.core.work import Work
from asynccomm.observe.watchers import NOTED, Called, Watcher, Watchers
from asynccomm.ops import Barrier, Call


class Detour(Watcher):
    detours = True


def test_watchers_are_counted_by_their_kind() -> None:
    counts = CallCounts()
    watchers = Watchers(counts)
    plain, detour = Watcher(), Detour()
    watchers.add(plain)
    watchers.add(detour)
    assert (counts.noted_calls, counts.detours) == (NOTED, 1)
    watchers.remove(plain)
    watchers.remove(plain)
    watchers.remove(detour)
    assert (counts.noted_calls, counts.detours, watchers.all) == (0, 0, ())


class Recorder(Watcher):
    def __init__(self) -> None:
        self.seen: list[str] = []

    def called(self, call: Call, work: Work[object]) -> None:
        self.seen.append(f"called {call.op.kind}")

    def finished(self, calls: Sequence[Called]) -> None:
        self.seen += [f"finished {call[0].kind}" for call in calls]

    def waited(self, seconds: float) -> None:
        self.seen.append("waited")


def test_notes_are_reported_before_all_that_follows_them() -> None:
    watchers, recorder = Watchers(CallCounts()), Recorder()
    watchers.notes.append((Barrier(), None, 0, 1.0, 1.5))
    watchers.add(recorder)  # which must not see earlier calls
    watchers.notes.append((Barrier(), None, 1, 1.0, 1.5))
    watchers.waited(0.5)
    watchers.notes.append((Barrier(), None, 2, 1.0, 1.5))
    watchers.remove(recorder)
    assert recorder.seen == ["finished barrier", "waited", "finished barrier"]


def test_a_watcher_in_a_hurry_has_each_call_reported_at_once() -> None:
    watchers, recorder, other = Watchers(counts := CallCounts()), Recorder(), Recorder()
    watchers.add(recorder)
    watchers.hurry(other)  # not among the watchers
    assert counts.noted_calls == NOTED
    watchers.add(other)
    watchers.notes.append((Barrier(), None, 0, 1.0, 1.5))
    for each in (recorder, other):
        watchers.hurry(each)
    assert recorder.seen == other.seen == ["finished barrier"]
    watchers.calm(recorder)
    assert counts.noted_calls == 1
    watchers.remove(other)
    assert counts.noted_calls == NOTED


def test_a_call_that_is_made_while_notes_are_reported_comes_behind_them() -> None:
    watchers = Watchers(CallCounts())

    class Caller(Recorder):
        def finished(self, calls: Sequence[Called]) -> None:
            if not self.seen:
                watchers.notes.append((Barrier(), None, 1, 1.0, 1.5))
                watchers.flush()
                assert not self.seen
            super().finished(calls)

    watchers.add(caller := Caller())
    watchers.notes.append((Barrier(), None, 0, 1.0, 1.5))
    watchers.flush()
    assert caller.seen == ["finished barrier"] * 2


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
