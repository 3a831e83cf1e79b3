"""The backend as torch's programs meet it: groups, ends, what else torch looks at."""

from __future__ import annotations

import asyncio
import inspect
import os
import subprocess
import sys
import tomllib
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch import distributed as dist
from torch._C import _distributed_c10d as c10d
from torch.distributed import _functional_collectives as functional
from torch.profiler import profile

from asynccomm import AbortedError, ClosedError, Comm, RendezvousError
from asynccomm.interop.torch_backend import TorchGroup, group_over, register
from asynccomm.interop.torch_version import PYTHON_BACKENDS
from asynccomm.interop.torch_work import TorchWork
from tests.interop.world import world
from tests.sampling import some

ROOT = Path(__file__).parent.parent.parent

reduce_scatter_single = getattr(functional, "reduce_scatter_single", None) or functional.reduce_scatter_tensor


def total(group: Any, value: float = 1.0) -> float:
    tensor = torch.full((2,), value)
    dist.all_reduce(tensor, group=group)
    return tensor[0].item()


@pytest.mark.ranks(2)
async def test_what_torch_knows_of_a_group() -> None:
    with world() as group:
        assert isinstance(group, TorchGroup)
        assert dist.get_backend() == "asynccomm"
        assert dist.is_backend_available("asynccomm")
        assert (group.name(), group.group_name) == ("asynccomm", "0")
        assert {device.type for device in group._device_types} == {"cpu", "cuda"}
        assert (group.rank(), group.size()) == (dist.get_rank(), dist.get_world_size())
        group.get_group_store().set(f"here/{group.rank()}", "1")
        assert group._get_backend(torch.device("cpu")).supports_splitting
        register()  # again
    assert not dist.is_initialized()


@pytest.mark.ranks(4)
async def test_groups_of_some_ranks() -> None:
    with world():
        rank = dist.get_rank()
        evens = dist.new_group([0, 2])
        if rank % 2 == 0:
            assert total(evens, rank) == 2
        everybody = dist.new_group(timeout=timedelta(seconds=20))
        assert total(everybody) == 4
        mine, every = dist.new_subgroups(2)
        assert len(every) == 2
        assert total(mine, rank) == (1 if rank < 2 else 5)
        dist.destroy_process_group(mine)
        pairs, _ = dist.new_subgroups_by_enumeration([[0, 3], [1, 2]])
        assert total(pairs, rank) == 3
        assert total(None) == 4
        if rank % 2:  # the last, for torch names groups by how many there are
            assert total(dist.new_group([1, 3], use_local_synchronization=True), rank) == 4


SPLITS_CPU = "bound_device_id" not in inspect.getsource(dist.split_group).split("parent_pg not in")[0]


@pytest.mark.skipif(not SPLITS_CPU, reason="older versions of torch split only groups that are bound to a GPU")
@pytest.mark.ranks(4)
async def test_split_group() -> None:
    with world():
        rank = dist.get_rank()
        for _ in range(2):
            half = dist.split_group(split_ranks=[[0, 1], [2, 3]])
            assert isinstance(half, TorchGroup)
            assert total(half, rank) == (1 if rank < 2 else 5)
        assert half.group_desc == "default_pg:split:1"
        nested = dist.split_group(half, [[1, 0]], group_desc="nested")
        assert (nested.rank(), nested.group_desc) == (1 - half.rank(), "nested")
        assert total(nested, rank) == (1 if rank < 2 else 5)
        outside = dist.split_group(split_ranks=[[1, 2]])
        assert (outside == dist.GroupMember.NON_GROUP_MEMBER) == (rank in (0, 3))
        assert dist.split_group(split_ranks=[[0, 1, 2, 3]], backend="asynccomm").size() == 4
        with pytest.raises(ValueError, match="nccl"):
            dist.split_group(split_ranks=[[0, 1, 2, 3]], backend="nccl")
        some = dist.new_group([0, 1, 3], sort_ranks=False)
        if rank != 2:  # the last, for torch names groups by how many this rank has made
            assert total(dist.split_group(some, [[0, 2], [1]]), rank) == (1 if rank == 1 else 3)


