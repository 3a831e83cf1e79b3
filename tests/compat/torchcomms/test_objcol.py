"""Objects: the examples of torchcomms' document, and wrong lists."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch

from asynccomm import Comm, PayloadError
from asynccomm.compat import torchcomms
from asynccomm.compat.torchcomms import TorchComm, objcol


class Odd:
    """An object that only a pickle can carry."""

    def __eq__(self, other: object) -> bool:
        return type(other) is Odd

    __hash__ = None  # type: ignore[assignment]


def examples(comm: TorchComm) -> None:
    rank = comm.get_rank()
    gather_objects = ["foo", 12, {1: 2}]
    output: list[Any] = [None for _ in gather_objects]
    assert objcol.all_gather_object(comm, output, gather_objects[rank]) is None
    assert output == ["foo", 12, {1: 2}]

    output = [None for _ in gather_objects]
    objcol.gather_object(comm, gather_objects[rank], 0, output if rank == 0 else None)
    assert output == (["foo", 12, {1: 2}] if rank == 0 else [None, None, None])

    objects: list[Any]
    if rank == 0:
        objects = ["foo", 12, {1: 2}]
        objcol.send_object_list(comm, objects, dst=1)
    elif rank == 1:
        objects = [None, None, None]
        objcol.recv_object_list(comm, objects, src=0)
        assert objects == ["foo", 12, {1: 2}]

    objects = ["foo", 12, {1: 2}] if rank == 0 else [None, None, None]
    objcol.broadcast_object_list(comm, objects, root=0)
    assert objects == ["foo", 12, {1: 2}]

    objects = ["foo", 12, {1: 2}] if rank == 0 else [None, None, None]
    output_list: list[Any] = [None]
    objcol.scatter_object_list(comm, 0, output_list, objects)
    assert output_list == [["foo", 12, {1: 2}][rank]]


def refusals(comm: TorchComm) -> None:
    rank = comm.get_rank()
    with pytest.raises(RuntimeError, match="object_list must be a list of one item for each of the 3 ranks"):
        objcol.all_gather_object(comm, [None], 1)
    with pytest.raises(RuntimeError, match="object_gather_list"):
        objcol.gather_object(comm, 1, rank)
    with pytest.raises(RuntimeError, match="must be None except on the root"):
        objcol.gather_object(comm, 1, (rank + 1) % 3, [])
    with pytest.raises(RuntimeError, match="scatter_object_output_list"):
        objcol.scatter_object_list(comm, 0, [])
    with pytest.raises(RuntimeError, match="root must be in"):
        objcol.broadcast_object_list(comm, [], 5)
    with pytest.raises(TypeError, match="Odd"):
        objcol.broadcast_object_list(comm, [Odd()], rank)


def trust(comm: TorchComm, patched: pytest.MonkeyPatch) -> None:
    rank = comm.get_rank()
    found: list[Any] = [None] * 3
    objcol.all_gather_object(comm, found, Odd(), weights_only=False)
    assert found == [Odd()] * 3
    if rank == 0:
        objcol.send_object_list(comm, [Odd()], 1)
        objcol.send_object_list(comm, [Odd()], 1)
    elif rank == 1:
        objects: list[Any] = [None]
        with pytest.raises(PayloadError):
            objcol.recv_object_list(comm, objects, 0)
        objcol.recv_object_list(comm, objects, 0, weights_only=False)
        assert objects == [Odd()]
    patched.setenv("TORCHCOMMS_SERIALIZATION", "pickle")
    found = [None] * 3
    objcol.all_gather_object(comm, found, Odd())
    assert found == [Odd()] * 3


@pytest.mark.ranks(3, backend=["shm", "gloo"])
async def test_the_documents_examples(comm: Comm, monkeypatch: pytest.MonkeyPatch) -> None:
    def program() -> None:
        main = torchcomms.new_comm(comm.backend, torch.device("cpu"), "objects")
        examples(main)
        refusals(main)
        trust(main, monkeypatch)
        main.finalize()

    await asyncio.to_thread(program)


@pytest.mark.ranks(3)
async def test_lists_are_filled_by_awaiting(comm: Comm) -> None:
    main = await torchcomms.new_comm(comm.backend, torch.device("cpu"), "objects")
    found: list[Any] = [None] * 3
    await objcol.all_gather_object(main, found, comm.rank)
    assert found == [0, 1, 2]
    output: list[Any] = [None]
    await objcol.scatter_object_list(main, 1, output, [3, 4, 5])
    assert output == [3 + comm.rank]
    if comm.rank == 0:
        await objcol.send_object_list(main, [7], 1)
    elif comm.rank == 1:
        await objcol.recv_object_list(main, output, 0)
        assert output == [7]
    await main.finalize()
