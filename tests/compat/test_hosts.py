"""The programs of the faces on two hosts, one of which has two ranks."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest

from asynccomm import Comm, new_comm
from asynccomm.backends.hierarchical.backend import HierarchicalBackend
from tests.compat.bagua import test_communication as bagua_communication
from tests.compat.torchcomms import test_collectives as torchcomms_collectives
from tests.compat.vllm import test_collectives as vllm_collectives
from tests.compat.vllm import test_experts as vllm_experts
from tests.pretended_hosts import pretend

PROGRAMS = [
    torchcomms_collectives.test_every_operation_without_a_loop,
    bagua_communication.test_every_function_without_a_loop,
    vllm_collectives.test_results_are_new_tensors_along_any_dimension,
    vllm_collectives.test_messages_go_to_the_next_rank_and_come_from_the_previous,
    vllm_experts.test_tokens_of_all_ranks_and_back,
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
