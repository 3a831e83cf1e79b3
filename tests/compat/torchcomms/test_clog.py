"""The log of operations in torchcomms' format."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest
import torch

from asynccomm import Comm
from asynccomm.compat import torchcomms
from asynccomm.compat.torchcomms import ReduceOp, functional
from asynccomm.compat.torchcomms.hooks import clog
from tests.waiting import until


def lines_of(path: Path) -> list[str]:
    """Without the times, which differ between runs."""
    return [re.sub(r"[|][+]\d+[.]\d{3}$", "", line) for line in path.read_text().splitlines()]


@pytest.mark.ranks(2)
async def test_signatures_and_progress(comm: Comm, tmp_path: Path) -> None:
    def program() -> None:
        main = torchcomms.new_comm(comm.backend, torch.device("cpu"), "main")
        rank, path = main.get_rank(), tmp_path / f"log{main.get_rank()}"
        log = clog(output=str(path), events=["ALL"])
        log.register_with_comm(main)
        with pytest.raises(RuntimeError, match="'main' is registered already"):
            log.register_with_comm(main)
        tensor = torch.ones(4)
        work = main.all_reduce(tensor, ReduceOp.SUM, True)
        work.wait()
        work.wait()
        asyncio.run(until(lambda: "C1|E" in lines_of(path)))
        head, *lines = lines_of(path)
        assert re.fullmatch(r"V[|]1[|]base_timestamp=\d+[.]\d{3}", head)
        new_comm = f"new_comm|comm=main|rank={rank}|world_size=2"
        signature = "C1|sig|all_reduce|in_count=4|out_count=4|dtype=f32|red_op=sum|async_op=t|comm=main"
        assert lines[:5] == [new_comm, new_comm, signature, "C1|Q|work_id=1", "C1|S"]
        assert sorted(lines[5:]) == ["C1|E", "C1|W"]
        main.all_reduce(tensor, ReduceOp.SUM, True).wait()
        assert lines_of(path).count(signature) == 1
        assert "C1|Q|work_id=2" in lines_of(path)
        child = main.split([1, 0], "child")
        child.barrier(False)
        asyncio.run(until(lambda: "C2|E" in lines_of(path)))
        assert {"split|parent=main|child=child|ranks=1,0", "C2|sig|barrier|async_op=f|comm=child"} <= {*lines_of(path)}
        assert "C2|W" not in lines_of(path)  # the call itself waits
        log.flush()
        child.finalize()
        main.finalize()

    await asyncio.to_thread(program)


@pytest.mark.ranks(2)
async def test_a_signature_of_each_operation(comm: Comm, tmp_path: Path) -> None:
    def program() -> None:
        main = torchcomms.new_comm(comm.backend, torch.device("cpu"), "each")
        rank, path = main.get_rank(), tmp_path / f"log{main.get_rank()}"
        clog(path, ["NONE"]).register_with_comm(main)
        one, two = torch.ones(1, dtype=torch.int64), torch.ones(2, dtype=torch.bfloat16)
        half = torch.ones(1, dtype=torch.bfloat16)
        main.reduce(half, 1, ReduceOp.PRODUCT, False)
        main.broadcast(one, 0, False)
        main.all_gather([one, one.clone()], one, False)
        main.all_gather_single(two, half, False)
        main.reduce_scatter(half, [two[:1], two[1:]], ReduceOp.PREMUL_SUM(2.0), False)
        main.reduce_scatter_single(half, two, ReduceOp.AVG, False)
        main.all_to_all([half, half.clone()], [two[:1], two[1:]], False)
        main.all_to_all_single(torch.empty_like(two), two, False)
        main.all_to_all_v_single(torch.empty_like(two), two, [1, 1], [1, 1], False)
        main.scatter(half, [two[:1], two[1:]], 0, False)
        main.gather([half, half.clone()], half, 0, False)
        if rank == 0:
            main.send(one, 1, False)
        else:
            main.recv(one, 0, False)
        batch = main.batch_op_create()
        batch.send(one, 1 - rank)
        batch.recv(one.clone(), 1 - rank)
        batch.issue(False)
        functional.all_gather_single(main, two)
        window = main.window_allocate(8)
        window.put(one, 1 - rank, 0, False)
        window.close()
        signatures = [line.split("|sig|")[1] for line in lines_of(path) if "|sig|" in line]
        root = rank == 0
        assert [line.removesuffix("|async_op=f|comm=each") for line in signatures] == [
            "reduce|in_count=1|out_count=1|dtype=bf16|red_op=prod|root=1",
            "broadcast|in_count=1|out_count=1|dtype=i64|root=0",
            "all_gather|in_count=1|out_counts=1,1|dtype=i64",
            "all_gather_single|in_count=1|out_count=2|dtype=bf16",
            "reduce_scatter|in_counts=1,1|out_count=1|dtype=bf16|red_op=premul_sum",
            "reduce_scatter_single|in_count=2|out_count=1|dtype=bf16|red_op=avg",
            "all_to_all|in_counts=1,1|out_counts=1,1|dtype=bf16",
            "all_to_all_single|in_count=2|out_count=2|dtype=bf16",
            "all_to_all_v_single|in_splits=1,1|out_splits=1,1|dtype=bf16",
            f"scatter|{'in_counts=1,1' if root else 'in_count=0'}|out_count=1|dtype=bf16|root=0",
            f"gather|in_count=1|{'out_counts=1,1' if root else 'out_count=0'}|dtype=bf16|root=0",
            "send|in_count=1|out_count=0|dtype=i64|peer=1" if root else "recv|in_count=0|out_count=1|dtype=i64|peer=0",
            "batch_op_issue|num_ops=2",
            "all_gather_single|in_count=2|out_count=0|dtype=bf16",
            "put",
        ]
        assert not [line for line in lines_of(path) if re.match(r"C\d+[|][SWE]", line)]
        with_buffers = clog(tmp_path / f"buffers{rank}", ["Q"], ["buffers"])
        with_buffers.register_with_comm(main)
        main.broadcast(one, 0, False)
        assert f"|buf={one.data_ptr():#x}|comm=each" in (tmp_path / f"buffers{rank}").read_text()
        main.finalize()

    await asyncio.to_thread(program)


def test_arguments_are_checked(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"events must be a list of ALL, .*, got \['X'\]"):
        clog(tmp_path / "log", ["X"])
    with pytest.raises(ValueError, match="verbose must be a list of buffers, got 'buffers'"):
        clog(tmp_path / "log", [], "buffers")
    with pytest.raises(OSError, match="nowhere"):
        clog(tmp_path / "nowhere" / "log", [])
