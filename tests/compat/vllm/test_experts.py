"""Tokens to all ranks of a GroupCoordinator, and back."""

from __future__ import annotations

import threading

import pytest
import torch

from asynccomm import Comm
from asynccomm.compat import vllm
from asynccomm.compat.vllm import GroupCoordinator
from tests.compat.vllm.groups import group_of, without_a_loop


@pytest.mark.ranks(3, backend=["shm", "gloo", "hierarchical"])
async def test_tokens_of_all_ranks_and_back(comm: Comm) -> None:
    def program() -> None:
        group = group_of([[0, 1, 2]], "ep")
        rank = comm.rank
        hidden, logits = torch.full((rank, 2), float(rank)), torch.arange(float(rank)).view(rank, 1)
        with pytest.raises(RuntimeError, match="is the inverse of such a dispatch"):
            group.combine(hidden)
        everything, all_logits = group.dispatch(hidden, logits)
        assert everything.tolist() == [[1, 1], [2, 2], [2, 2]]
        assert all_logits.flatten().tolist() == [0, 0, 1]
        assert group.combine(everything).equal(3 * hidden)
        assert group.combine(everything * (rank == 0)).equal(hidden)
        *_, extras = group.dispatch(hidden, logits, True, [logits.int(), hidden])
        assert (extras[0].dtype, extras[1].tolist()) == (torch.int32, everything.tolist())
        for wrong in (everything[1:], torch.ones(())):
            with pytest.raises(ValueError, match="hidden_states must have one row for each of the 3 tokens") as caught:
                group.combine(wrong)
            assert str(tuple(wrong.shape)) in str(caught.value)
        with pytest.raises(TypeError, match="hidden_states must be a torch"):
            group.combine(None)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="router_logits"):
            group.dispatch(hidden, torch.ones(7, 1))
        with pytest.raises(TypeError, match="is_sequence_parallel must be True or False"):
            group.dispatch(hidden, logits, None)  # type: ignore[arg-type]
        assert group.prepare_communication_buffer_for_model(torch.nn.Linear(1, 1)) is None
        alone = group_of([[0], [1], [2]])
        assert alone.dispatch(hidden, logits) == (hidden, logits)
        assert alone.dispatch_router_logits(hidden, logits, extra_tensors=[]) == (hidden, logits, [])
        assert alone.combine(hidden) is hidden
        without = vllm.GroupCoordinator([[0, 1, 2]], 0, "gloo", use_device_communicator=False)
        assert without.combine(without.dispatch(hidden, logits)[0]) is hidden
        for each in (without, alone, group):
            each.destroy()

    await without_a_loop(comm, program)


@pytest.mark.ranks(4)
async def test_replicas_with_the_same_tokens(comm: Comm) -> None:
    def program() -> None:
        tp, dp, ep = group_of([[0, 1], [2, 3]]), group_of([[0, 2], [1, 3]]), group_of([[0, 1, 2, 3]])
        ep.data_parallel_group = dp
        replica = comm.rank // 2
        hidden = torch.full((replica + 1, 1), float(replica))  # the same on both ranks of a replica
        tokens, _ = ep.dispatch(hidden, hidden)
        assert tokens.flatten().tolist() == [0, 1, 1]
        part = tokens * (comm.rank + 1)  # of this rank's experts
        assert tp.all_reduce(ep.combine(part)).equal(10 * hidden)
        tokens, _ = ep.dispatch(hidden, hidden, is_sequence_parallel=True)
        assert tokens.flatten().tolist() == [0, 0, 1, 1, 1, 1]
        assert ep.combine(tokens, is_sequence_parallel=True).equal(4 * hidden)
        for group in (ep, dp, tp):
            group.destroy()

    await without_a_loop(comm, program)


@pytest.mark.ranks(2)
async def test_threads_do_not_mix_their_dispatches(comm: Comm) -> None:
    def program() -> None:
        group = group_of([[0, 1]])
        turns = [threading.Event() for _ in range(4)]
        failures: list[BaseException] = []

        def batch(number: int) -> None:
            try:
                turns[number].wait(20)
                hidden = torch.full((comm.rank + 1 + number, 1), float(number))
                tokens, _ = group.dispatch(hidden, hidden)
                turns[number + 1].set()
                turns[number + 2].wait(20)
                assert group.combine(tokens).equal(2 * hidden)
            except BaseException as exc:
                failures.append(exc)
            finally:
                for turn in turns:
                    turn.set()

        turns[0].set()
        threads = [threading.Thread(target=batch, args=[number]) for number in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert not failures
        group.destroy()

    await without_a_loop(comm, program)


@pytest.mark.ranks(2)
async def test_dispatching_in_a_coroutine(comm: Comm) -> None:
    await vllm.init_distributed_environment(backend=comm.backend)
    group = await GroupCoordinator([[0, 1]], 0, "gloo", True)
    hidden = torch.ones(2, 1)
    tokens, _ = await group.dispatch(hidden, hidden)
    assert (await group.combine(tokens)).equal(2 * hidden)
    await group.destroy()
    await vllm.destroy_distributed_environment()
