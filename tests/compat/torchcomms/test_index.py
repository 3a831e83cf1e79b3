"""Each item of torchcomms' interface, with the test that shows it; and the names that are not here."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Final

import pytest

from asynccomm.compat import torchcomms
from tests.compat.index import missing_tests, rows_of

HERE: Final = Path(__file__).parent
OPERATIONS: Final = "collectives::test_every_operation_without_a_loop collectives::test_every_operation_awaited"
MAKING: Final = "comm::test_a_comm_without_a_loop comm::test_a_comm_in_a_coroutine"
OBJECTS: Final = "objcol::test_the_documents_examples objcol::test_lists_are_filled_by_awaiting"
WINDOWS: Final = "window::test_windows_without_a_loop window::test_windows_awaited window::test_the_documents_example"
CLOG: Final = "clog::test_signatures_and_progress clog::test_a_signature_of_each_operation"
FORWARD: Final = "functional::test_derivatives_in_forward_mode_are_refused_before_anything_is_sent"

SHOWN: Final = {
    "T1 new_comm": MAKING,
    "T2 names": MAKING,
    "T3 timeout": MAKING,
    "T4 abort_process_on_timeout_or_error": "options::test_options_have_defaults_and_can_be_set",
    "T5 high_priority_stream": MAKING,
    "T6 hints": "comm::test_defaults_of_later_operations",
    **{f"T{number} operations": OPERATIONS for number in range(7, 23)},
    "T23 finalize": MAKING,
    **{f"T{number} get_*": MAKING for number in range(24, 30)},
    "T30 split": MAKING,
    "T31 unsafe_get_backend": MAKING,
    "T32 window_allocate": WINDOWS,
    **{f"T{number} TorchCommWindow": WINDOWS for number in range(46, 52)},
    "T33 ReduceOp": OPERATIONS,
    "T34 PREMUL_SUM": OPERATIONS,
    "T35 RedOpType": "index::test_reductions_are_made_of_their_types",
    "T36 is_completed": "work::test_states_and_errors",
    "T37 wait": "work::test_states_and_errors work::test_the_documents_example",
    "T38 async_op": OPERATIONS,
    "T39 BatchSendRecv.send": "batch::test_a_batch_is_one_operation",
    "T40 BatchSendRecv.recv": "batch::test_a_batch_is_one_operation",
    "T41 issue": "batch::test_a_batch_is_one_operation",
    "T42 ops": "batch::test_a_batch_is_one_operation",
    "T43 BatchP2POptions": "options::test_options_have_defaults_and_can_be_set",
    "T44 P2POp": "batch::test_a_message_has_torchcomms_arguments",
    "T45 CommOptions": "options::test_options_have_defaults_and_can_be_set",
    "T52 init_device_mesh": "device_mesh::test_training_over_a_mesh",
    **{f"T{number} objcol": OBJECTS for number in range(53, 60)},
    "newer: hooks": "registration::test_hooks_see_each_call_once comm::test_aborting",
    "newer: hooks.NanCheckHook": "hooks::test_nan_is_refused",
    "newer: hooks.FlightRecorderHook": "hooks::test_the_recorder_has_operations_until_they_are_done",
    "newer: hooks.clog": CLOG,
    "newer: get_mem_allocator": "allocator::test_tensors_are_in_memory_that_other_ranks_read",
    "newer: tensor_register, tensor_deregister": "comm::test_tensors_are_registered_where_the_backend_is_nccl",
    "newer: get_init_handle, reconfigure": "comm::test_reconfiguring comm::test_reconfiguring_in_a_coroutine",
    "newer: set_hints, set_timeout": "comm::test_defaults_of_later_operations",
    "newer: abort, is_aborted": "comm::test_aborting",
    "newer: all_gather_v, reduce_scatter_v, gather_single, wait_blocking": OPERATIONS,
    "newer: functional": (
        "functional::test_a_compiled_function_keeps_the_operators functional::test_gradients_are_those_of_the_whole"
    ),
    "errors": "errors::test_a_wrong_value_is_both_errors " + MAKING,
    "the rule of loops": (
        "comm::test_a_comm_of_a_thread_in_a_coroutine work::test_awaiting_gives_the_output_any_number_of_times"
    ),
}

#: rows of the document's table, each with its tests
ROWS: Final = {
    "`new_comm(...)`": MAKING,
    "the same, `enable_reconfigure=True`": "comm::test_reconfiguring comm::test_reconfiguring_in_a_coroutine",
    "`timeout=`": MAKING,
    "`abort_process_on_timeout_or_error=None`": "options::test_options_have_defaults_and_can_be_set",
    "`comm.all_reduce(t, op, async_op=True)`, ...": OPERATIONS,
    "`async_op=False`": OPERATIONS,
    "`work.wait()`": "work::test_states_and_errors",
    "`work.is_completed()` of an operation that failed": "work::test_states_and_errors",
    "`all_gather`, `reduce_scatter`, `all_to_all`": OPERATIONS,
    "`comm.split(ranks, name)`": MAKING,
    "`comm.finalize()`, again": MAKING,
    "wrong roots, lists, names": OPERATIONS,
    "`batch_op_create()`, `batch.issue(async_op)`": "batch::test_a_batch_is_one_operation",
    "`objcol`": OBJECTS,
    "`objcol` examples with `src=`, `output` before `root`": "objcol::test_the_documents_examples",
    "`device_mesh.init_device_mesh(...)`": "device_mesh::test_training_over_a_mesh",
    "`register_pre_hook`, `register_post_hook`": "registration::test_hooks_see_each_call_once",
    "`register_abort_hook`, `abort()`, `is_aborted()`": "comm::test_aborting",
    "`hooks.NanCheckHook(check_inputs, check_outputs)`": "hooks::test_nan_is_refused",
    "`hooks.FlightRecorderHook(max_entries)`": "hooks::test_the_recorder_has_operations_until_they_are_done",
    "`hooks.clog(output, events, verbose)`": CLOG,
    "`functional`": SHOWN["newer: functional"],
    "gradients of `functional`, with MIN, MAX, PRODUCT": "functional::test_gradients_are_those_of_the_whole",
    "derivatives of `functional` in forward mode, or by `torch.func`": FORWARD,
    "`comm.get_mem_allocator()`": "allocator::test_tensors_are_in_memory_that_other_ranks_read",
    "`tensor_register`, `tensor_deregister`": "comm::test_tensors_are_registered_where_the_backend_is_nccl",
    "`set_timeout`, `set_hints`": "comm::test_defaults_of_later_operations",
    "`window_allocate(size, cpu_buf, signal_size)`": WINDOWS,
    "`TorchCommWindow`: `put`, `signal`, `wait_signal`": WINDOWS,
    "`get_tensor(rank, ...)` of another rank": WINDOWS,
}

#: items that are not here, and the reason
NOT_HERE: Final = {
    "newer: new_window": "the documented windows are here; windows over a caller's tensor are not",
    "newer: all_gather_p_init, get_device_transport, transport, distwrap": "of single backends; nothing here has these",
    "newer: register_backend, TorchCommBackend": "asynccomm.backends.base has the interface for backends",
}
ABSENT: Final = ["new_window", "all_gather_p_init"]  # of TorchComm's methods

SIGNATURES: Final = {
    "all_gather": ["tensor_list", "tensor", "async_op"],
    "all_gather_single": ["output", "input", "async_op"],
    "all_reduce": ["tensor", "op", "async_op"],
    "all_to_all": ["output_tensor_list", "input_tensor_list", "async_op"],
    "all_to_all_single": ["output", "input", "async_op"],
    "all_to_all_v_single": ["output", "input", "output_split_sizes", "input_split_sizes", "async_op"],
    "barrier": ["async_op"],
    "broadcast": ["tensor", "root", "async_op"],
    "gather": ["output_tensor_list", "input_tensor", "root", "async_op"],
    "recv": ["tensor", "src", "async_op"],
    "reduce": ["tensor", "root", "op", "async_op"],
    "reduce_scatter": ["output", "input_list", "op", "async_op"],
    "reduce_scatter_single": ["output", "input", "op", "async_op"],
    "scatter": ["output_tensor", "input_tensor_list", "root", "async_op"],
    "send": ["tensor", "dst", "async_op"],
}
OTHERS: Final = {
    "split": ["ranks", "name", "hints", "timeout"],
    "batch_op_create": [],
    "finalize": [],
    "get_backend": [],
    "get_device": [],
    "get_name": [],
    "get_options": [],
    "get_rank": [],
    "get_size": [],
    "unsafe_get_backend": [],
    "window_allocate": ["window_size", "cpu_buf", "signal_size"],
}
WINDOW: Final = {
    "get_size": [],
    "get_tensor": ["rank", "sizes", "dtype", "offset"],
    "put": ["tensor", "dst_rank", "target_disp", "async_op"],
    "signal": ["signal_disp", "signal_val", "dst_rank", "async_op"],
    "wait_signal": ["signal_disp", "signal_val", "cmp_op", "async_op"],
}


def test_every_item_is_shown_or_listed_with_a_reason() -> None:
    numbers = [name.split()[0] for name in [*SHOWN, *NOT_HERE] if name[0] == "T"]
    assert sorted(numbers) == sorted(f"T{number}" for number in range(1, 60))
    assert not SHOWN.keys() & NOT_HERE.keys()


def test_every_test_is_there() -> None:
    assert not missing_tests(HERE, [*SHOWN.values(), *ROWS.values()])


def test_the_rows_of_the_document_are_tested() -> None:
    assert rows_of("torchcomms") == list(ROWS)


def test_the_methods_and_their_arguments_are_torchcomms() -> None:
    assert len(SIGNATURES) + len(OTHERS) == 26
    for name, parameters in {**{k: [*v, "hints", "timeout"] for k, v in SIGNATURES.items()}, **OTHERS}.items():
        found = list(inspect.signature(getattr(torchcomms.TorchComm, name)).parameters)
        assert found == ["self", *parameters], name
    for name, parameters in WINDOW.items():
        assert list(inspect.signature(getattr(torchcomms.TorchCommWindow, name)).parameters) == ["self", *parameters]
    made = list(inspect.signature(torchcomms.new_comm).parameters)
    assert made[:4] == ["backend", "device", "name", "abort_process_on_timeout_or_error"]
    assert made[4:8] == ["timeout", "high_priority_stream", "store", "hints"]


@pytest.mark.parametrize("name", ABSENT)
def test_methods_that_are_not_here_are_listed(name: str) -> None:
    assert not hasattr(torchcomms.TorchComm, name)
    assert name in " ".join(NOT_HERE)


def test_reductions_are_made_of_their_types() -> None:
    for kind in torchcomms.RedOpType:
        if kind.name != "PREMUL_SUM":
            op = getattr(torchcomms.ReduceOp, kind.name)
            assert op.type is kind
            assert torchcomms.ReduceOp(kind).type is kind
    assert torchcomms.ReduceOp.PREMUL_SUM(0.5).type is torchcomms.RedOpType.PREMUL_SUM
