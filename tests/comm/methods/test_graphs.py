"""Capturing CUDA graphs, as far as that can be shown without a GPU; tests/gpu has the rest."""

import pytest

from asynccomm.testing import loopback_world


async def test_there_are_no_graphs_on_the_cpu() -> None:
    async with loopback_world(1) as (comm,):
        with pytest.raises(RuntimeError, match="needs a GPU, but comm 'test' is on cpu"), comm.graph_capture():
            pass