@pytest.mark.ranks(2)
async def test_names_and_ranks_of_splits() -> None:
    """As torch's own groups have them; what is wrong is an error on all ranks, and at once."""
    with world() as group:
        names = [group.split_group([0, 1], group_name=name) for name in (None, "", "named")]
        assert [(each.group_name, each.group_desc) for each in names] == [
            ("0:split:[0, 1]", "default_pg:split:0"),
            ("", "default_pg:split:1"),
            ("named", "default_pg:split:2"),
        ]
        options = c10d.Backend.Options("asynccomm")
        options._timeout = timedelta(seconds=7)
        limited = group.split_group([1, 0], opts=options, group_name="limited")
        assert (limited.rank(), limited.comms.timeout) == (1 - group.rank(), timedelta(seconds=7))
        again = names[0].split_group([0, 1])
        assert again.group_name == "0:split:[0, 1]:split:[0, 1]"
        for each in [*names, limited, again]:
            tensor = torch.ones(1)
            each.allreduce([tensor]).wait()
            assert tensor.item() == 2
            each.shutdown()
        for ranks, match in (([], "cannot be empty"), ([0, 0], "duplicates"), ([0, 7], "must be ranks")):
            with pytest.raises(RuntimeError, match=match):
                group.split_group(ranks)


@pytest.mark.skipif("sort_ranks" not in inspect.signature(dist.new_group).parameters, reason="groups are sorted")
@pytest.mark.ranks(2)
async def test_a_new_group_is_split_off_the_default_group() -> None:
    """The ranks know each other already: they share the control channel and no other rendezvous is needed."""
    with world() as group:
        comm = group.comms.any()
        for ranks in ([0, 1], [1, 0]):
            part = dist.new_group(ranks, backend="asynccomm", sort_ranks=False)
            assert part.comms.any()._session.identity.job is comm._session.identity.job
            assert part.rank() == ranks.index(group.rank())
            tensor = torch.ones(1)
            dist.all_reduce(tensor, group=part)
            assert tensor.item() == 2
            dist.destroy_process_group(part)


@pytest.mark.ranks(2)
async def test_a_new_group_where_the_default_group_is_broken() -> None:
    with world() as group:
        comm = group.comms.any()
        dist.barrier()  # an abort would fail a rank that is still connecting
        if group.rank() == 0:
            comm.abort("enough")
        part = dist.new_group(backend="asynccomm")
        tensor = torch.ones(1)
        dist.all_reduce(tensor, group=part)
        assert tensor.item() == 2
        assert part.comms.any()._session.identity.job is not comm._session.identity.job
        dist.destroy_process_group(part)


@pytest.mark.skipif(not PYTHON_BACKENDS, reason="a Python group serves all devices where torch takes no backends")
@pytest.mark.ranks(2)
async def test_splits_of_a_group_of_several_backends() -> None:
    with world("cpu:asynccomm,cuda:gloo", label="split") as group:
        for name in (None, "", "named"):
            part = group.split_group([0, 1], group_name=name)
            assert part.group_name == ("0:split:[0, 1]" if name is None else name)
            tensor = torch.ones(1)
            part.allreduce([tensor]).wait()
            assert tensor.item() == 2
        if dist.get_rank() == 0:
            assert group.split_group([0]).size() == 1
        else:
            with pytest.raises(RuntimeError, match=r"rank 1 of group '0' is not among ranks \[0\]"):
                group.split_group([0])
        with pytest.raises(RuntimeError, match="must be ranks"):
            group.split_group([0, 7])


@pytest.mark.skipif(not PYTHON_BACKENDS, reason="a Python group is its own backend where torch takes no others")
@pytest.mark.ranks(2)
async def test_a_split_meets_where_its_group_has_met(comm: Comm) -> None:
    """Not in the store of the group that its backend is registered in, which other ranks may not see."""
    with world() as group:
        outer = group_of(group._get_backend(torch.device("cpu")))
        part = outer.split_group([0, 1], timeout=timedelta(seconds=20))
        tensor = torch.ones(1)
        part.allreduce([tensor]).wait()
        assert tensor.item() == 2
        part.shutdown()
        over = group_of(group_over(comm)._get_backend(torch.device("cpu")))
        with pytest.raises(RuntimeError, match="was made over comms, and cannot be split"):
            over.split_group([0, 1])


