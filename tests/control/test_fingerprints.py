"""Fingerprints compared."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asynccomm.control import fingerprints as module
from asynccomm.control.fingerprints import Fingerprint, FingerprintMismatch, FingerprintTable, FingerprintTables


def fingerprints(*numbers: int, word: int = 5, batch: int = 1) -> list[Fingerprint]:
    return [(number, word, word + 1, batch) for number in numbers]


@given(st.integers(1, 5), st.integers(0, 30), st.randoms(use_true_random=False))
def test_equal_programs_are_never_mistaken(size: int, count: int, choice: random.Random) -> None:
    table = FingerprintTable(size)
    done = [0] * size
    while any(number < count for number in done):
        rank = choice.choice([r for r in range(size) if done[r] < count])
        step = choice.randint(1, count - done[rank])
        assert (
            table.take(rank, [p for n in range(done[rank], done[rank] + step) for p in fingerprints(n, word=n)]) is None
        )
        done[rank] += step
    assert not table._open, "nothing is kept of what all have issued"


@given(st.integers(2, 5), st.integers(1, 20), st.data())
def test_the_first_difference_is_found_and_only_that(size: int, count: int, data: st.DataObject) -> None:
    rank, where, part = (
        data.draw(st.integers(0, size - 1)),
        data.draw(st.integers(0, count - 1)),
        data.draw(st.integers(1, 3)),
    )
    programs = [[p for n in range(count) for p in fingerprints(n, word=n)] for _ in range(size)]
    for number in range(where, count):
        odd = list(programs[rank][number])
        odd[part] += 1
        programs[rank][number] = (odd[0], odd[1], odd[2], odd[3])
    table = FingerprintTable(size)
    found = [(r, table.take(r, programs[r])) for r in data.draw(st.permutations(range(size)))]
    differences = [difference for _, difference in found if difference is not None]
    assert len(differences) == 1
    assert differences[0].seq == where
    assert rank in differences[0][1:]
    assert differences[0].rank != differences[0].other


def test_batches_that_end_elsewhere_differ() -> None:
    table = FingerprintTable(2)
    assert table.take(0, [(0, 1, 1, 2), (1, 1, 1, 0)]) is None
    assert table.take(1, [(0, 1, 1, 1), (1, 1, 1, 1)]) == FingerprintMismatch(0, 0, 1)


def test_a_rank_alone_keeps_nothing() -> None:
    table = FingerprintTable(1)
    assert table.take(0, fingerprints(*range(10))) is None
    assert not table._open


def test_who_is_far_ahead_is_not_kept_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "OPEN", 4)
    table = FingerprintTable(2)
    table.take(0, fingerprints(*range(10)))
    assert list(table._open) == [6, 7, 8, 9]
    assert table.take(1, fingerprints(*range(6), word=9)) is None, "they go unchecked"


def test_comms_are_apart() -> None:
    tables = FingerprintTables()
    assert tables.take("a", 0, 2, fingerprints(0, word=1)) is None
    assert tables.take("b", 1, 2, fingerprints(0, word=2)) is None
    assert tables.take("a", 1, 2, fingerprints(0, word=3)) == FingerprintMismatch(0, 0, 1)
    assert tables.take("b", 0, 2, fingerprints(0, word=3)) == FingerprintMismatch(0, 1, 0)


def test_a_comm_can_be_forgotten() -> None:
    tables = FingerprintTables()
    tables.take("a", 0, 2, fingerprints(0, word=1))
    tables.forget("a")
    tables.forget("never heard of")
    assert tables.take("a", 1, 2, fingerprints(0, word=2)) is None


def test_not_more_comms_than_so_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "COMMS", 2)
    tables = FingerprintTables()
    for key in "abc":
        tables.take(key, 0, 2, fingerprints(0, word=1))
    assert tables.take("a", 1, 2, fingerprints(0, word=2)) is None
    assert tables.take("c", 1, 2, fingerprints(0, word=2)) is not None
