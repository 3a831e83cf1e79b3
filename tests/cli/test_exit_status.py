import pytest

from asynccomm.cli.exit_status import culprit, excerpt, exit_code

ABORTED = b"asynccomm.errors.AbortedError: aborted by rank %d: ValueError: no"
LOST = b"asynccomm.errors.PeerLostError: rank %d was lost: connection closed"


@pytest.mark.parametrize(("code", "shell"), [(3, 3), (-9, 137), (-99, 227)])
def test_exit_code(code: int, shell: int) -> None:
    assert exit_code(code) == shell


@pytest.mark.parametrize("blame", [ABORTED, LOST])
def test_a_victim_names_the_culprit(blame: bytes) -> None:
    assert culprit(0, {0: [b"Traceback", blame % 2], 2: [b"ValueError: no"]}) == 2


def test_blame_is_followed_to_its_end_and_not_in_circles() -> None:
    assert culprit(0, {0: [ABORTED % 1], 1: [LOST % 2], 2: [b"Killed"]}) == 2
    assert culprit(0, {0: [ABORTED % 1], 1: [ABORTED % 0]}) in (0, 1)


def test_a_rank_that_did_not_fail_is_not_blamed() -> None:
    assert culprit(0, {0: [ABORTED % 1]}) == 0


def test_old_errors_do_not_count() -> None:
    assert culprit(0, {0: [ABORTED % 1, *[b"epoch"] * 50, b"OSError: disk full"], 1: [b"x"]}) == 0


def test_excerpt_starts_at_the_traceback() -> None:
    noise = [b"line %d" % i for i in range(100)]
    traceback = [b"Traceback (most recent call last):", b"  File", b"KeyError: 1"]
    assert excerpt(noise + traceback) == traceback
    assert excerpt(noise) == noise[-20:]
    assert excerpt([]) == []
