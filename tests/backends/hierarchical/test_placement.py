"""Hosts, positions and rails of a comm."""

from asynccomm.backends.hierarchical.placement import HostPlacement, grouped

MIXED = ((0, 3), (1, 2, 4))


def test_the_ranks_of_a_host_have_positions() -> None:
    where = HostPlacement(2, MIXED)
    assert (where.host, where.local, where.position) == (1, (1, 2, 4), 1)
    assert not where.leads
    assert HostPlacement(1, MIXED).leads
    assert [where.host_of(rank) for rank in range(5)] == [0, 1, 1, 0, 1]
    assert [where.position_of(rank) for rank in range(5)] == [0, 0, 1, 1, 2]
    assert where.is_local(4)
    assert not where.is_local(3)


def test_there_are_as_many_rails_as_the_smallest_host_has_ranks() -> None:
    where = HostPlacement(2, MIXED)
    assert where.rails == 2
    assert where.rail() == (3, 2)
    assert not where.even
    assert HostPlacement(0, ((0, 1), (2, 3))).even


def test_a_rank_may_be_alone_on_its_host() -> None:
    assert HostPlacement(3, ((0, 1, 2), (3,))).alone
    assert not HostPlacement(0, ((0, 1, 2), (3,))).alone


def test_ranks_may_be_laid_out_host_by_host_or_not() -> None:
    assert HostPlacement(0, ((0, 1), (2, 3))).in_order
    where = HostPlacement(0, MIXED)
    assert where.order == (0, 3, 1, 2, 4)
    assert not where.in_order


def test_equal_keys_form_groups_in_the_order_of_their_first_indices() -> None:
    assert grouped(["b", "a", "b", "c", "a"]) == [[0, 2], [1, 4], [3]]
    assert grouped([]) == []
