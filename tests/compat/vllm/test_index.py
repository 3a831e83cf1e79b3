"""Each item of vLLM's GroupCoordinator, with the test that shows it."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any, Final

import pytest

from asynccomm.compat.vllm import GroupCoordinator
from tests.compat.index import missing_tests, rows_of

HERE: Final = Path(__file__).parent
RANKS: Final = "coordinator::test_ranks_are_global_and_in_the_order_of_the_lists"
TENSORS: Final = "collectives::test_results_are_new_tensors_along_any_dimension"
OBJECTS: Final = "coordinator::test_objects"
DICTS: Final = "coordinator::test_dicts_of_tensors_to_the_next_stage_in_shares"
MESSAGES: Final = "collectives::test_messages_go_to_the_next_rank_and_come_from_the_previous"
COMPILED: Final = "collectives::test_a_compiled_model_keeps_the_calls_in_one_graph"
EXPERTS: Final = "experts::test_tokens_of_all_ranks_and_back experts::test_replicas_with_the_same_tokens"
QUEUES: Final = "broadcasters::test_queues_without_a_loop broadcasters::test_queues_in_a_coroutine"
COROUTINE: Final = "coordinator::test_a_group_in_a_coroutine"

SHOWN: Final = {
    "V1 the constructor": f"{RANKS} coordinator::test_lists_that_are_no_groups {COROUTINE}",
    **{f"V{number} ranks": RANKS for number in range(2, 8)},
    "V8 all_reduce": f"{TENSORS} {COMPILED} collectives::test_a_group_of_one_gives_its_input",
    "V9 _all_reduce_out_place": COMPILED,
    "V10 all_gather": TENSORS,
    "V11 _all_gather_out_place": COMPILED,
    "V12 all_gatherv": TENSORS,
    "V13 reduce_scatter": TENSORS,
    "V14 _reduce_scatter_out_place": COMPILED,
    "V15 reduce_scatterv": TENSORS,
    "V16 gather": TENSORS,
    "V17 broadcast": TENSORS,
    "V18 broadcast_object": f"{OBJECTS} coordinator::test_objects_of_any_class_if_they_are_trusted",
    "V19 broadcast_object_list": OBJECTS,
    "V20 send_object": OBJECTS,
    "V21 recv_object": OBJECTS,
    "V22 broadcast_tensor_dict": DICTS,
    "V23 send_tensor_dict": DICTS,
    "V24 recv_tensor_dict": f"{DICTS} coordinator::test_a_receiver_that_refuses_fails_alone",
    "V25 barrier": OBJECTS,
    "V26 send": MESSAGES,
    "V27 recv": MESSAGES,
    "V28 dispatch": EXPERTS,
    "V29 combine": EXPERTS,
    "V31 create_mq_broadcaster": f"{QUEUES} broadcasters::test_a_queue_of_another_process",
    "V32 create_single_reader_mq_broadcasters": QUEUES,
    "V33 prepare_communication_buffer_for_model": EXPERTS,
    "V30 graph_capture": "coordinator::test_a_forgotten_group_is_not_found",
    "V34 destroy": RANKS,
    "V35 errors are exceptions": "coordinator::test_lists_that_are_no_groups",
}

ROWS: Final = {
    "`init_distributed_environment(...)`": "world::test_it_is_connected_once world::test_it_meets_over_torchs_group",
    "`GroupCoordinator(group_ranks, local_rank, backend, ...)`": RANKS,
    "`use_message_queue_broadcaster=True`": "broadcasters::test_objects_of_rank_0_take_the_queue",
    "assertions": "coordinator::test_lists_that_are_no_groups",
    "`first_rank` ... `prev_rank`, `ranks`": RANKS,
    "`all_reduce(t)`": TENSORS,
    "`all_gather`, `reduce_scatter`, `gather`, any `dim`": TENSORS,
    "`all_gatherv`, `reduce_scatterv`": TENSORS,
    "the operator `vllm::all_reduce`": COMPILED,
    "`send(t)`, `recv(size, dtype)`": MESSAGES,
    "`broadcast_object`, `send_object`, ...": f"{OBJECTS} coordinator::test_objects_of_any_class_if_they_are_trusted",
    "`broadcast_object_list(..., group)`": OBJECTS,
    "`send_tensor_dict`, `recv_tensor_dict`": DICTS,
    "`recv_tensor_dict(all_gather_tensors=...)`": DICTS,
    "a dict that one receiver refuses": "coordinator::test_a_receiver_that_refuses_fails_alone",
    "`graph_capture()`": "coordinator::test_a_forgotten_group_is_not_found",
    "`destroy()`": RANKS,
    "`dispatch(hidden_states, router_logits)`, `combine`": EXPERTS,
    "the same, `is_sequence_parallel=False`": EXPERTS,
    "`combine` with other calls between": "experts::test_threads_do_not_mix_their_dispatches",
    "`prepare_communication_buffer_for_model(model)`": EXPERTS,
    "`create_mq_broadcaster(...)`": QUEUES,
    "`create_single_reader_mq_broadcasters(...)`": QUEUES,
    "`MessageQueue`: `enqueue`, `dequeue`, `wait_until_ready`, ...": (
        f"{QUEUES} message_queue::test_ends_time_limits_and_roles"
    ),
}

SIGNATURES: Final[dict[str, dict[str, Any]]] = {  # parameters with their defaults; ... for none
    "all_reduce": {"input_": ...},
    "_all_reduce_out_place": {"input_": ...},
    "all_gather": {"input_": ..., "dim": -1},
    "_all_gather_out_place": {"input_": ..., "dim": ...},
    "all_gatherv": {"input_": ..., "dim": 0, "sizes": None},
    "reduce_scatter": {"input_": ..., "dim": -1},
    "_reduce_scatter_out_place": {"input_": ..., "dim": ...},
    "reduce_scatterv": {"input_": ..., "dim": -1, "sizes": None},
    "gather": {"input_": ..., "dst": 0, "dim": -1},
    "broadcast": {"input_": ..., "src": 0},
    "broadcast_object": {"obj": None, "src": 0},
    "broadcast_object_list": {"obj_list": ..., "src": 0, "group": None},
    "send_object": {"obj": ..., "dst": ...},
    "recv_object": {"src": ...},
    "broadcast_tensor_dict": {"tensor_dict": None, "src": 0, "group": None, "metadata_group": None},
    "send_tensor_dict": {"tensor_dict": ..., "dst": None, "all_gather_group": None, "all_gather_tensors": None},
    "recv_tensor_dict": {"src": None, "all_gather_group": None, "all_gather_tensors": None},
    "barrier": {},
    "send": {"tensor": ..., "dst": None},
    "recv": {"size": ..., "dtype": ..., "src": None},
    "dispatch": {
        "hidden_states": ...,
        "router_logits": ...,
        "is_sequence_parallel": False,
        "extra_tensors": None,
    },
    "combine": {"hidden_states": ..., "is_sequence_parallel": False},
    "create_mq_broadcaster": {"writer_rank": 0, "external_writer_handle": None, "blocking": True},
    "create_single_reader_mq_broadcasters": {"reader_rank_in_group": 0, "blocking": False},
    "prepare_communication_buffer_for_model": {"model": ...},
    "graph_capture": {"graph_capture_context": None},
    "destroy": {},
    "__init__": {
        "group_ranks": ...,
        "local_rank": ...,
        "torch_distributed_backend": ...,
        "use_device_communicator": ...,
        "use_message_queue_broadcaster": False,
        "group_name": None,
    },
}


def test_every_item_is_shown() -> None:
    numbers = [name.split()[0] for name in SHOWN]
    assert sorted(numbers) == sorted(f"V{number}" for number in range(1, 36))


def test_every_test_is_there() -> None:
    assert not missing_tests(HERE, [*SHOWN.values(), *ROWS.values()])


def test_the_rows_of_the_document_are_tested() -> None:
    assert rows_of("vLLM") == list(ROWS)


@pytest.mark.parametrize("name", SIGNATURES)
def test_arguments_are_vllms(name: str) -> None:
    parameters = list(inspect.signature(getattr(GroupCoordinator, name)).parameters.values())[1:]
    found = {each.name: ... if each.default is inspect.Parameter.empty else each.default for each in parameters}
    assert found == SIGNATURES[name]
    assert list(found) == list(SIGNATURES[name])
