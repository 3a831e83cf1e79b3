import pytest

from asynccomm.cli.environment import cpu_sets, rank_environment


def test_base_is_kept_and_the_rank_wins() -> None:
    environment = rank_environment({"HOME": "/here", "RANK": "9"}, 1, 2, 4711, "id", "3", "/exits")
    assert environment["HOME"] == "/here"
    assert (environment["RANK"], environment["MASTER_PORT"], environment["OMP_NUM_THREADS"]) == ("1", "4711", "3")


def test_each_rank_has_neighbouring_cpus_of_its_own() -> None:
    assert cpu_sets({7, 2, 3, 6, 9}, 2, 2) == [frozenset({2, 3}), frozenset({6, 7})]


def test_too_few_cpus() -> None:
    with pytest.raises(ValueError, match="3 ranks need 6 CPUs of their own, 4 are available"):
        cpu_sets(range(4), 3, 2)
