import pytest

from asynccomm.cli.exit_status import culprit, excerpt, exit_code

ABORTED = b"asynccomm.errors.AbortedError: aborted by rank %d: ValueError: no"
LOST = b"asynccomm.errors.PeerLostError: rank %d was lost: connection closed"


@pytest.mark.parametrize(("code", "shell"), [(3, 3), (-9, 137), (-99, 227)])
def test_exit_code(code: int, shell: int) -> None:
    assert exit_code(code) == shell


def blamed(*tails: list[bytes], decisive: int = 0) -> int:
    return culprit(list(enumerate(tails)), decisive)


@pytest.mark.parametrize("caused", [ABORTED, LOST])
@pytest.mark.parametrize("number", [0, 1, 2, 3])  # a rank in the comm that failed
def test_a_victim_is_not_blamed(caused: bytes, number: int) -> None:
    victim = [b"Traceback", caused % number]
    assert blamed(victim, victim, [b"ValueError: no"], [b"KeyError"]) == 2
    assert blamed(victim, []) == 1


def test_where_all_are_victims_the_rank_that_the_first_names_is_blamed() -> None:
    assert blamed([ABORTED % 1]) == 0
    assert blamed([ABORTED % 1], [ABORTED % 1]) == 1
    assert blamed([ABORTED % 0], [ABORTED % 0]) == 0
    assert blamed([ABORTED % 7], [ABORTED % 7]) == 0
    assert blamed([ABORTED % 1], [LOST % 1], [LOST % 1], decisive=2) == 1
    assert culprit([(2, [ABORTED % 5]), (5, [ABORTED % 5])]) == 1


def test_the_nearest_failure_is_blamed_in_an_elastic_run() -> None:
    killed, victim, own = [b"x"], [ABORTED % 0], [b"ValueError: no"]
    assert blamed(killed, victim, own, decisive=1) == 2
    assert blamed(killed, own, victim, decisive=2) == 1
    assert blamed(killed, own, decisive=1) == 1


def test_old_errors_do_not_count() -> None:
    assert blamed([ABORTED % 1, *[b"epoch"] * 50, b"OSError: disk full"], [b"x"]) == 0


def test_excerpt_starts_at_the_traceback() -> None:
    noise = [b"line %d" % i for i in range(100)]
    traceback = [b"Traceback (most recent call last):", b"  File", b"KeyError: 1"]
    assert excerpt(noise + traceback) == traceback
    assert excerpt(noise) == noise[-20:]
    assert excerpt([]) == []
