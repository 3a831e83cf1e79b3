"""Errors among some ranks of a comm, with the comm's numbers and calls."""

from asynccomm.backends.base import ConnectionEndedError
from asynccomm.backends.hierarchical.translation import translated
from asynccomm.errors import AbortedError, BackendError, CollectiveMismatchError, PeerLostError

RANKS = (2, 5)


def test_a_lost_rank() -> None:
    found = translated(PeerLostError(1, "its process ended"), RANKS)
    assert isinstance(found, PeerLostError)
    assert (found.rank, found.detail) == (5, "its process ended")


def test_a_mismatch_of_collectives() -> None:
    given = CollectiveMismatchError(7, 0, "all_reduce(float32[4], SUM)", 1, "barrier(tag unknown here)")
    found = translated(given, RANKS)
    assert str(found) == "operation #7 differs: rank 2 has all_reduce(float32[4], SUM), rank 5 has another call"


def test_calls_that_differ_only_in_the_division() -> None:
    given = CollectiveMismatchError(7, 0, "barrier()", 1, "barrier()")
    assert str(translated(given, RANKS)).endswith(
        "rank 2 has barrier(), rank 5 has barrier(), of other sizes or dtypes"
    )


def test_a_mismatch_of_messages() -> None:
    given = CollectiveMismatchError(0, 0, "send(float32[3], dst=1, tag=4)", 1, "recv(float32[5], src=0, tag=4)")
    found = translated(given, RANKS)
    assert isinstance(found, CollectiveMismatchError)
    assert (found.rank, found.op) == (2, "send(float32[3], dst=5, tag=4)")
    assert (found.other_rank, found.other_op) == (5, "recv(float32[5], src=2, tag=4)")


def test_a_text_that_names_ranks() -> None:
    cause = OSError()
    given = BackendError("rank 1 has closed the comm; so has rank 9")
    given.__cause__ = cause
    found = translated(given, RANKS)
    assert str(found) == "rank 5 has closed the comm; so has rank 9"
    assert found.__cause__ is cause


def test_a_connection_that_has_ended() -> None:
    given = ConnectionEndedError(1, "closed", "recv(float32[5], src=1, tag=4)", message=True)
    found = translated(given, RANKS)
    assert isinstance(found, ConnectionEndedError)
    assert str(found) == "recv(float32[5], src=5, tag=4): rank 5: closed"
    assert str(found.closed) == "rank 5 has closed the comm, and recv(float32[5], src=5, tag=4) needs it"


def test_a_text_with_an_operation_on_a_window() -> None:
    given = BackendError("shm failed in put(float32[1], rank=1, offset=0, window=0): no")
    assert str(translated(given, RANKS)) == "shm failed in put(float32[1], rank=5, offset=0, window=0): no"


def test_any_other_error_stays() -> None:
    error = AbortedError(0, "enough")
    assert translated(error, RANKS) is error
