"""TorchComm: how one is made, asked, split, reconfigured and finalized, with and without a loop."""

from __future__ import annotations

import asyncio
import copy
import socket
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import Tensor
from torch import distributed as dist

from asynccomm import Comm, MemoryStore, WouldBlockError, new_comm
from asynccomm.backends import registry
from asynccomm.backends.loopback import LoopbackBackend
from asynccomm.compat import torchcomms
from asynccomm.compat.torchcomms import ReduceOp, TorchComm

CPU = torch.device("cpu")
LIMIT = timedelta(seconds=40)


def identity(backend: str) -> None:
    comm = torchcomms.new_comm(backend, CPU, name="main", timeout=LIMIT, hints={})
    assert isinstance(comm, TorchComm)
    other = 1 - comm.get_rank()
    assert (comm.get_size(), comm.get_name(), comm.get_backend()) == (2, "main", backend)
    assert comm.get_device() == CPU
    assert comm.unsafe_get_backend() is comm._comm.unsafe_get_backend()
    options = comm.get_options()
    assert (options.timeout, options.abort_process_on_timeout_or_error, options.hints) == (LIMIT, False, {})
    assert copy.deepcopy(comm) is comm
    with pytest.raises(RuntimeError, match="in use"):
        torchcomms.new_comm(backend, CPU, name="main")
    wrong: Any = "control"
    with pytest.raises(TypeError, match="hints must be a mapping of strings to strings, got 'control'"):
        torchcomms.new_comm(backend, CPU, name="other", hints=wrong)
    with pytest.raises(RuntimeError, match="must include this rank"):
        comm.split([other], "other")
    assert comm.split([], "none") is None
    with comm_of(comm.split([1, 0], "pair", timeout=timedelta(seconds=30))) as pair:
        assert (pair.get_name(), pair.get_rank(), pair.get_options().timeout.seconds) == ("pair", other, 30)
        pair.barrier(False)
    comm.finalize()
    with pytest.raises(RuntimeError, match="finalized"):
        comm.finalize()
    with pytest.raises(RuntimeError, match="finalized"):
        comm.barrier(False)
    again = torchcomms.new_comm(backend, CPU, "main")
    again.finalize()


class comm_of:
    """A context that finalizes."""

    def __init__(self, comm: TorchComm) -> None:
        self._comm = comm

    def __enter__(self) -> TorchComm:
        return self._comm

    def __exit__(self, *_: object) -> None:
        self._comm.finalize()


@pytest.mark.ranks(2, backend=["shm", "gloo"])
async def test_a_comm_without_a_loop(comm: Comm) -> None:
    await asyncio.to_thread(identity, comm.backend)


@pytest.mark.ranks(2, backend=["shm", "gloo"])
async def test_a_comm_in_a_coroutine(comm: Comm) -> None:
    main = await torchcomms.new_comm(comm.backend, CPU, name="awaited", timeout=LIMIT)
    tensor = torch.ones(2)
    work = main.all_reduce(tensor, ReduceOp.SUM, async_op=False)
    if not work.is_completed():
        with pytest.raises(WouldBlockError):
            work.wait()
    await work
    assert tensor.tolist() == [2, 2]
    with pytest.raises(RuntimeError, match="in use"):
        await torchcomms.new_comm(comm.backend, CPU, name="awaited")
    with pytest.raises(RuntimeError, match="must include this rank"):
        await main.split([1 - comm.rank], "other")
    pair = await main.split([0, 1], "pair")
    assert await main.split([], "none") is None
    await pair.barrier(True)
    await pair.finalize()
    await main.finalize()


@pytest.mark.ranks(2)
async def test_a_comm_of_a_thread_in_a_coroutine(comm: Comm) -> None:
    main = await asyncio.to_thread(torchcomms.new_comm, comm.backend, CPU, "thread")
    tensor = torch.ones(2)
    await main.all_reduce(tensor, ReduceOp.SUM, True)
    assert tensor.tolist() == [2, 2]
    pair = await main.split([1, 0], "pair")
    assert (await pair.broadcast(tensor, 0, True)) is tensor
    await pair.finalize()
    await main.finalize()


