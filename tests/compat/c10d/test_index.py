"""What torch's module has and does, item by item, and the tests that show it here.

C items are what there is, in the module's order; H items are what is hard about it. A test is named by its file, from
here or from the root, and its function.
"""

from __future__ import annotations

import ast
import inspect
from pathlib import Path
from typing import Final

import pytest
from torch.distributed import distributed_c10d as torch_c10d

import asynccomm.compat.c10d as dist
from tests.compat.index import rows_of

HERE = Path(__file__).parent
ROOT = HERE.parents[2]

SHOWN: Final = {
    "C1 option structs": "types::test_option_structs",
    "C2 re-exported types": "types::test_torch_s_own_types",
    "C3 availability": "backends::test_availability",
    "C4 constants": "types::test_constants",
    "C5 default timeouts": "types::test_timeouts",
    "C6 reduce_op": "types::test_reduce_op_warns_at_every_access",
    "C7 ReduceOp": "types::test_reductions_of_torch_are_known",
    "C8 supports_complex": "types::test_supports_complex",
    "C9 Work": "work::test_a_handle_has_the_methods_of_torch",
    "C10 Backend": "backends::test_known_names_in_any_case",
    "C11 tables of Backend": "backends::test_backends_of_torch",
    "C12 register_backend": "backends::test_registering",
    "C13 BackendConfig": "backends::test_config_of_pairs",
    "C14 is_backend_available": "backends::test_is_backend_available",
    "C15 get_default_backend_for_device": "backends::test_default_backend_for_device",
    "C16 get_backend": "ranks::test_backend_and_config",
    "C17 get_backend_config": "ranks::test_backend_and_config",
    "C18 one instance for all devices": "create::test_one_backend_for_all_devices_connects_once",
    "C19 _World": "world::test_what_is_known_of_the_groups",
    "C20 pg_config_info": "world::test_what_is_known_of_the_groups",
    "C21 WORLD": "world::test_world_is_always_current",
    "C22 names": "world::test_names",
    "C23 names in use, get_pg_count": "create::test_names_in_use",
    "C24 tags": "world::test_tags",
    "C25 _find_pg_by_ranks_and_tag": "world::test_tags",
    "C26 _find_or_create_pg_by_ranks_and_tag": "groups::test_find_or_create_in_strides",
    "C27 state by group": "on_nccl::test_what_a_group_supports_and_its_number",
    "C28 _update_default_pg": "init::test_the_rank_is_published",
    "C29 get_rank": "ranks::test_ranks_and_sizes",
    "C30 get_world_size": "ranks::test_ranks_and_sizes",
    "C31 get_group_rank": "ranks::test_ranks_and_sizes",
    "C32 get_global_rank": "ranks::test_world_takes_any_rank",
    "C33 get_process_group_ranks": "ranks::test_ranks_and_sizes",
    "C34 _canonicalize_group_rank": "ranks::test_one_rank_given_either_way",
    "C35 global ranks and ranks of the group": "collectives::test_defaults_are_global_rank_0",
    "C36 get_node_local_rank": "ranks::test_local_rank",
    "C37 is_torchelastic_launched": "ranks::test_torchelastic",
    "C38 is_initialized": "ranks::test_before_init",
    "C39 _check_not_self_rank": "validation::test_not_to_oneself",
    "C40 checks of tensors": "validation::test_a_list_of_tensors",
    "C41 one dtype": "validation::test_one_dtype",
    "C42 who is not in the group": "validation::test_there_is_no_handle_for_who_is_not_in_the_group",
    "C43 membership first": "validation::test_who_is_not_in_the_group_is_warned_first",
    "C44 __torch_function__": "collectives::test_modes_may_take_over",
    "C45 waiting of plain calls": "reductions::test_all_reduce",
    "C46 complex tensors": (
        "collectives::test_complex_on_one_rank_and_its_parts_on_another "
        "reductions::test_complex_on_one_rank_and_its_parts_on_another"
    ),
    "C47 init_process_group": "init::test_what_goes_with_a_store",
    "C48 device_id": "init::test_devices",
    "C49 without a backend": "init::test_without_a_backend",
    "C50 timeout": "init::test_default_timeouts",
    "C51 group_name, _ranks": "init::test_hashed_names",
    "C52 MPI, fake": "fake::test_collectives_do_nothing",
    "C53 rendezvous and prefix": "init::test_over_tcp",
    "C54 what init records": "init::test_what_the_default_group_is",
    "C55 excepthook": "logs::test_each_line_of_an_uncaught_exception_says_the_rank",
    "C56 TORCH_DIST_INIT_BARRIER": "init::test_a_barrier_that_fails_leaves_no_comm",
    "C57 _store_based_barrier": "rendezvous_handlers::test_ranks_of_torch_and_ours_pass_one_barrier",
    "C58 rendezvous": "rendezvous_handlers::test_missing_variables_are_named",
    "C59 all ranks make a group": (
        "groups::test_ranks_are_sorted_and_others_are_outside groups::test_a_second_world_in_a_store"
    ),
    "C60 stores": "create::test_keys_are_where_torch_has_them",
    "C61 which backend stands for a group": "backends::test_which_backend_stands_for_the_group",
    "C62 missing backends": "create::test_backends_that_are_not_available",
    "C63 options": "create::test_options_of_torch_for_nccl",
    "C64 splitting where a device is bound": "create::test_where_a_device_is_bound_groups_are_split_off",
    "C65 _process_group_color": "groups::test_a_colour_is_a_c_int",
    "C66 a backend that makes the group": "create::test_a_backend_may_make_the_group",
    "C67 ranks that disagree": "collectives::test_ranks_that_disagree_are_told",
    "C68 eager connection": "init::test_a_bound_device",
    # the second half is hooks by which torch drives its backends: here is what they are for, in their order
    "C69 what backends can": (
        "process_group::test_what_it_supports on_nccl::test_what_a_group_supports_and_its_number "
        "destroy::test_timeouts_of_what_comes_later destroy::test_more_time_for_a_while "
        "destroy::test_all_are_aborted_before_one_is_closed groups::test_groups_of_the_parent_s_ranks "
        "create::test_options_of_torch_for_nccl shrinking::test_a_group_of_some "
        "collectives::test_ranks_that_disagree_are_told"
    ),
    "C70 new_group": "groups::test_defaults",
    "C71 its ranks": "groups::test_ranks_that_are_no_group",
    "C72 its device": "init::test_a_bound_device",
    "C73 use_local_synchronization": "groups::test_only_members_call_with_local_synchronization",
    "C74 the sentinel is not registered": "world::test_nobody_is_registered_for_whom_is_not_in_a_group",
    "C75 _new_group_with_tag": "world::test_tags",
    "C76 new_subgroups": "groups::test_sizes_of_subgroups",
    "C77 new_subgroups_by_enumeration": "groups::test_subgroups_by_enumeration",
    "C78 split_group": "groups::test_groups_of_the_parent_s_ranks",
    "C79 _is_safe_to_split": "groups::test_on_an_accelerator_a_device_is_to_be_bound",
    "C80 shrink_group": "shrinking::test_what_cannot_be_left_out",
    "C81 SHRINK_ABORT, the default group": "shrinking::test_the_default_group",
    "C82 what a shrunk group inherits": "shrinking::test_a_group_of_some",
    "C83 failures of clean-up": "shrinking::test_groups_that_do_not_abort_well_are_left",
    "C84 destroy_process_group": "destroy::test_all_groups_end_the_last_first",
    "C85 _abort_process_group": (
        "destroy::test_all_are_aborted_before_one_is_closed destroy::test_variables_for_errors_of_nccl_change_nothing"
    ),
    "C86 _set_pg_timeout": "destroy::test_timeouts_of_what_comes_later",
    "C87 _add_ephemeral_timeout_for_all_pgs": "destroy::test_more_time_for_a_while",
    "C88 what a timeout does": (
        "destroy::test_time_that_is_over_ends_the_group_and_not_the_process "
        "destroy::test_variables_for_errors_of_nccl_change_nothing "
        "destroy::test_a_process_may_end_by_its_errors_if_that_is_asked_for"
    ),
    "C89 isend": "p2p::test_global_ranks_and_ranks_of_the_group",
    "C90 irecv": "p2p::test_a_handle_knows_the_sender",
    "C91 send": "validation::test_not_to_oneself",
    "C92 recv": "p2p::test_from_anybody",
    "C93 P2POp": "p2p::test_a_p2p_op",
    "C94 batch_isend_irecv": "p2p::test_a_ring",
    "C95 _CollOp": "coalescing::test_a_record",
    "C96 _coalescing_manager": "coalescing::test_all_reduces_leave_at_the_end",
    "C97 _IllegalWork": "coalescing::test_a_recorded_collective_has_no_handle",
    "C98 mixing, errors and nesting": "coalescing::test_only_one_kind_at_a_time",
    "C99 other collectives inside": "coalescing::test_what_else_is_called_goes_at_once",
    "C100 _time_estimator": "on_nccl::test_estimates",
    "C101 broadcast": "collectives::test_broadcast",
    "C102 all_reduce": "reductions::test_all_reduce",
    "C103 all_reduce_coalesced": "reductions::test_all_reduce_coalesced",
    "C104 reduce": "reductions::test_reduce_leaves_others_alone",
    "C105 all_gather": "collectives::test_uneven_all_gather",
    "C106 all_gather_into_tensor": (
        "collectives::test_all_gather_concatenated_or_stacked collectives::test_single_tensors_under_newer_names"
    ),
    "C107 all_gather_coalesced": "collectives::test_all_gather_coalesced",
    "C108 gather": "collectives::test_gather",
    "C109 scatter": "collectives::test_scatter",
    "C110 reduce_scatter": "reductions::test_reduce_scatter_of_lists_also_uneven",
    "C111 reduce_scatter_tensor": "reductions::test_reduce_scatter_tensor_concatenated_or_stacked",
    "C112 all_to_all_single": "collectives::test_all_to_all_single_by_rows",
    "C113 all_to_all": "collectives::test_all_to_all",
    "C114 barrier": "collectives::test_devices_of_a_barrier",
    "C115 monitored_barrier": "collectives::test_a_monitored_barrier_names_who_is_missing",
    "C116 devices of objects": "objects::test_devices_of_objects",
    "C117 objects as tensors": "objects::test_objects_as_tensors",
    "C118 all_gather_object": "objects::test_all_gather_object",
    "C119 gather_object": "objects::test_gather_object",
    "C120 send_object_list": "objects::test_object_messages",
    "C121 recv_object_list": "objects::test_from_anybody",
    "C122 broadcast_object_list": "objects::test_broadcast_object_list",
    "C123 scatter_object_list": "objects::test_scatter_object_list",
    "C124 logs and counters": (
        "logs::test_errors_are_logged_and_raised logs::test_errors_that_are_not_logged "
        "logs::test_errors_of_awaiting_are_logged logs::test_errors_of_futures_are_logged "
        "logs::test_errors_of_coroutines_are_logged logs::test_waits_are_counted"
    ),
    "C125 flight recorder": (
        "recorder::test_what_an_operation_leaves recorder::test_how_far_it_came "
        "recorder::test_the_last_are_kept recorder::test_no_tensor_is_kept "
        "recorder::test_a_timeout_is_dumped_on_all_ranks recorder::test_torch_s_tool_finds_who_is_missing"
    ),
    "C126 access to state": "world::test_groups_that_are_none world::test_world_is_always_current",
    "C127 private checks": "private::test_checks validation::test_lists_on_the_root_alone",
    "C128 private helpers": "coalescing::test_what_a_manager_keeps",
    "C129 private names": "private::test_names private::test_backends_behind_a_group",
    "C130 steps of shrinking": "shrinking::test_step_by_step",
    "H37 a store that is given": "init::test_torch_s_world_and_ours_on_one_store",
    "H38 errors of env://": "rendezvous_handlers::test_rank_and_size_are_given_once",
    "H39 names without the others": "world::test_hashed_names_do_not_count_other_groups",
    "H40 names by parent": "groups::test_names_differ_by_parent",
    "H41 global ranks everywhere": "p2p::test_global_ranks_and_ranks_of_the_group",
    "H42 global rank 0 is not rank 0 of the group": "collectives::test_defaults_are_global_rank_0",
    "H43 None is the default group": "validation::test_none_is_the_default_group",
    "H44 ranks of new_group": "groups::test_ranks_that_are_no_group",
    "H45 splits that leave ranks out": "groups::test_groups_of_the_parent_s_ranks",
    "H46 eager connection": "init::test_a_bound_device",
    "H47 shrinking with dead ranks": "shrinking::test_after_a_loss_in_processes",
    "H48 order of ending": "destroy::test_all_groups_end_the_last_first",
    "H49 aborting what is stuck": "destroy::test_aborting_wakes_all_that_wait",
    "H50 tags": "world::test_tags",
    "H51 several backends": "process_group::test_a_device_picks_its_backend",
    "H52 register_backend": "create::test_a_backend_of_ones_own_that_is_told_more",
    "H53 monitored_barrier": "collectives::test_a_monitored_barrier_names_who_is_missing",
    "H54 checks that allow what may differ": "collectives::test_all_to_all_single_by_rows",
    "H55 timeouts": "destroy::test_timeouts_of_what_comes_later",
    "H72 init_device_mesh": (
        "tests/interop/test_mesh.py::test_torch_runs_on_it tests/interop/test_mesh.py::test_ranks_that_do_not_fit "
        "tests/interop/test_mesh.py::test_comms_of_other_processes "
        "tests/interop/test_mesh.py::test_comms_of_several_types_of_device "
        "tests/interop/test_mesh.py::test_the_default_group"
    ),
    "H73 communicators within and between nodes": (
        "tests/comm/methods/test_groups.py::test_comms_within_nodes_and_between_them "
        "tests/comm/methods/test_groups.py::test_nodes_are_those_of_the_ranks_of_a_comm"
    ),
    "H74 streams, groups of torch, reductions by name": (
        "tests/backends/nccl/test_collective_stream.py::"
        "test_the_stream_of_the_call_is_followed_and_not_the_current_one "
        "tests/backends/nccl/test_collective_stream.py::test_wait_orders_and_ordered_suspends_until_it_can "
        "tests/interop/test_wrap.py::test_comms_over_a_group "
        "tests/interop/test_wrap.py::test_a_group_without_a_store "
        "tests/ops/test_reduce_op.py::test_torchs_members_and_instances_are_understood"
    ),
    "H75 groups of one": "reductions::test_a_group_of_one_still_applies_factors",
    "H76 ranks and lists that are none": "validation::test_roots_that_there_are_not",
    "H77 deprecated names": "reductions::test_all_reduce_coalesced",
    "H78 excepthook by lines": "logs::test_hooks_do_not_nest",
    "H79 counts, ranks and unknown names": "world::test_what_is_destroyed_is_forgotten",
}

