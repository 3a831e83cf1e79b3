"""The division of parameters into buckets."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from asynccomm.gradients import planning
from asynccomm.gradients.planning import FIRST_BYTES, GradientLayout, complete_order, plan_buckets
from tests.sampling import examples

MIB = 1 << 20


def floats(nbytes: int, dtype: torch.dtype = torch.float32) -> GradientLayout:
    return GradientLayout((nbytes // dtype.itemsize,), (1,), dtype)


def test_the_first_bucket_is_small_and_the_others_are_full() -> None:
    layouts = [floats(MIB // 2)] * 20
    plan = plan_buckets(layouts, range(20), 4 * MIB)
    assert [len(numbers) for numbers in plan] == [2, 8, 8, 2]


def test_a_large_parameter_goes_alone() -> None:
    layouts = [floats(64), floats(9 * MIB), floats(64)]
    assert plan_buckets(layouts, [0, 1, 2], 4 * MIB) == [[0], [1], [2]]


def test_buckets_of_several_dtypes_are_in_the_order_in_which_they_are_complete() -> None:
    layouts = [floats(64), floats(64, torch.float64), floats(64), floats(64, torch.float64), floats(64)]
    assert plan_buckets(layouts, [0, 1, 2, 3, 4], MIB) == [[1, 3], [0, 2, 4]]


@examples(100)
@given(
    sizes=st.lists(
        st.tuples(st.integers(0, 3 * MIB // 4), st.sampled_from([torch.float32, torch.bfloat16])), min_size=1
    ),
    limit=st.integers(1, 2 * MIB),
    data=st.data(),
)
def test_every_parameter_has_one_place(sizes: list[tuple[int, torch.dtype]], limit: int, data: st.DataObject) -> None:
    layouts = [floats(nbytes, dtype) for nbytes, dtype in sizes]
    order = data.draw(st.permutations(range(len(layouts))))
    plan = plan_buckets(layouts, order, limit)
    assert sorted(number for numbers in plan for number in numbers) == sorted(order)
    for numbers in plan:
        assert len({layouts[number].dtype for number in numbers}) == 1
        assert len(numbers) == 1 or sum(layouts[number].nbytes for number in numbers) <= limit
        assert numbers == sorted(numbers, key=order.index)
    assert [numbers[-1] for numbers in plan] == sorted((numbers[-1] for numbers in plan), key=order.index)
    if len(plan[0]) > 1:
        assert sum(layouts[number].nbytes for number in plan[0]) <= max(limit, FIRST_BYTES)


def test_parameters_without_gradient_come_last() -> None:
    assert complete_order([3, 1], 5) == [3, 1, 4, 2, 0]
    assert complete_order([], 3) == [2, 1, 0]


def test_gradients_have_the_strides_that_autograd_expects() -> None:
    weight = torch.empty(4, 3, 2, 2).to(memory_format=torch.channels_last)
    assert GradientLayout.of(weight).strides == weight.stride()
    assert GradientLayout.of(torch.empty(6, 4)[:, ::2]).strides == (2, 1)
    assert GradientLayout.of(torch.empty(3, 1, 2)).strides == (2, 2, 1)
    assert GradientLayout.of(torch.empty(())).room * 4 == planning.ALIGNMENT
    assert GradientLayout.of(torch.empty(0, 3)).nbytes == 0
    assert GradientLayout.of(torch.empty(9, dtype=torch.bfloat16)).nbytes == 32
