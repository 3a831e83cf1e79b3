"""Which checks of the conformance suite run on which backends, and on how many ranks."""

from asynccomm.testing.conformance import CHECKS
from tests.sampling import exhaustive

# Each goes through all dtypes, reductions, layouts or forms, one after the other, and takes the same way for every one
# of them on four ranks as on three. What they have in common with the others (roots, uneven sizes, the forms) is left.
OF_EVERY_KIND = {
    "all_gather_coalesced_every_dtype",
    "all_reduce_coalesced_every_dtype_and_op",
    "all_reduce_every_dtype_and_op",
    "complex_on_some_ranks_and_real_on_others",
    "complex_outputs_of_real_inputs",
    "conjugated_tensors_in_every_form",
    "every_dtype_along_a_dim",
    "every_dtype_in_every_form",
    "every_layout_along_a_dim",
    "negated_tensors_in_every_form",
    "real_outputs_of_complex_inputs",
    "reduce_scatter_coalesced_every_dtype_and_op",
    "reduce_scatter_list_and_single",
    "reductions_of_torch_in_every_form",
    "scalars_in_every_form",
    "scopes_with_limits",
    "send_and_recv_in_a_ring",
    "strided_tensors_in_every_form",
    "tensors_of_inference_mode_in_every_form",
    "uneven_sizes_of_every_dtype",
}
assert set(CHECKS) >= OF_EVERY_KIND


def of_modules(*names: str) -> list[str]:
    """The checks in these modules of the suite."""
    return [name for name, check in CHECKS.items() if check.__module__.rpartition(".")[2] in names]


MANY_RANKS = [name for name in CHECKS if name not in OF_EVERY_KIND]

# The most expensive ones, of many lengths or tensors, for which these backends have tests of their own: of their hazard
# trackers, of the packing of gloo, and of NaN in their reductions (test_reduction.py, test_arithmetic.py).
OF_MANY_SIZES = {
    "an_input_between_two_operations_that_write_it",
    "many_small_tensors_coalesced",
    "nan_wins_in_min_and_max",
}
assert set(CHECKS) >= OF_MANY_SIZES

# Other tests of these backends, the fuzzer's among them, compare dtypes and reductions with another backend.
USUAL = [
    name
    for name in CHECKS
    if exhaustive() or (name in {*MANY_RANKS, "conjugated_tensors_in_every_form"} and name not in OF_MANY_SIZES)
]

# Those in which a third rank is another case: roots, groups, sources of messages, sizes of their own for each rank, and
# who is named. What the others check (layouts, scopes, memory of tensors) a rank does alone or with each of the others.
OF_THREE_RANKS = {
    *of_modules("coalesced", "collectives", "failures", "groups", "queues", "uneven"),
    "a_root_s_output_in_another_rank_s_input",
    "messages_do_not_disturb_collectives",
    "mixed_operations_in_flight",
    "objects_from_any_source",
    "objects_from_rank_to_rank",
    "objects_of_every_kind_to_all",
    "receives_from_any_source",
    "refused_objects_leave_the_comm_usable",
    "refused_shares_leave_the_group_usable",
    "states_from_every_root",
    "tensor_dicts_from_every_root",
    "tokens_to_their_experts_and_back",
    "two_hundred_operations_of_all_kinds_in_flight",
}
assert set(CHECKS) >= OF_THREE_RANKS

# Many operations on handles that are the same for all backends, and long lists of operations: on shm and gloo only.
_OF_TWO_BACKENDS = {
    "copies_of_handles_are_the_handles",
    "crowds_of_small_operations",
    "hundreds_of_small_operations_in_one_scope",
}
assert set(CHECKS) >= _OF_TWO_BACKENDS

# The usual ones for backends within a process.
IN_ONE_PROCESS = [name for name in USUAL if exhaustive() or name not in _OF_TWO_BACKENDS]
