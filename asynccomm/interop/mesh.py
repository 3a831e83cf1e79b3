"""DeviceMesh over comms, for DTensor, ``fully_shard`` and functional collectives.

::

    async with asynccomm.new_comm() as world:
        async with world.split(row, "tp") as tp, world.split(column, "dp") as dp:
            mesh = init_device_mesh((dp, tp), ("dp", "tp"), _global_comm=world)

Ranks of the mesh count row by row: the last dimension varies fastest. Each dimension's comm becomes a torch group named
after the dimension. The comm of all ranks becomes the default group, unless there is one already, as DeviceMesh asks
the default group for ranks. torch owns the groups until ``destroy_process_group``; the caller owns the comms.
"""

from __future__ import annotations

import itertools
import math
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from asynccomm.comm.comm import Comm
from asynccomm.interop import torch_registry
from asynccomm.interop.torch_backend import TorchGroup, group_over

_comms: weakref.WeakKeyDictionary[TorchGroup, Comm] = weakref.WeakKeyDictionary()  # of groups made here


def init_device_mesh(
    mesh_dim_comms: Sequence[Comm], mesh_dim_names: Sequence[str], _global_comm: Comm | None = None
) -> DeviceMesh:
    """Create a DeviceMesh that communicates over ``mesh_dim_comms``. All ranks call this; the call sends nothing.

    Args:
        mesh_dim_comms: by dimension, this rank's comm; the comm's size is the size of the dimension, and its rank is
            this rank's index. Rank 5 of a mesh of sizes (2, 4) is rank 1 in the first and also in the second.
        mesh_dim_names: by dimension, the name for ``mesh[...]`` and ``mesh.get_group(...)``. The group has the same
            name, or the dimension's and the comm's name if another mesh has taken the former.
        _global_comm: the comm of all ranks of the mesh. None: the only dimension's comm, or a dimension's comm of the
            mesh's size, or the default group.

    If there is no default group, the group of all ranks becomes the default: ``dist.get_rank()`` then returns its rank,
    and functions of ``torch.distributed`` use it if called without a group. An existing default group stays, and must
    have the same ranks; but a default group that an earlier mesh has left with a closed comm is replaced.

    torch waits for collectives by blocking the thread. In a coroutine, use the mesh in another thread
    (``asyncio.to_thread``), or accept that the loop is blocked meanwhile.

    Raises:
        TypeError, ValueError: naming the mismatch: names, devices, ranks or sizes, or the order of the dimensions.
        RuntimeError: the mesh has several dimensions, and no comm or default group of all ranks is known.
    """
    comms, names = _checked(mesh_dim_comms, mesh_dim_names)
    shape = tuple(comm.size for comm in comms)
    mesh = torch.arange(math.prod(shape), dtype=torch.int, device="cpu").view(shape)
    rank = int(mesh[tuple(comm.rank for comm in comms)])
    if _global_comm is None:
        _global_comm = next((comm for comm in comms if comm.size == mesh.numel()), None)
    if _global_comm is not None:
        _check_global(_global_comm, comms, names, rank, mesh)
    _drop_closed()
    _take_default(_global_comm, comms, names, rank, mesh)
    groups: list[Any] = [
        _group_for(comm, name, _row(mesh, dim, rank)) for dim, (comm, name) in enumerate(zip(comms, names, strict=True))
    ]
    return DeviceMesh.from_group(groups, comms[0].device.type, mesh=mesh, mesh_dim_names=names)


def _checked(comms: Sequence[Comm], names: Sequence[str]) -> tuple[tuple[Comm, ...], tuple[str, ...]]:
    if not isinstance(comms, Sequence) or not comms or not all(isinstance(comm, Comm) for comm in comms):
        raise TypeError(f"mesh_dim_comms must be comms, one for each dimension, got {comms!r}")
    if isinstance(names, str) or not isinstance(names, Sequence) or not all(isinstance(name, str) for name in names):
        raise TypeError(f"mesh_dim_names must be strs, one for each dimension, got {names!r}")
    if len(names) != len(comms):
        raise ValueError(f"mesh_dim_names must be as many as the comms, got {len(names)} for {len(comms)}")
    if len(set(names)) < len(names) or not all(names):
        raise ValueError(f"mesh_dim_names must differ, and not be empty, got {tuple(names)}")
    if len({comm.device.type for comm in comms}) > 1:
        raise ValueError(f"mesh_dim_comms must be on one type of device, got {[str(comm.device) for comm in comms]}")
    for comm in comms:
        comm.unsafe_get_backend()  # raises ClosedError, or the error that broke the comm
    return tuple(comms), tuple(names)


