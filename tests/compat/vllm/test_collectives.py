"""Tensors within a GroupCoordinator's group, and compiled models that call them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad

from asynccomm import Comm
from asynccomm.compat.vllm import GroupCoordinator
from tests.compat.vllm.groups import group_of, without_a_loop
from tests.sampling import exhaustive


@pytest.mark.ranks([2, 3], backend=["shm", "gloo"])
async def test_results_are_new_tensors_along_any_dimension(comm: Comm) -> None:
    def program() -> None:
        group = group_of([list(range(comm.size))])
        size, me = group.world_size, group.rank_in_group
        mine = torch.full((2, 3, 4 * size), float(me))
        total = float(sum(range(size)))
        before = mine.clone()
        result = group.all_reduce(mine)
        assert result.eq(total).all()
        assert mine.equal(before)
        assert group.all_reduce(mine.transpose(0, 2)).is_contiguous()
        parts = [torch.full((2, 3, 4 * size), float(rank)) for rank in range(size)]
        for dim in (-1, 0, 1, 2):
            assert group.all_gather(mine, dim).equal(torch.cat(parts, dim))
            gathered = group.gather(mine, dst=1, dim=dim)
            assert gathered is None if me != 1 else gathered.equal(torch.cat(parts, dim))
        assert group.all_gather(mine).equal(torch.cat(parts, -1))
        assert group.reduce_scatter(mine).shape == (2, 3, 4)
        assert group.reduce_scatter(mine).eq(total).all()
        assert group.reduce_scatter(torch.ones(size, 2), 0).tolist() == [[size, size]]
        sizes = list(range(1, size + 1))
        own = torch.full((sizes[me], 2), float(me))
        together = torch.cat([torch.full((n, 2), float(rank)) for rank, n in enumerate(sizes)])
        assert group.all_gatherv(own, sizes=sizes).equal(together)
        two = group.all_gatherv([own, own + 1], sizes=sizes)
        assert [each.equal(together + add) for add, each in enumerate(two)] == [True, True]
        assert group.all_gatherv(own[:1]).shape == (size, 2)
        assert group.reduce_scatterv(torch.ones(2, sum(sizes)), sizes=sizes).eq(size).all()
        assert group.reduce_scatterv(torch.ones(2, sum(sizes)), sizes=sizes).shape == (2, sizes[me])
        assert group.reduce_scatterv(torch.ones(size, 2), 0).shape == (1, 2)
        tensor = torch.full((1,), float(me))
        assert group.broadcast(tensor, src=1) is tensor
        assert tensor.item() == 1
        with pytest.raises(ValueError, match="dim"):
            group.all_gather(mine, 3)
        with pytest.raises(ValueError, match="src must be"):
            group.broadcast(tensor, size)
        group.destroy()

    await without_a_loop(comm, program)


@pytest.mark.ranks(3, backend=["shm", "gloo"])
async def test_messages_go_to_the_next_rank_and_come_from_the_previous(comm: Comm) -> None:
    def program() -> None:
        group = group_of([[2, 1, 0]])
        me = group.rank_in_group
        if me == 0:
            assert group.send(torch.arange(6).view(2, 3)) is None
            assert group.recv(torch.Size([1]), torch.float64, src=1).item() == 7
        elif me == 1:
            got = group.recv((2, 3), torch.int64)
            assert got.equal(torch.arange(6).view(2, 3))
            group.send(torch.tensor([7.0], dtype=torch.float64), 0)
        group.destroy()

    await without_a_loop(comm, program)


@pytest.mark.ranks(2)
async def test_a_group_of_one_gives_its_input(comm: Comm) -> None:
    def program() -> None:
        group = group_of([[0], [1]])
        tensor = torch.ones(2, 2)
        for method in (group.all_reduce, group.all_gather, group.reduce_scatter, group.gather):
            assert method(tensor) is tensor
        for call in (lambda: group.send(tensor), lambda: group.recv((2,), torch.float32)):
            with pytest.raises(ValueError, match="must be another rank than this one, 0"):
                call()  # without a loop it could never end
        with pytest.raises(ValueError, match="input_ must be a tensor or a list of at least one"):
            group.all_gatherv([])
        with pytest.raises(TypeError, match=r"^input_\[0\] must be a torch\.Tensor, got 1"):
            group.all_gatherv([1])  # type: ignore[list-item]
        with pytest.raises(ValueError, match=r"dim must be in \[-2, 2\) for input_"):
            group.all_gatherv(tensor, 2)
        if comm.rank == 1 or exhaustive():  # each is alone in its group, and compiling takes a second
            fast = torch.compile(lambda t: group.all_reduce(t) + 1, backend="eager", fullgraph=True)
            assert fast(tensor).eq(2).all()
        group.destroy()

    await without_a_loop(comm, program)


@pytest.mark.filterwarnings("ignore:`torch.jit.script`:FutureWarning")  # of torch's own forward mode
@pytest.mark.ranks(2)
async def test_derivatives_in_forward_mode_are_refused(comm: Comm) -> None:
    def program() -> None:
        group, alone = group_of([[0, 1]]), group_of([[0], [1]])
        if comm.rank == 1 or exhaustive():  # nothing is sent, and the first derivative takes a second
            refuse(group, alone)
        assert group.all_reduce(torch.ones(2)).eq(2).all()
        for each in (alone, group):
            each.destroy()

    def refuse(group: GroupCoordinator, alone: GroupCoordinator) -> None:
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(torch.ones(2), torch.ones(2))
            for method in (group.all_reduce, group.all_gather, group.reduce_scatter):
                with pytest.raises(NotImplementedError, match="input_ must not be differentiated in forward mode"):
                    method(dual)
            assert alone.all_reduce(dual) is dual
        with pytest.raises(NotImplementedError, match="input_ must not be differentiated in forward mode"):
            torch.func.jvp(group.all_reduce, (torch.ones(2),), (torch.ones(2),))

    await without_a_loop(comm, program)


class ParallelMLP(nn.Module):
    """Columns of the first matrix and rows of the second on each rank."""

    def __init__(self, group: GroupCoordinator) -> None:
        super().__init__()
        torch.manual_seed(0)
        up, down = self.all = torch.randn(16, 8, requires_grad=True), torch.randn(8, 16, requires_grad=True)
        self.group = group
        self.up = nn.Parameter(up.chunk(group.world_size)[group.rank_in_group].detach().clone())
        self.down = nn.Parameter(down.chunk(group.world_size, 1)[group.rank_in_group].detach().clone())
        self.whole = lambda x: torch.relu(x @ up.t()) @ down.t()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.group.all_reduce(torch.relu(x @ self.up.t()) @ self.down.t())
        gathered = self.group.all_gather(out)
        return self.group.reduce_scatter(gathered) / self.group.world_size


def compiled(backend: str | Callable[..., Any], group: GroupCoordinator) -> None:
    model = ParallelMLP(group)
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = model.whole(x)
        assert model(x).allclose(expected, atol=1e-5)
        fast = torch.compile(model, backend=backend, fullgraph=True)
        for _ in range(2):
            assert fast(x).allclose(expected, atol=1e-5)
    assert not model.group.all_reduce(x).requires_grad
    gradients = [torch.autograd.grad(run(x).square().sum(), model.parameters()) for run in (model, fast)]
    wanted = torch.autograd.grad(model.whole(x).square().sum(), model.all)
    chunks = [whole.chunk(2, dim)[group.rank_in_group] for dim, whole in enumerate(wanted)]
    for found in gradients:  # all ranks compute the same loss, so each gets its gradient once per rank
        for one, chunk in zip(found, chunks, strict=True):
            assert one.allclose(group.world_size * chunk, atol=1e-3)


@pytest.mark.ranks(2)
async def test_a_compiled_model_keeps_the_calls_in_one_graph(comm: Comm) -> None:
    graphs: list[str] = []

    def look(graph: torch.fx.GraphModule, _: object) -> Callable[..., Any]:
        graphs.append(graph.code)
        return graph.forward  # type: ignore[no-any-return]

    def program() -> None:
        group = group_of([[0, 1]], "tp")
        compiled(look, group)
        assert len(graphs) == 2  # without gradients and with them
        for code in graphs:
            for name in ("all_reduce", "all_gather", "reduce_scatter"):
                assert f"asynccomm.{name}" in code
            assert repr(group.unique_name) in code
        group.destroy()

    await without_a_loop(comm, program)


@pytest.mark.exhaustive
@pytest.mark.ranks(2, timeout=300)
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
async def test_models_are_compiled_by_torchs_backends(comm: Comm, backend: str) -> None:
    def program() -> None:
        group = group_of([[0, 1]], "tp")
        compiled(backend, group)
        group.destroy()

    await without_a_loop(comm, program)
