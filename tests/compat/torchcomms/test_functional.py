"""Operators by a TorchComm, called, compiled, and with their gradients."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any, Final

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

from asynccomm import Comm
from asynccomm.compat import torchcomms
from asynccomm.compat.torchcomms import ReduceOp, TorchComm, functional
from tests.sampling import exhaustive

WRONG: Final[list[tuple[Callable[[TorchComm, Tensor], Any], type[Exception], str]]] = [
    (lambda comm, x: functional.all_gather_single(comm, x, "x"), TypeError, "dim must be an integer, got 'x'"),  # type: ignore[arg-type]
    (lambda comm, x: functional.all_gather_single(comm, x, 2), RuntimeError, r"dim must be in \[-2, 2\) .*, got 2"),
    (lambda comm, x: functional.reduce_scatter_single(comm, x, dim=-3), ValueError, "dim must be in .*, got -3"),
    (lambda comm, x: functional.broadcast(comm, x, None), TypeError, "root must be an integer, got None"),  # type: ignore[arg-type]
    (lambda comm, x: functional.reduce(comm, x, -1), RuntimeError, r"root must be in \[0, 2\), got -1"),
    (
        lambda comm, x: functional.all_to_all_v_single(comm, x, ["a", 1], [1, 1]),  # type: ignore[list-item]
        TypeError,
        "output_split_sizes must be integers",
    ),
    (
        lambda comm, x: functional.all_to_all_v_single(comm, x, [1, 1], [-1, 1]),
        RuntimeError,
        "input_split_sizes must not be",
    ),
    (
        lambda comm, x: functional.all_to_all_single(comm, torch.cat([x, x[:1]])),
        RuntimeError,
        r"input must have a dim 0 that 2 divides, got shape \(3, 2\)",
    ),
    (
        lambda comm, x: functional.reduce_scatter(comm, [x, x[:1]]),
        RuntimeError,
        "input_list must have tensors of one shape",
    ),
    (
        lambda comm, x: functional.reduce_scatter(comm, [x, x.int()]),
        ValueError,
        "input_list must have tensors of one .*int32",
    ),
    (
        lambda comm, x: functional.all_reduce(comm, x.to_sparse()),
        TypeError,
        "tensor must be a dense tensor, got one of",
    ),
]
NAMES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast")


@pytest.mark.ranks(2)
async def test_a_compiled_function_keeps_the_operators(comm: Comm) -> None:
    def program() -> None:
        main = torchcomms.new_comm(comm.backend, torch.device("cpu"), "functional")
        mine = torch.full((2, 2), float(comm.rank))

        def layer(x: Tensor) -> Tensor:
            gathered = functional.all_gather_single(main, functional.all_reduce(main, x) + x, 1)
            mixed = functional.all_to_all_single(main, functional.broadcast(main, gathered, 1))
            return functional.reduce_scatter_single(main, mixed, ReduceOp.MAX) * 2

        expected = layer(mine)
        assert expected.tolist() == [[2, 2, 4, 4]]
        assert functional.all_to_all_single(main, mine).tolist() == [[0, 0], [1, 1]]
        assert functional.broadcast(main, mine, 1).eq(1).all()
        assert mine.eq(comm.rank).all()
        codes: list[str] = []

        def look(graph: torch.fx.GraphModule, _: object) -> Callable[..., Any]:
            codes.append(graph.code)
            return graph.forward  # type: ignore[no-any-return]

        assert torch.compile(layer, backend=look, fullgraph=True)(mine).equal(expected)
        (code,) = codes
        assert [name in code for name in NAMES] == [True] * 5
        hooked: list[str] = []
        main.register_pre_hook(lambda name, _, given: hooked.append(name))
        assert functional.all_reduce(main, mine, ReduceOp.MAX).eq(1).all()
        assert functional.reduce(main, mine, 1).eq(float(comm.rank)).all()  # zeros, or the sum
        assert hooked == ["all_reduce", "reduce"]
        assert mine.eq(comm.rank).all()
        for wrong in (lambda: functional.reduce(main, mine, 2), lambda: functional.reduce_scatter(main, [mine])):
            with pytest.raises(RuntimeError, match=r"root|input_list must have 2 tensors, got 1"):
                wrong()
        row = torch.ones(3, requires_grad=True)  # of which one is not sent
        functional.all_to_all_v_single(main, row, [1, 1], [1, 1]).sum().backward()
        assert row.grad is not None
        assert row.grad.tolist() == [1, 1, 0]
        one = torch.tensor(float(comm.rank))
        assert torch.compile(lambda x: functional.all_gather_single(main, x), backend="eager")(one).tolist() == [0, 1]
        for call, error, text in WRONG:
            with pytest.raises(error, match=text):
                call(main, mine)
        with pytest.raises(ValueError, match="must be an integer"):
            functional.all_reduce(main, torch.ones(1, dtype=torch.int32), ReduceOp.PREMUL_SUM(0.5))
        main.finalize()
        with pytest.raises(RuntimeError, match="finalized"):
            functional.all_reduce(main, mine)

    await asyncio.to_thread(program)


SIZE: Final = 3
FACTORS: Final = torch.tensor([0.5, 2.0, 3.0], dtype=torch.float64)
SPLITS: Final = [[1, 0, 2], [2, 2, 2], [0, 3, 3]]  # rows from each rank to each
ROWS: Final = [3, 6, 6]

Here = Callable[[TorchComm, Tensor], Tensor]  # the result on one rank
Everywhere = Callable[[list[Tensor]], list[Tensor]]  # the results on all ranks, of all inputs


def summed(xs: list[Tensor]) -> Tensor:
    return torch.stack(xs).sum(0)


def chunk(xs: list[Tensor], rank: int) -> list[Tensor]:
    return [x.chunk(SIZE)[rank] for x in xs]


def sent(xs: list[Tensor], to: int) -> Tensor:
    return torch.cat([x[: sum(row)].split(row)[to] for x, row in zip(xs, SPLITS, strict=True)])


def received(rank: int) -> list[int]:
    return [row[rank] for row in SPLITS]


CASES: Final[dict[str, tuple[Here, Everywhere]]] = {
    "all_reduce": (lambda c, x: functional.all_reduce(c, x), lambda xs: [summed(xs)] * SIZE),
    "average": (lambda c, x: functional.all_reduce(c, x, ReduceOp.AVG), lambda xs: [summed(xs) / SIZE] * SIZE),
    "with a factor": (
        lambda c, x: functional.all_reduce(c, x, ReduceOp.PREMUL_SUM(FACTORS[c.get_rank()])),
        lambda xs: [summed([x * f for x, f in zip(xs, FACTORS, strict=True)])] * SIZE,
    ),
    "reduce": (
        lambda c, x: functional.reduce(c, x, 1, ReduceOp.AVG),
        lambda xs: [summed(xs) / SIZE if rank == 1 else torch.zeros_like(xs[0]) for rank in range(SIZE)],
    ),
    "broadcast": (lambda c, x: functional.broadcast(c, x, 2), lambda xs: [xs[2]] * SIZE),
    "all_gather": (lambda c, x: torch.cat(functional.all_gather(c, x)), lambda xs: [torch.cat(xs)] * SIZE),
    "all_gather_single": (
        lambda c, x: functional.all_gather_single(c, x.t(), 1),
        lambda xs: [torch.cat([x.t() for x in xs], 1)] * SIZE,
    ),
    "reduce_scatter": (
        lambda c, x: functional.reduce_scatter(c, x.chunk(SIZE), ReduceOp.AVG),
        lambda xs: [summed(chunk(xs, rank)) / SIZE for rank in range(SIZE)],
    ),
    "reduce_scatter_single": (
        lambda c, x: functional.reduce_scatter_single(c, x.t(), dim=1),
        lambda xs: [summed(chunk(xs, rank)).t() for rank in range(SIZE)],
    ),
    "all_to_all_single": (
        lambda c, x: functional.all_to_all_single(c, x),
        lambda xs: [torch.cat(chunk(xs, rank)) for rank in range(SIZE)],
    ),
    "all_to_all_v_single": (
        lambda c, x: functional.all_to_all_v_single(
            c, x[: ROWS[c.get_rank()]], received(c.get_rank()), SPLITS[c.get_rank()]
        ),
        lambda xs: [sent(xs, rank) for rank in range(SIZE)],
    ),
}


COMPILED: Final = {"with a factor", "reduce", "reduce_scatter_single", "all_to_all_v_single"}


def compiles(rank: int) -> bool:
    """Compiling and first derivatives take seconds, so usually one rank alone does it."""
    return exhaustive() or rank == 1


@pytest.mark.ranks(SIZE)
async def test_gradients_are_those_of_the_whole(comm: Comm) -> None:
    """As if one process computed the results of all ranks, and the sum of all losses."""

    def program() -> None:
        main = torchcomms.new_comm(comm.backend, torch.device("cpu"), "gradients")
        rank, random = main.get_rank(), torch.Generator().manual_seed(0)
        for name, (here, everywhere) in CASES.items():
            inputs = [torch.randn(6, 2, generator=random, dtype=torch.float64).requires_grad_() for _ in range(SIZE)]
            outputs = everywhere(inputs)
            weights = [torch.randn(out.shape, generator=random, dtype=torch.float64) for out in outputs]
            loss = torch.stack([(out * weight).sum() for out, weight in zip(outputs, weights, strict=True)]).sum()
            (expected,) = torch.autograd.grad(loss, inputs[rank], materialize_grads=True)
            mine = inputs[rank].detach().clone().requires_grad_()
            functions = [here, here] if name in COMPILED else [here]
            if name in COMPILED and compiles(rank):
                functions[1] = torch.compile(here, backend="aot_eager", fullgraph=True)
            for function in functions:
                found = function(main, mine)
                assert found.allclose(outputs[rank]), name
                (gradient,) = torch.autograd.grad((found * weights[rank]).sum(), mine)
                assert gradient.allclose(expected), name
        factor = torch.tensor(2.0, requires_grad=True)
        functional.all_reduce(main, torch.ones(2), ReduceOp.PREMUL_SUM(factor)).sum().backward()
        assert factor.grad is not None
        assert factor.grad.item() == 2 * SIZE
        main.finalize()

    await asyncio.to_thread(program)


@pytest.mark.filterwarnings("ignore:`torch.jit.script`:FutureWarning")  # of torch's own forward mode
@pytest.mark.ranks(SIZE)
async def test_derivatives_in_forward_mode_are_refused_before_anything_is_sent(comm: Comm) -> None:
    def program() -> None:
        main = torchcomms.new_comm(comm.backend, torch.device("cpu"), "tangents")
        x, tangent = torch.ones(6, 2), torch.full((6, 2), 3.0)
        text = "(tensor|input|each item of input_list) must not be differentiated in forward mode"
        for name, (here, _) in CASES.items():
            if not compiles(main.get_rank()):
                break  # nothing is sent, so no other rank has to call it
            with pytest.raises(NotImplementedError, match=text):
                torch.func.jvp(partial(here, main), (x,), (tangent,))
            with forward_ad.dual_level(), pytest.raises(NotImplementedError, match=text):
                here(main, forward_ad.make_dual(x, tangent))
            if name in COMPILED:
                fast = torch.compile(
                    lambda x, here=here: torch.func.jvp(partial(here, main), (x,), (x,)), backend="eager"
                )
                with pytest.raises(NotImplementedError, match=text):
                    fast(x)
                with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="must not be differentiated"):
                    torch.compile(here, backend="aot_eager")(main, forward_ad.make_dual(x, tangent))
        with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="the factor of op must not be"):
            factor = forward_ad.make_dual(torch.tensor(2.0), torch.tensor(1.0))
            functional.all_reduce(main, x, ReduceOp.PREMUL_SUM(factor))
        assert functional.all_reduce(main, x).eq(SIZE).all()  # nothing was sent before
        main.finalize()

    await asyncio.to_thread(program)