METHODS: Final = "tests/comm/methods"
COLLECTIVES: Final = f"{METHODS}/test_collectives.py::test_results_are_the_tensors_passed_in"
DIMS: Final = f"{METHODS}/test_variable.py::test_all_gather_single_and_gather_single"
SCATTERED: Final = f"{METHODS}/test_variable.py::test_reduce_scatter_single_and_scatter_single"
MESSAGES: Final = f"{METHODS}/test_p2p.py::test_ordered_by_pair_and_tag"

#: rows of the document's table of calls, each with tests of the right side
ROWS: Final = {
    '`init_process_group("gloo")`': (
        "tests/comm/test_new_comm.py::test_names_can_be_used_again_and_comms_live_side_by_side"
    ),
    "`dist.all_reduce(t)`": COLLECTIVES,
    "`w = dist.all_reduce(t, async_op=True); w.wait()`": COLLECTIVES,
    "a Work of torch's": "tests/interop/test_wrapped_work.py::test_the_loop_turns_until_the_outputs_are_there",
    "an existing process group": "tests/interop/test_wrap.py::test_comms_over_a_group",
    "`init_device_mesh(...)`": "tests/interop/test_mesh.py::test_torch_runs_on_it",
    "`all_gather_into_tensor(out, t)`": DIMS,
    "`reduce_scatter_tensor(out, t)`": SCATTERED,
    "`gather(t, outs, dst=0)`, `scatter(t, ins, src=0)`": COLLECTIVES,
    "`isend(t, dst, tag)`, `irecv(t, src, tag)`": MESSAGES,
    "`recv(t, src=None)`, which returns the sender": f"{METHODS}/test_p2p.py::test_from_any_source",
    "`all_to_all_single(out, t, out_splits, in_splits)`": f"{METHODS}/test_variable.py::test_all_to_all_v_single",
    "the same, with `out_splits` not known yet": f"{METHODS}/test_variable.py::test_all_to_all_v_single",
    "`batch_isend_irecv([P2POp(...), ...])`": f"{METHODS}/test_p2p.py::test_a_ring",
    "`all_gather_object(objs, obj)`": f"{METHODS}/test_objects.py::test_all_gather_object",
    "`new_group(ranks)`, on all ranks": f"{METHODS}/test_groups.py::test_the_order_of_the_list_is_that_of_the_ranks",
    "`_coalescing_manager()`": "tests/comm/test_coalesce.py::test_one_batch_of_everything",
    "the same, for one list": (
        f"{METHODS}/test_lists.py::test_all_reduce {METHODS}/test_lists.py::test_broadcast "
        f"{METHODS}/test_lists.py::test_all_gather {METHODS}/test_lists.py::test_reduce_scatter"
    ),
    "`_time_estimator()`": "tests/comm/test_scopes.py::test_calls_during_the_estimate_are_sent",
    "`monitored_barrier()`, on gloo only": (
        "tests/comm/test_monitored_barrier.py::test_missing_ranks_are_named_on_all_ranks"
    ),
    "`broadcast(t, src=0)`, `reduce(t, dst=0)`": COLLECTIVES,
    "`scatter_object_list(out, objs, src=0)`": f"{METHODS}/test_objects.py::test_scatter_object_list",
    "`new_subgroups(size)`": f"{METHODS}/test_groups.py::test_subgroups_are_consecutive_ranks",
    "`dist.ReduceOp.SUM`": "tests/ops/test_reduce_op.py::test_torchs_members_and_instances_are_understood",
    "ranks are global": "p2p::test_global_ranks_and_ranks_of_the_group",
    "a timeout kills the process, or raises much later": (
        "tests/comm/test_session.py::test_deadline_names_the_ranks_that_did_not_come"
    ),
}

