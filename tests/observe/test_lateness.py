"""Which rank came last: the joining of times, the sums, and the straggler."""

import torch

from asynccomm.observe.lateness import KEPT, RECENT, SENT, ArrivalLog, LatenessTable
from asynccomm.ops import Barrier
from asynccomm.testing.local import loopback_world


def table(size: int = 3) -> tuple[LatenessTable, list[int]]:
    rows: list[int] = []
    return LatenessTable(size, lambda seq, row: rows.append(seq)), rows


def test_a_collective_counts_when_the_times_of_all_ranks_are_known() -> None:
    times, rows = table()
    times.add(0, [(0, 1.0), (1, 2.0)])
    times.add(1, [(0, 1.5), (1, 2.0)])
    assert times.lateness().compared == 0
    assert times.lateness().last is None
    times.add(2, [(0, 1.1)])
    assert rows == [0]
    found = times.lateness()
    assert (found.compared, [each.times_last for each in found.ranks]) == (1, [0, 1, 0])
    assert found.last is not None
    assert found.last.rank == 1
    assert round(found.last.seconds, 6) == 0.4, "the others waited for it alone since the second last"
    assert "rank 1 was last in 1, by 400 ms on average, 400 ms at most" in str(found)


def test_what_a_rank_never_sends_is_forgotten() -> None:
    times, rows = table(2)
    for seq in range(KEPT + 10):
        times.add(0, [(seq, 1.0)])
    times.add(1, [(0, 1.0), (KEPT + 9, 1.0)])
    assert rows == [KEPT + 9]


def test_a_straggler_is_last_in_nearly_all_and_by_more_than_the_limit() -> None:
    times, _ = table(2)
    for seq in range(RECENT):
        assert times.straggler(0.005) is None, "too few to tell"
        late = 0.02 if seq % 20 else 0.0
        times.add(0, [(seq, float(seq))])
        times.add(1, [(seq, seq + late)])
    found = times.straggler(0.005)
    assert found is not None
    assert found[0] == 1
    assert round(found[3], 6) == 0.02
    assert times.straggler(0.03) is None


def test_many_calls_are_thinned_to_the_same_numbers_on_all_ranks() -> None:
    logs = [ArrivalLog(lambda: None), ArrivalLog(lambda: None)]
    for seq in range(1000):
        logs[0].finished([(Barrier(), None, seq, float(seq), float(seq))])
        assert len(logs[0]._calls) < 2 * SENT, "the log stays short also between two exchanges"
    for seq in range(10, 900):
        logs[1].finished([(Barrier(), None, seq, float(seq), float(seq))])
    taken = [{call[0] for call in log.take()} for log in logs]
    assert all(0 < len(each) <= SENT for each in taken)
    assert len(taken[0] & taken[1]) > SENT // 2
    assert logs[0].take() == []


async def test_deferred_calls_are_noted_with_their_numbers() -> None:
    async with loopback_world(1) as (comm,):
        log = ArrivalLog(lambda: None)
        comm._submitter.watch(log)
        async with comm.coalesce():
            first, second = comm.all_reduce(torch.ones(2)), comm.all_reduce(torch.ones(2))
        await first
        await second
        comm.recv(torch.ones(1), 0)
        await comm.send(torch.ones(1), 0)
        assert [(seq, when) for seq, _, when in log.take()] == [(0, first.started), (1, second.started)]
        comm._submitter.unwatch(log)