def group_of(backend: Any) -> Any:
    """A group of torch's own, whose store is this process's."""
    group = dist.ProcessGroup(dist.HashStore(), backend.rank(), backend.size())
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.CUSTOM, backend)
    group._set_default_backend(dist.ProcessGroup.BackendType.CUSTOM)
    return group


@pytest.mark.ranks(2)
async def test_a_world_is_made_again() -> None:
    for turn in range(2):
        with world(label=f"turn {turn}"):
            assert total(None) == 2


@pytest.mark.ranks(2)
@pytest.mark.parametrize("devices", ["cpu:asynccomm", "cpu:asynccomm,cuda:asynccomm"])
async def test_devices_may_be_named(devices: str) -> None:
    with world(devices, label=devices):
        assert total(None) == 2
        assert isinstance(dist.group.WORLD, TorchGroup)


@pytest.mark.skipif(not PYTHON_BACKENDS, reason="a Python group serves all devices where torch takes no backends")
@pytest.mark.ranks(2)
async def test_other_backends_may_serve_other_devices() -> None:
    with world("cpu:asynccomm,cuda:gloo", label="mixed") as group:
        assert not isinstance(group, TorchGroup)
        work = dist.all_reduce(torch.ones(2), async_op=True)
        work.wait()
        assert work.get_future().wait()[0].tolist() == [2, 2]
        objects: list[Any] = [None, None]
        dist.all_gather_object(objects, dist.get_rank())
        assert objects == [0, 1]
        assert group._get_backend(torch.device("cuda")).name() == "gloo"


@pytest.mark.skipif(not PYTHON_BACKENDS, reason="a group in Python gets the tensors themselves")
@pytest.mark.ranks(2)
async def test_lazily_negated_and_conjugated_outputs_are_refused() -> None:
    """torch's dispatcher gives copies of them to backends; nothing is sent."""
    with world(label="lazy"):
        rank = dist.get_rank()

        def negated(size: int = 2, value: float = 1.0) -> Tensor:
            return torch._neg_view(torch.full((size,), -float(value)))

        def conjugated(size: int = 2) -> Tensor:
            return torch.full((size,), 1 + 2j).conj()

        plain = torch.ones(2)
        calls: list[tuple[str, Callable[[], Any]]] = [
            ("tensor", lambda: dist.all_reduce(negated())),
            ("tensor", lambda: dist.all_reduce(conjugated().imag, async_op=True)),
            ("tensor", lambda: dist.broadcast(negated(), 1 - rank)),
            ("tensor", lambda: dist.reduce(conjugated(), rank)),
            ("tensor_list", lambda: dist.all_gather([plain, negated()], plain)),
            ("output_tensor", lambda: dist.all_gather_single(negated(4), plain)),
            ("gather_list", lambda: dist.gather(plain, [plain, negated()], rank)),
            ("tensor", lambda: dist.scatter(negated(), [plain, plain], rank)),
            ("output", lambda: dist.reduce_scatter(negated(), [plain, plain])),
            ("output", lambda: dist.reduce_scatter_single(conjugated(1), conjugated())),
            ("output_tensor_list", lambda: dist.all_to_all([plain, negated()], [plain, plain])),
            ("output", lambda: dist.all_to_all_single(negated(), plain)),
            ("tensor", lambda: dist.recv(negated(), 1 - rank)),
            ("tensor", lambda: dist.recv(negated())),
        ]
        for name, call in calls:
            with pytest.raises(ValueError, match=f"^{name} must not be lazily conjugated or negated"):
                call()
        with (
            pytest.raises(ValueError, match=r"^output must not be lazily"),
            dist._coalescing_manager(device=torch.device("cpu")),
        ):
            dist.all_to_all_single(torch.empty(2), plain)
            dist.all_to_all_single(negated(), plain)
        with pytest.raises(ValueError, match=r"^tensors must not be lazily"), dist._coalescing_manager():
            dist.all_reduce(negated())
        assert plain.tolist() == [1, 1]

        # inputs may be
        gathered = torch.zeros(4)
        dist.all_gather_single(gathered, negated(value=rank))
        assert gathered.tolist() == [0, 0, 1, 1]
        tensor = conjugated() if rank else torch.full((2,), 1 + 2j)
        dist.reduce(tensor, 0)
        assert tensor.tolist() == [1 - 2j if rank else 2] * 2
        tensor = negated() if rank else torch.zeros(2)
        dist.broadcast(tensor, 1)
        assert tensor.tolist() == [1, 1]
        if rank:
            dist.send(negated(value=5), 0)
        else:
            dist.recv(tensor, 1)
            assert tensor.tolist() == [5, 5]