# what is shown above is otherwise than in torch, on purpose
DIFFERENT: Final = {
    "C73": "who is in no group gets NON_GROUP_MEMBER, also with use_local_synchronization: None is the default group",
    "C77": "the same",
    "C78": "the same for who is in no split",
    "C88": "on all backends, whoever waits is told, and no process ends unless CommOptions ask for that",
}

# what is shown above, but for this, and why
PARTLY: Final = {
    "C46": "by PREMUL_SUM, complex tensors are reduced with complex ones alone: factors may be complex, too",
    "C67": "the wrapper is the group itself; TORCH_DISTRIBUTED_DEBUG changes nothing: ranks are always compared; on "
    "shm a rank that need not wait for the others may be done before they find that they differ",
    "C112": "all ranks give split sizes, or none: who gives none cannot know of the others, and what is even is a "
    "collective of its own, which backends do in another way, and whose sizes are compared",
    "C129": "`_create_process_group_wrapper` gives the group itself: ranks are always compared",
    "C130": "where torch's steps pass on the backend of one device, these pass on the comms of all devices",
    "H74": "a number is no reduction: what it means differs between systems",
}


def test_every_item_is_here() -> None:
    items = [item.split()[0] for item in SHOWN]
    expected = [*(f"C{n}" for n in range(1, 131)), *(f"H{n}" for n in [*range(37, 56), *range(72, 80)])]
    assert sorted(items) == sorted(expected)


