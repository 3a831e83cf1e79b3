import pytest

from asynccomm.cli.environment import Placement, cpu_sets, rank_environment


def test_base_is_kept_and_the_rank_wins() -> None:
    environment = rank_environment({"HOME": "/here", "RANK": "9"}, Placement(1, 2, 1, 2, 4711), "id", "3", "/exits")
    assert environment["HOME"] == "/here"
    assert (environment["RANK"], environment["MASTER_PORT"], environment["OMP_NUM_THREADS"]) == ("1", "4711", "3")


def test_a_rank_of_another_node_has_its_numbers_there_too() -> None:
    environment = rank_environment({}, Placement(5, 6, 1, 2, 4711, "node0", 2, 3), "id", "3", "/exits")
    expected = {"RANK": "5", "WORLD_SIZE": "6", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "2"}
    expected |= {"GROUP_WORLD_SIZE": "3", "MASTER_ADDR": "node0", "ROLE_RANK": "5", "ROLE_WORLD_SIZE": "6"}
    assert {name: environment[name] for name in expected} == expected


def test_each_rank_has_neighbouring_cpus_of_its_own() -> None:
    assert cpu_sets({7, 2, 3, 6, 9}, 2, 2) == [frozenset({2, 3}), frozenset({6, 7})]


def test_too_few_cpus() -> None:
    with pytest.raises(ValueError, match="3 ranks need 6 CPUs of their own, 4 are available"):
        cpu_sets(range(4), 3, 2)