@pytest.mark.ranks(2)
async def test_programs_with_a_loop_of_their_own_may_call_it() -> None:
    """Calls block the loop, as every other backend does; also in threads."""
    with world():
        assert asyncio.get_running_loop() is not None
        assert total(None) == 2
        assert await asyncio.to_thread(total, None) == 2


@pytest.mark.ranks(2)
async def test_functional_collectives() -> None:
    with world() as group:
        rank = dist.get_rank()
        found = functional.all_reduce(torch.ones(2) * rank, "sum", group)
        assert functional.wait_tensor(found).tolist() == [1, 1]
        found = reduce_scatter_single(torch.arange(4.0), "sum", 0, group)
        assert functional.wait_tensor(found).tolist() == [[0, 2], [4, 6]][rank]
        found = functional.all_to_all_single(torch.arange(4.0) + 10 * rank, [2, 2], [2, 2], group)
        assert functional.wait_tensor(found).tolist() == [[0, 1, 10, 11], [2, 3, 12, 13]][rank]
        found = functional.broadcast(torch.ones(2) * rank, 1, group)
        assert functional.wait_tensor(found).tolist() == [1, 1]
        several = functional.all_reduce_coalesced([torch.ones(1), torch.ones(2)], "sum", group)
        assert [functional.wait_tensor(one).tolist() for one in several] == [[2], [2, 2]]


@pytest.mark.ranks(2)
async def test_the_profiler_sees_what_is_called() -> None:
    with world():
        with profile(record_shapes=True, acc_events=True) as seen:
            total(None)
            dist.barrier()
            dist.all_reduce(torch.eye(2).to_sparse())
        events = {event.name: event.input_shapes for event in seen.events()}
        assert events.keys() >= {"asynccomm:all_reduce", "asynccomm:barrier"}
        shapes = [event.input_shapes for event in seen.events() if event.name == "asynccomm:all_reduce"]
        assert shapes[0] == [[2]]
        assert len(shapes) == 2
        assert "c10d::allreduce_" in events or not PYTHON_BACKENDS  # torch stands in front of groups of its own only


@pytest.mark.ranks(2)
async def test_one_tensor_may_be_twice_in_a_list() -> None:
    """Tied weights are."""
    with world():
        tensor = torch.full((300_000,), dist.get_rank() + 1.0)
        with warnings.catch_warnings(action="ignore"):  # torch calls it deprecated
            dist.all_reduce_coalesced([tensor, tensor])
        assert set(tensor.tolist()) == {3.0}


@pytest.mark.ranks(2)
async def test_an_abort_stops_everybody() -> None:
    with world() as group:
        total(None)  # both have connected
        if dist.get_rank() == 0:
            work = dist.irecv(torch.zeros(1), 1)
            group.abort()
            with pytest.raises(AbortedError, match="torch group"):
                work.wait()
        else:
            with pytest.raises(AbortedError):
                dist.recv(torch.zeros(1), 0)
        with pytest.raises((AbortedError, ClosedError)):
            total(None)


@pytest.mark.ranks(2)
async def test_what_is_in_flight_is_waited_for_when_a_group_is_destroyed() -> None:
    if int(os.environ["RANK"]) == 0:
        with world():
            dist.isend(torch.ones(1 << 20), 1)
    else:
        with world():
            tensor = torch.zeros(1 << 20)
            dist.recv(tensor, 0)
            assert tensor.sum().item() == 1 << 20


@pytest.mark.ranks(2)
async def test_a_rank_that_does_not_come_is_an_error() -> None:
    if int(os.environ["RANK"]) == 0:
        with pytest.raises((RendezvousError, RuntimeError)), world(seconds=0.5):
            pass
        assert not dist.is_initialized()