PRIVATE: Final = {  # private names of torch's that programs import, beside those that other tests call
    "C3": ["_GLOO_AVAILABLE", "_MPI_AVAILABLE", "_NCCL_AVAILABLE", "_UCC_AVAILABLE", "_XCCL_AVAILABLE"],
    "C126": ["_World", "_WorldMeta", "_export_c_types"],
    "C129": ["_create_process_group_wrapper", "_get_split_source", "_resolve_process_group"],
    "C130": ["_ShrinkGroupInfo", "_GroupMetadata", *[name for name in dir(dist) if "shr" in name and name[0] == "_"]],
}


@pytest.mark.parametrize("item", PRIVATE)
def test_private_names(item: str) -> None:
    """Torch's arguments, of functions that this torch has."""
    for name in PRIVATE[item]:
        ours, theirs = getattr(dist, name), getattr(torch_c10d, name, None)
        if inspect.isfunction(ours) and inspect.isfunction(theirs):
            both = list(inspect.signature(theirs).parameters)
            found = list(inspect.signature(ours).parameters)
            if name == "_get_split_source":
                assert found[: len(both)] == both, name  # torch before 2.15 has one less
            else:
                assert found == both or name == "_create_shrunk_process_group", name


def test_what_is_partly_there_is_shown() -> None:
    assert {*PARTLY, *DIFFERENT} <= {item.split()[0] for item in SHOWN}


