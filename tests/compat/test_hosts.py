"""The programs of the faces on two hosts, one of which has two ranks."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from typing import Any, Final

import pytest
import torch

from asynccomm import Comm, new_comm
from asynccomm.backends.hierarchical.backend import HierarchicalBackend
from asynccomm.compat import torchcomms
from tests.compat.bagua import test_communication as bagua_communication
from tests.compat.c10d import test_coalescing as c10d_coalescing
from tests.compat.c10d import test_collectives as c10d_collectives
from tests.compat.c10d import test_examples as c10d_examples
from tests.compat.c10d import test_groups as c10d_groups
from tests.compat.c10d import test_objects as c10d_objects
from tests.compat.c10d import test_p2p as c10d_p2p
from tests.compat.c10d import test_reductions as c10d_reductions
from tests.compat.c10d.worlds import default_backend, processes
from tests.compat.torchcomms import test_collectives as torchcomms_collectives
from tests.compat.torchcomms import test_functional as torchcomms_functional
from tests.compat.torchcomms import test_objcol as torchcomms_objcol
from tests.compat.torchcomms import test_window as torchcomms_window
from tests.compat.torchcomms import test_work as torchcomms_work
from tests.compat.vllm import test_broadcasters as vllm_broadcasters
from tests.compat.vllm import test_collectives as vllm_collectives
from tests.compat.vllm import test_experts as vllm_experts
from tests.pretended_hosts import pretend
from tests.sampling import exhaustive


async def documented_objects(comm: Comm) -> None:
    def program() -> None:
        main = torchcomms.new_comm(comm.backend, torch.device("cpu"), "objects")
        torchcomms_objcol.examples(main)
        main.finalize()

    await asyncio.to_thread(program)


PROGRAMS: Final = [
    torchcomms_collectives.test_every_operation_without_a_loop,
    documented_objects,
    bagua_communication.test_every_function_without_a_loop,
    vllm_collectives.test_results_are_new_tensors_along_any_dimension,
    vllm_collectives.test_messages_go_to_the_next_rank_and_come_from_the_previous,
    vllm_experts.test_tokens_of_all_ranks_and_back,
    vllm_broadcasters.test_queues_without_a_loop,
]


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.ranks(3, backend="hierarchical")
async def test_a_program_on_two_hosts(
    comm: Comm, monkeypatch: pytest.MonkeyPatch, program: Callable[[Comm], Awaitable[None]]
) -> None:
    pretend(monkeypatch, "aab")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")  # the hosts are no real ones
    async with new_comm("hierarchical", name="hosts", timeout=50) as hosts:
        backend = hosts.unsafe_get_backend()
        assert isinstance(backend, HierarchicalBackend)
        assert backend.placement.hosts == ((0, 1), (2,))
    await program(comm)


#: programs for two ranks
PAIRS: Final = [
    torchcomms_work.test_the_documents_example,
    torchcomms_window.test_the_documents_example,
    bagua_communication.test_the_documents_example,
]
#: and those that compile, which takes seconds
COMPILED: Final = [
    torchcomms_functional.test_a_compiled_function_keeps_the_operators,
    vllm_collectives.test_a_compiled_model_keeps_the_calls_in_one_graph,
]


@pytest.mark.ranks(2, backend="hierarchical")
async def test_programs_for_two_ranks_on_two_hosts(comm: Comm, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, "ab")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    for program in [*PAIRS, *(COMPILED if exhaustive() else [])]:
        await program(comm)


#: programs of torch.distributed, which take no comm, with their arguments
C10D: Final[list[tuple[Any, ...]]] = [
    (c10d_examples.test_three_ranks,),
    (c10d_examples.test_four_ranks,),
    (c10d_collectives.test_broadcast,),
    (c10d_collectives.test_complex_on_one_rank_and_its_parts_on_another, torch.complex64, 0),
    (c10d_collectives.test_uneven_all_gather,),
    (c10d_collectives.test_gather,),
    (c10d_collectives.test_scatter,),
    (c10d_collectives.test_all_to_all_single_by_rows,),
    (c10d_reductions.test_reductions, torch.distributed.ReduceOp.AVG, 3),
    (c10d_reductions.test_reduce_scatter_of_lists_also_uneven,),
    (c10d_p2p.test_global_ranks_and_ranks_of_the_group,),
    (c10d_objects.test_all_gather_object,),
    (c10d_objects.test_object_messages,),
    (c10d_coalescing.test_gathers_and_scatters_of_tensors,),
    (c10d_groups.test_ranks_are_sorted_and_others_are_outside,),
    (c10d_groups.test_subgroups_of_a_group,),
]
#: more of them, of which C10D has the like
MORE: Final[list[tuple[Any, ...]]] = [
    (c10d_examples.test_two_ranks,),
    (c10d_collectives.test_moving_of_any_dtype, torch.bool),
    (c10d_collectives.test_all_gather_coalesced,),
    (c10d_reductions.test_reduce_leaves_others_alone,),
    (c10d_reductions.test_all_reduce_coalesced,),
    (c10d_p2p.test_a_ring,),
    (c10d_objects.test_broadcast_object_list,),
    (c10d_collectives.test_moving_of_any_dtype, torch.complex64),
    (c10d_collectives.test_all_gather_concatenated_or_stacked,),
    (c10d_collectives.test_defaults_are_global_rank_0,),
    (c10d_collectives.test_all_to_all,),
    (c10d_collectives.test_split_sizes_are_given_on_all_ranks_or_none,),
    (c10d_collectives.test_single_tensors_under_newer_names,),
    (c10d_reductions.test_complex_sums,),
    (c10d_reductions.test_reduce_scatter_tensor_concatenated_or_stacked,),
    (c10d_p2p.test_a_handle_knows_the_sender,),
    (c10d_p2p.test_tags,),
    (c10d_objects.test_gather_object,),
    (c10d_objects.test_scatter_object_list,),
    (c10d_coalescing.test_all_reduces_leave_at_the_end,),
    (c10d_coalescing.test_with_a_device_everything_is_held,),
    (c10d_groups.test_find_or_create,),
    (c10d_groups.test_groups_of_the_parent_s_ranks,),
]


@pytest.mark.ranks(4, backend="hierarchical")
async def test_programs_of_torch_distributed_on_two_hosts(comm: Comm, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, "abba")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    processes.set((comm, itertools.count()))
    default_backend.set("cpu:hierarchical")
    for program, *arguments in [*C10D, *(MORE if exhaustive() else [])]:
        await program(*arguments)
        await comm.barrier()  # ranks that have no part in it wait