@pytest.mark.ranks(2)
async def test_a_group_over_a_comm(comm: Comm) -> None:
    """Whoever takes a group of torch can be given one that is made of a comm, which stays its maker's."""
    group = group_over(comm, name="ours")
    assert (group.rank(), group.size(), group.group_name) == (comm.rank, comm.size, "ours")
    tensor = torch.ones(2)
    work = group.allreduce([tensor])
    assert isinstance(work, TorchWork)
    work.wait()
    assert tensor.tolist() == [2, 2]
    group.shutdown()
    assert (await comm.all_reduce(torch.ones(1))).item() == 2
    for ranks in ([0, 1], [0]):
        with pytest.raises(RuntimeError, match="was made over comms, and cannot be split"):
            group.split_group(ranks)
    with pytest.raises(ValueError, match="same ranks"):
        group_over(comm, comm)
    with pytest.raises(TypeError, match="takes comms, got"):
        group_over(comm, None)  # type: ignore[arg-type]


@pytest.mark.ranks(2)
async def test_options_of_other_backends_are_refused() -> None:
    with pytest.raises(TypeError, match="pg_options"), world(pg_options=object()):
        pass


def test_torch_finds_it_by_its_entry_point() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    [(name, target)] = project["entry-points"]["torch.distributed.backends"].items()
    assert name == "asynccomm"
    module, function = target.split(":")
    assert getattr(sys.modules[module], function) is register


PROGRAM = """
import warnings; warnings.simplefilter("error")
import sys, torch
from torch import distributed as dist

import asynccomm.interop.torch_backend

dist.init_process_group("asynccomm", init_method=f"file://{sys.argv[1]}", rank=int(sys.argv[2]), world_size=2)
group = dist.new_group()
tensor = torch.ones(2)
dist.all_reduce(tensor, group=group)
assert tensor.tolist() == [2, 2]
dist.isend(torch.ones(1 << 18), 1 - dist.get_rank())  # dropped, and received by nobody
if sys.argv[2] == "0":
    received = torch.zeros(1 << 18)
    dist.recv(received, 1)
"""


def test_a_process_may_end_while_a_daemon_thread_makes_a_group(tmp_path: Path) -> None:
    program = """
import sys, threading, torch
from torch import distributed as dist
import asynccomm.interop.group_comms as group_comms
import asynccomm.interop.torch_backend

dist.init_process_group("asynccomm", init_method=f"file://{sys.argv[1]}", rank=int(sys.argv[2]), world_size=2)
if sys.argv[2] == "0":  # the other rank never makes the group
    connecting = threading.Event()
    connected = group_comms.GroupComms._connected
    group_comms.GroupComms._connected = lambda *args: (connecting.set(), connected(*args))[1]
    threading.Thread(target=dist.new_group, args=([0, 1],), daemon=True).start()
    connecting.wait()
"""
    command = [sys.executable, "-c", program, str(tmp_path / "store")]
    ranks = [
        subprocess.Popen([*command, str(rank)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for rank in range(2)
    ]
    try:
        for rank in ranks:
            rank.communicate(timeout=60)
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()


@pytest.mark.real_end
@pytest.mark.parametrize("mode", some(["asyncio's", "Python's"], 1))
def test_a_process_may_end_with_groups_open(tmp_path: Path, mode: str) -> None:
    """Without a word, even in development mode: few programs destroy their groups. Python's takes a new interpreter."""
    command = ["-c", PROGRAM, str(tmp_path / "store")]
    debugs = {"PYTHONASYNCIODEBUG": "1"} if mode == "asyncio's" else {}
    ranks = [
        subprocess.Popen(
            [sys.executable, *options, *command, str(rank)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, **variables},
        )
        for rank, (options, variables) in enumerate([([] if debugs else ["-X", "dev"], debugs), ([], {})])
    ]
    try:
        said = [rank.communicate(timeout=60)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], said
    slow = "Executing <Task "  # asyncio's own remark in development mode on a step that took long, as imports do
    lines = [line for text in said for line in text.splitlines() if not line.startswith(slow)]
    assert not any("asynccomm" in line for line in lines), said