def test_every_test_is_there() -> None:
    known: dict[Path, set[str]] = {}
    for name in " ".join([*SHOWN.values(), *ROWS.values()]).split():
        file, function = name.split("::")
        path = ROOT / file if "/" in file else HERE / f"test_{file}.py"
        if path not in known:
            functions = (ast.FunctionDef, ast.AsyncFunctionDef)
            known[path] = {node.name for node in ast.parse(path.read_text()).body if isinstance(node, functions)}
        assert function in known[path], name


def test_the_rows_of_the_document_are_tested() -> None:
    assert rows_of("torch.distributed") == list(ROWS)


def test_every_name_is_exported() -> None:
    assert len(dist.__all__) == len(set(dist.__all__)) == 83
    for name in dist.__all__:
        assert hasattr(dist, name)
    newer = {
        *("shrink_group", "split_group", "set_timeout", "get_backend_impl", "record_comm"),
        *("all_gather_single", "gather_into_tensor", "gather_single", "reduce_scatter_single"),
    }  # than some that can be installed
    assert set(dist.__all__) - newer <= set(torch_c10d.__all__) | {"is_xccl_available"}


FUNCTIONS: Final = [
    name for name in dist.__all__ if name != "reduce_op" and inspect.isfunction(getattr(dist, name))
]  # looking at reduce_op warns


NEWER: Final = {"weights_only", "timeout", "sort_ranks", "backend", "enable_reconfigure"}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_arguments_are_torch_s(name: str) -> None:
    """In its order, and with its defaults; torch may have more at the end by now, or an older one less."""
    theirs = getattr(torch_c10d, name, None)
    if theirs is None:
        pytest.skip(f"this torch has no {name}")
    ours = list(inspect.signature(getattr(dist, name)).parameters.values())
    others = list(inspect.signature(theirs).parameters.values())
    both = min(len(ours), len(others))
    assert [parameter.name for parameter in ours[:both]] == [parameter.name for parameter in others[:both]]
    assert {parameter.name for parameter in ours[both:]} <= NEWER
    for mine, other in zip(ours, others, strict=False):
        assert mine.default == other.default, f"{mine.name} of {name}"