def reconfigured(backend: str, store: Any, comm: Comm) -> None:
    main = torchcomms.new_comm(backend, CPU, "elastic", timeout=LIMIT, enable_reconfigure=True)
    with pytest.raises(RuntimeError, match="call reconfigure"):
        main.get_rank()
    handles = comm_handles(comm, main.get_init_handle())
    work = main.reconfigure("step 0", handles)
    assert work.is_completed()
    assert main.get_rank() == comm.rank
    main.reconfigure("step 1", handles[::-1])
    assert main.get_rank() == 2 - comm.rank
    main.reconfigure("step 2", set(handles))
    assert main.get_size() == 3
    for error, text, arguments in wrong_reconfigurations(handles, main):
        with pytest.raises(error, match=text):
            main.reconfigure(*arguments)
    main.barrier(False)  # the ranks are still there
    if comm.rank > 0:
        main.reconfigure("fewer", handles[1:], timeout=LIMIT)
        total = torch.ones(1)
        main.all_reduce(total, ReduceOp.SUM, False)
        assert (total.item(), main.get_size()) == (2, 2)
    main.finalize()


def wrong_reconfigurations(handles: list[str], main: TorchComm) -> list[tuple[type[Exception], str, tuple[Any, ...]]]:
    mine = main.get_init_handle()
    return [
        (RuntimeError, "init_handles must be different", ("wrong", [handle for handle in handles if handle != mine])),
        (TypeError, "init_handles must be a list or a set of handles, got 5", ("wrong", 5)),
        (RuntimeError, "uuid must be a str that UTF-8 can encode", ("\ud800", handles)),
        (RuntimeError, "timeout must be positive", ("wrong", handles, timedelta(seconds=-1))),
        (TypeError, "hints must be a mapping", ("wrong", handles, LIMIT, "control")),
        (RuntimeError, "hint 'control' must be 'on' or 'off'", ("wrong", handles, LIMIT, {"control": "no"})),
    ]


def comm_handles(comm: Comm, mine: str) -> list[str]:
    return comm.all_gather_object(mine, expect=str).wait()


@pytest.mark.ranks(3, backend=["shm", "gloo"])
async def test_reconfiguring(comm: Comm) -> None:
    await asyncio.to_thread(reconfigured, comm.backend, None, comm)


@pytest.mark.ranks(2)
async def test_reconfiguring_in_a_coroutine(comm: Comm) -> None:
    main = await torchcomms.new_comm(comm.backend, CPU, "elastic", enable_reconfigure=True)
    handles = await comm.all_gather_object(main.get_init_handle(), expect=str)
    for step in range(2):
        work = await main.reconfigure(f"step {step}", handles)
        assert work.is_completed()
    for error, text, arguments in wrong_reconfigurations(handles, main):
        with pytest.raises(error, match=text):
            main.reconfigure(*arguments)
    await main.barrier(True)  # the ranks are still there
    await main.finalize()


@pytest.mark.ranks(3)
async def test_reconfiguring_at_the_store_of_one_process(comm: Comm, monkeypatch: pytest.MonkeyPatch) -> None:
    """The launcher's rank 0 hosts the store: a new rank 0 could not listen at a port that another comm keeps in use."""
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = await comm.broadcast_object(unused.getsockname()[1], 0)
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(port))
    main = await torchcomms.new_comm(comm.backend, CPU, "elastic", timeout=LIMIT, enable_reconfigure=True)
    handles = await comm.all_gather_object(main.get_init_handle(), expect=str)
    async with new_comm(comm.backend, name="beside"):
        for step, members in enumerate([handles, handles[::-1], handles[1:] + handles[:1]]):
            await main.reconfigure(f"step {step}", members)
            assert main.get_rank() == members.index(main.get_init_handle())
    if comm.rank > 0:  # rank 0 goes on hosting, as long as its comm is open
        await main.reconfigure("fewer", handles[:0:-1])
        assert (main.get_rank(), main.get_size()) == (2 - comm.rank, 2)
    await comm.barrier()
    await main.finalize()


