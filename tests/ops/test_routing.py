"""Which token goes to which rank, and the order of the rows there."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from asynccomm.ops.routing import Arrangement, ExpertPlacement, Route, Routing
from asynccomm.ops.validation import CommInfo
from tests.cases import cases

CPU = torch.device("cpu")


def group(rank: int = 1, size: int = 3) -> CommInfo:
    return CommInfo("c", rank, size, CPU)


@cases(
    "count, mine", [(1, [[0], [], []]), (3, [[0], [1], [2]]), (5, [[0, 1], [2, 3], [4]]), (6, [[0, 1], [2, 3], [4, 5]])]
)
def test_experts_are_placed_in_blocks(count: int, mine: list[list[int]]) -> None:
    found = [ExpertPlacement.of(group(rank), count, None, CPU) for rank in range(3)]
    assert [list(each.experts) for each in found] == mine
    assert len({each.checksum for each in found}) == 1


def test_a_placement_names_the_rank_of_each_expert() -> None:
    placement = ExpertPlacement.of(group(), 4, [1, 0, 1, 1], CPU)
    assert placement.experts == (0, 2, 3)
    assert placement.ranks.tolist() == [1, 0, 1, 1, 3]
    assert placement.numbers.tolist() == [0, -1, 1, 2, -1]
    assert placement.checksum != ExpertPlacement.of(group(), 4, None, CPU).checksum


def test_a_token_goes_once_to_each_rank_of_its_experts() -> None:
    ids = torch.tensor([[0, 1], [4, 0], [-1, -1], [2, -1], [3, 3]])
    route = Route.of(group(), Routing(ids, 5), 5)
    assert route.sends == [2, 2, 1]
    assert route.tokens.tolist() == [0, 1, 3, 4, 1]


def test_received_tokens_are_sorted_by_expert() -> None:
    placement = ExpertPlacement.of(group(), 5, None, CPU)  # of experts 2 and 3
    arranged = Arrangement.of(placement, torch.tensor([[3, 2], [0, 3], [2, -1]], dtype=torch.uint8).to(torch.int8))
    assert arranged.counts == [2, 2]
    assert arranged.rows.tolist() == [0, 2, 0, 1]
    assert arranged.slots.tolist() == [1, 0, 0, 1]


IDS = torch.tensor([[0, 1], [2, 3]])


@cases(
    "routing, error, text",
    [
        (IDS, TypeError, r"routing must be an asynccomm.Routing or None, got tensor"),
        (Routing([1], 4), TypeError, r"routing.experts must be a torch.Tensor, got \[1\]"),
        (Routing(IDS.float(), 4), TypeError, r"routing.experts must be integers, got torch.float32"),
        (Routing(IDS[0], 4), ValueError, r"routing.experts must have shape \(2, k\), .* got \(2,\)"),
        (Routing(IDS[:1], 4), ValueError, r"routing.experts must have shape \(2, k\), .* got \(1, 2\)"),
        (Routing(IDS, 3), ValueError, r"routing.experts\[1, 1\] must be in \[0, 3\), or -1 for no expert, got 3"),
        (Routing(IDS - 2, 4), ValueError, r"routing.experts\[0, 0\] must be in \[0, 4\), .* got -2"),
        (Routing(IDS, 2.0), TypeError, r"num_experts must be an integer, got 2.0"),
        (Routing(IDS, True), TypeError, r"num_experts must be an integer, got True"),
        (Routing(IDS, 0), ValueError, r"num_experts must be at least 1, got 0"),
        (Routing(IDS, 4, placement=[0]), ValueError, r"placement must have a rank for each of the 4 experts, got 1"),
        (Routing(IDS, 4, placement=[0, 1, 2, 3]), ValueError, r"placement\[3\] must be a rank in \[0, 3\), got 3"),
        (Routing(IDS, 4, placement=[0, 1, -1, 0]), ValueError, r"placement must not be negative, got \[0, 1, -1, 0\]"),
        (Routing(IDS, 4, placement=[0, 1, "x", 0]), TypeError, r"placement must be integers, got"),
        (Routing(IDS, 4, placement=7), TypeError, r"placement must be a list or tuple of integers, got 7"),
        (
            Routing(IDS, 4, IDS),
            TypeError,
            r"routing.weights must be floating-point, .* got torch.int64",
        ),
        (Routing(IDS, 4, torch.ones(2)), ValueError, r"routing.weights must have the shape of .* got \(2,\)"),
        (Routing(IDS, 4, "w"), TypeError, r"routing.weights must be a torch.Tensor, got 'w'"),
    ],
)
def test_errors_name_argument_and_value(routing: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        Route.of(group(), routing, 2)
