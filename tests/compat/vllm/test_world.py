"""The environment: connected once, over a launcher's store or torch's group."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch
from torch import distributed as dist

from asynccomm import Comm
from asynccomm.compat import vllm
from tests.compat.vllm.groups import group_of, without_a_loop
from tests.interop.world import world


@pytest.mark.ranks(2)
async def test_it_is_connected_once(comm: Comm) -> None:
    def program() -> None:
        with pytest.raises(RuntimeError, match="connected already"):
            vllm.init_distributed_environment()

    await without_a_loop(comm, program)
    with pytest.raises(RuntimeError, match="call init_distributed_environment"):
        group_of([[0, 1]])
    await vllm.destroy_distributed_environment()


@pytest.mark.ranks(2)
async def test_it_meets_over_torchs_group(comm: Comm) -> None:
    def program() -> None:
        with world("gloo"):
            vllm.init_distributed_environment(backend="auto")
            group = group_of([[0, 1]])
            assert group.rank == dist.get_rank()
            assert group.all_reduce(torch.ones(1)).item() == 2
            group.destroy()
            vllm.destroy_distributed_environment()

    await asyncio.to_thread(program)


def test_a_process_may_be_given_its_place(tmp_path: Path) -> None:
    vllm.init_distributed_environment(1, 0, f"file://{tmp_path}/store", 0, "shm")
    group = group_of([[0]])
    group.barrier()
    group.destroy()
    vllm.destroy_distributed_environment()
