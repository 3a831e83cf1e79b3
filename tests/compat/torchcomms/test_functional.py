"""Operators by a TorchComm, called and compiled."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
import torch

from asynccomm import Comm
from asynccomm.compat import torchcomms
from asynccomm.compat.torchcomms import functional

NAMES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast")


@pytest.mark.ranks(2)
async def test_a_compiled_function_keeps_the_operators(comm: Comm) -> None:
    def program() -> None:
        main = torchcomms.new_comm(comm.backend, torch.device("cpu"), "functional")
        mine = torch.full((2, 2), float(comm.rank))

        def layer(x: torch.Tensor) -> torch.Tensor:
            gathered = functional.all_gather_single(main, functional.all_reduce(main, x) + x, 1)
            mixed = functional.all_to_all_single(main, functional.broadcast(main, gathered, 1))
            return functional.reduce_scatter_single(main, mixed)

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
        main.finalize()
        with pytest.raises(RuntimeError, match="finalized"):
            functional.all_reduce(main, mine)

    await asyncio.to_thread(program)
