"""Each item of Bagua's interface, with the test that shows it; and the names that are not here."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any, Final

import pytest

from asynccomm.compat import bagua
from tests.compat.index import missing_tests, rows_of

HERE: Final = Path(__file__).parent
FUNCTIONS: Final = "communication::test_every_function_without_a_loop communication::test_every_function_awaited"
GROUPS: Final = "groups::test_communicators_are_made_once_and_kept groups::test_groups_in_a_coroutine"

SHOWN: Final = {
    "B1 ReduceOp": "reduction::test_numbers_are_baguas_and_mean_the_same_names",
    "B2 init_process_group": f"{GROUPS} groups::test_a_store_may_be_given",
    "B3 is_initialized": GROUPS,
    "B4 new_group": GROUPS,
    "B5 from_torch_group": "groups::test_a_group_of_torch",
    **{f"B{number} BaguaProcessGroup": GROUPS for number in range(6, 10)},
    "B10 a communicator without this process": GROUPS,
    **{f"B{number} functions": FUNCTIONS for number in range(11, 30)},
    "B30 streams": GROUPS,
}
ROWS: Final = {
    "`init_process_group(store)`": SHOWN["B2 init_process_group"],
    "`new_group(ranks, stream)`": GROUPS,
    "`get_global_communicator()`, `get_intra_node_communicator()`": GROUPS,
    "`get_inter_node_communicator()`": GROUPS,
    "`from_torch_group(group)`": "groups::test_a_group_of_torch",
    "`allreduce(send, recv, op, comm)`, ...": FUNCTIONS,
    "`ReduceOp.BOR`, `op=7`": SHOWN["B1 ReduceOp"],
    "`allreduce_inplace(t)`, ...": FUNCTIONS,
    "on a communicator without this process": GROUPS,
    "`broadcast_object(obj)`": "communication::test_objects_of_any_class_if_they_are_trusted",
    "`stream=`": GROUPS,
    "the process's end": GROUPS,
    "`with_bagua(...)`, algorithms": "index::test_bagua_beyond_communication_is_not_here",
}
SIGNATURES: Final[dict[str, dict[str, Any]]] = {  # parameters with their defaults; ... for none
    "allgather": {"send_tensor": ..., "recv_tensor": ..., "comm": None},
    "allgather_inplace": {"tensor": ..., "comm": None},
    "allreduce": {"send_tensor": ..., "recv_tensor": ..., "op": 0, "comm": None},
    "allreduce_inplace": {"tensor": ..., "op": 0, "comm": None},
    "alltoall": {"send_tensor": ..., "recv_tensor": ..., "comm": None},
    "alltoall_inplace": {"tensor": ..., "comm": None},
    "barrier": {"comm": None},
    "broadcast": {"tensor": ..., "src": 0, "comm": None},
    "broadcast_object": {"obj": ..., "src": 0, "comm": None},
    "from_torch_group": {"group": ..., "stream": None},
    "gather": {"send_tensor": ..., "recv_tensor": ..., "dst": ..., "comm": None},
    "gather_inplace": {"tensor": ..., "count": ..., "dst": ..., "comm": None},
    "is_initialized": {},
    "new_group": {"ranks": None, "stream": None},
    "recv": {"tensor": ..., "src": ..., "comm": None},
    "reduce": {"send_tensor": ..., "recv_tensor": ..., "dst": ..., "op": 0, "comm": None},
    "reduce_inplace": {"tensor": ..., "dst": ..., "op": 0, "comm": None},
    "reduce_scatter": {"send_tensor": ..., "recv_tensor": ..., "op": 0, "comm": None},
    "reduce_scatter_inplace": {"tensor": ..., "op": 0, "comm": None},
    "scatter": {"send_tensor": ..., "recv_tensor": ..., "src": ..., "comm": None},
    "scatter_inplace": {"tensor": ..., "count": ..., "src": ..., "comm": None},
    "send": {"tensor": ..., "dst": ..., "comm": None},
    "BaguaProcessGroup": {"ranks": ..., "stream": ..., "group_name": ...},
}


def test_every_item_is_shown() -> None:
    assert sorted(name.split()[0] for name in SHOWN) == sorted(f"B{number}" for number in range(1, 31))


def test_every_test_is_there() -> None:
    assert not missing_tests(HERE, [*SHOWN.values(), *ROWS.values()])


def test_the_rows_of_the_document_are_tested() -> None:
    assert rows_of("Bagua") == list(ROWS)


@pytest.mark.parametrize("name", SIGNATURES)
def test_arguments_are_baguas(name: str) -> None:
    parameters = inspect.signature(getattr(bagua, name)).parameters.values()
    found = {each.name: ... if each.default is inspect.Parameter.empty else each.default for each in parameters}
    assert list(found.items()) == list(SIGNATURES[name].items())


def test_the_first_argument_of_init_is_the_store() -> None:
    first, *others = inspect.signature(bagua.init_process_group).parameters.values()
    assert (first.name, first.default) == ("store", None)
    assert {each.kind for each in others} == {inspect.Parameter.KEYWORD_ONLY}


def test_bagua_beyond_communication_is_not_here() -> None:
    assert not hasattr(bagua, "with_bagua")
    assert not hasattr(bagua, "algorithms")