@pytest.mark.ranks(2)
async def test_reconfiguring_at_an_address_by_processes_of_one_launchers_rank(
    comm: Comm, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = await comm.broadcast_object(unused.getsockname()[1], 0)
    monkeypatch.setenv("RANK", "0")
    store = f"tcp://127.0.0.1:{port}"
    main = await torchcomms.new_comm(comm.backend, CPU, "one", store=store, timeout=LIMIT, enable_reconfigure=True)
    await main.reconfigure("step", await comm.all_gather_object(main.get_init_handle(), expect=str))
    assert main.get_rank() == comm.rank
    await main.finalize()


def aborted(backend: str) -> None:
    main = torchcomms.new_comm(backend, CPU, "aborted", timeout=LIMIT)
    called: list[int] = []
    main.register_abort_hook(lambda: called.append(1))
    handle = main.register_abort_hook(lambda: called.append(2))
    handle.remove()
    handle.remove()
    assert main.is_abort_supported()
    assert not main.is_aborted()
    main.barrier(False)
    if main.get_rank() == 0:
        main.abort()
        assert called == [1]
    else:
        with pytest.raises(RuntimeError, match="aborted by rank 0"):
            main.recv(torch.ones(1), 0, False)
    assert main.is_aborted()
    with pytest.raises(RuntimeError, match="abort"):
        main.barrier(False)
    main.finalize()


@pytest.mark.ranks(2)
async def test_aborting(comm: Comm) -> None:
    await asyncio.to_thread(aborted, comm.backend)


def test_defaults_of_later_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    main = torchcomms.new_comm("shm", "cpu", "defaults", store=dist.HashStore())
    main.set_timeout(timedelta(seconds=7))
    assert main.get_options().timeout == timedelta(seconds=7)
    assert main.all_reduce(torch.ones(1), ReduceOp.SUM, True)._work.timeout == 7
    with pytest.raises(RuntimeError, match="timeout must be positive"):
        main.set_timeout(timedelta(0))
    given: list[Any] = []
    main.register_pre_hook(lambda _, __, arguments: given.append(arguments.hints))
    main.set_hints({"nothing": "1"})
    main.barrier(False)
    main.barrier(False, hints={})
    assert given == [{"nothing": "1"}, {}]
    main.finalize()


class Registering(LoopbackBackend):
    """As NCCL: it registers tensors."""

    name = "registering"
    registered: list[tuple[int, int]] = []

    async def register(self, tensor: Tensor) -> None:
        if (tensor.data_ptr(), tensor.nbytes) in self.registered:
            raise ValueError("tensor must not be registered yet")
        self.registered.append((tensor.data_ptr(), tensor.nbytes))

    async def deregister(self, tensor: Tensor) -> None:
        self.registered.remove((tensor.data_ptr(), tensor.nbytes))


async def test_tensors_are_registered_where_the_backend_is_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry.BUILTIN, "registering", (__name__, "Registering"))
    for name, value in {"RANK": "0", "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    tensor = torch.ones(3)
    comm = await torchcomms.new_comm("registering", CPU, "registering", store=MemoryStore())
    await comm.tensor_register(tensor)
    assert Registering.registered == [(tensor.data_ptr(), 12)]
    with pytest.raises(RuntimeError, match="must not be registered yet"):
        await comm.tensor_register(tensor)
    await comm.tensor_deregister(tensor)
    assert not Registering.registered
    await comm.finalize()
    comm = await torchcomms.new_comm("loopback", CPU, "loopback", store=MemoryStore())
    with pytest.raises(NotImplementedError, match=r"'loopback' registers no tensors: comm\.empty\(\)"):
        await comm.tensor_register(tensor)
    with pytest.raises(RuntimeError, match="tensor must be registered"):
        await comm.tensor_deregister(tensor)
    await comm.finalize()


async def test_a_window_on_a_gpu_has_no_memory_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    comm = await torchcomms.new_comm("loopback", CPU, "loopback", store=MemoryStore())
    await comm.window_allocate(8, cpu_buf=True)
    monkeypatch.setattr(Comm, "device", property(lambda self: torch.device("cuda", 0)))
    with pytest.raises(
        RuntimeError, match="cpu_buf must be False: windows of backend 'loopback' are in the GPU's memory"
    ):
        comm.window_allocate(8, cpu_buf=True)
    monkeypatch.undo()
    await comm.finalize()