def _check_global(whole: Comm, comms: Sequence[Comm], names: Sequence[str], rank: int, mesh: torch.Tensor) -> None:
    """Check the comm of all ranks. Raises: ValueError unless it has the mesh's ranks in their order; TypeError."""
    if not isinstance(whole, Comm):
        raise TypeError(f"_global_comm must be a Comm, got {whole!r}")
    whole.unsafe_get_backend()
    if whole.device.type != comms[0].device.type:
        raise ValueError(f"_global_comm is on {whole.device}, mesh_dim_comms are on {comms[0].device}")
    if whole.size != mesh.numel():
        raise ValueError(f"a mesh of {_shape(comms, names)} has {mesh.numel()} ranks, _global_comm has {whole.size}")
    if whole.rank != rank:
        raise ValueError(
            f"in a mesh of {_shape(comms, names)}, which counts row by row, this is rank {rank} by its ranks "
            f"{[comm.rank for comm in comms]} in these comms, but rank {whole.rank} of _global_comm: "
            f"are the dimensions in the right order?"
        )
    for dim, comm in enumerate(comms):
        row = _row(mesh, dim, rank)
        if not _same_processes(comm, whole, row):
            raise ValueError(
                f"dimension {names[dim]!r} of a mesh of {_shape(comms, names)} has ranks {row} of _global_comm here, "
                f"but comm {comm.name!r} is of other processes"
            )


def _same_processes(comm: Comm, whole: Comm, row: Sequence[int]) -> bool:
    mine, all_ranks = comm._session.identity.members, whole._session.identity.members
    return [(one.host, one.pid) for one in mine] == [(all_ranks[at].host, all_ranks[at].pid) for at in row]


def _row(mesh: torch.Tensor, dim: int, rank: int) -> list[int]:
    """The ranks of ``rank``'s row along one dimension."""
    rows = mesh.movedim(dim, -1).reshape(-1, mesh.shape[dim])
    row: list[int] = rows[(rows == rank).any(1)][0].tolist()
    return row


def _shape(comms: Sequence[Comm], names: Sequence[str]) -> str:
    return " x ".join(f"{comm.size} ({name!r})" for comm, name in zip(comms, names, strict=True))


def _take_default(
    whole: Comm | None, comms: Sequence[Comm], names: Sequence[str], rank: int, mesh: torch.Tensor
) -> None:
    """Check the default group against the mesh, or create it."""
    there: Any = torch_registry.default()
    if there is not None:
        if (there.size(), there.rank()) != (mesh.numel(), rank):
            raise ValueError(
                f"this is rank {rank} of {mesh.numel()} in a mesh of {_shape(comms, names)}, but rank {there.rank()} "
                f"of {there.size()} in the default group: destroy_process_group() makes room for another one"
            )
    elif whole is None:
        raise RuntimeError(f"a mesh of {_shape(comms, names)} needs the comm of all its ranks: pass _global_comm")
    else:
        name = names[0] if len(comms) == 1 and comms[0] is whole else whole.name
        torch_registry.make_default(_group_for(whole, name, range(whole.size)))


def _group_for(comm: Comm, name: str, ranks: Sequence[int]) -> TorchGroup:
    """Find or create the group of ``comm`` named ``name``; the name is extended if another group has it."""
    for label in itertools.chain(
        (name, f"{name}/{comm.name}"), (f"{name}/{comm.name}/{n}" for n in itertools.count(1))
    ):
        there = torch_registry.group_called(label)
        if there is None:
            group = group_over(comm, name=label)
            torch_registry.add(group, label, ranks)
            _comms[group] = comm
            return group
        if _comms.get(there) is comm and dist.get_process_group_ranks(there) == list(ranks):
            return there  # type: ignore[no-any-return]
    raise AssertionError("numbers do not end")


def _drop_closed() -> None:
    """Remove groups of earlier meshes with closed comms."""
    for group, comm in list(_comms.items()):
        if comm._session.closed:
            if group is torch_registry.default():
                torch_registry.make_default(None)
            if group in dist.distributed_c10d._world.pg_map:
                torch_registry.drop(group)
            del _comms[group]
