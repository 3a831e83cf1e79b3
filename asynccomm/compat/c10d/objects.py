"""Collectives on Python objects, as in torch: received objects are unpickled without restriction by default.

Any rank of the group can thus run arbitrary code in this process. ``weights_only=True`` on all ranks prevents that, as
is the default of our comms' own methods: see ``Comm.all_gather_object``. Tensors in objects arrive on the CPU. One rank
can send at most 4 GiB in one call.
"""

from __future__ import annotations

import io
import pickle
import warnings
from collections.abc import Awaitable, Sequence
from typing import Any

import torch
from torch import Tensor

from asynccomm.compat.c10d.logs import collective
from asynccomm.compat.c10d.p2p import sender_of
from asynccomm.compat.c10d.ranks import canonical_rank, root_rank
from asynccomm.compat.c10d.validation import check_not_self, check_root_list, member
from asynccomm.compat.c10d.work import NoopWork, ResultWork
from asynccomm.compat.c10d.world import Group, group_or_default


def object_device(group: Group = None) -> str:
    """Type of device that carries the group's objects: the group's only type, or the CPU if the group serves several.

    Raises: TypeError if ``group`` is not a group.
    """
    return group_or_default(group).object_device


def device_capability(group: Group = None) -> list[str]:
    """Types of device that the group serves."""
    return group_or_default(group).device_types


def object_to_tensor(obj: object, device: torch.device | str = "cpu", group: Group = None) -> tuple[Tensor, Tensor]:
    """Pickle ``obj``; return a tensor of the bytes, and a tensor of their number."""
    data = io.BytesIO()
    pickle.Pickler(data).dump(obj)
    content = torch.frombuffer(bytearray(data.getvalue()), dtype=torch.uint8).to(device)
    return content, torch.tensor([content.numel()], dtype=torch.long, device=device)


def tensor_to_object(tensor: Tensor, tensor_size: Tensor | int, group: Group = None) -> Any:
    """Unpickle the first ``tensor_size`` bytes of a tensor from :func:`object_to_tensor`; later bytes are ignored."""
    data = tensor.cpu()[: int(tensor_size)].numpy().tobytes()
    return pickle.Unpickler(io.BytesIO(data)).load()


@collective()
def all_gather_object(
    object_list: list[Any], obj: object, group: Group = None, weights_only: bool = False
) -> Awaitable[None]:
    """Collect every rank's ``obj`` in ``object_list`` on all ranks; ``await`` fills the list."""
    pg = member(group)
    _check_room("object_list", object_list, pg.size())
    return ResultWork(
        pg.comm().all_gather_object(obj, weights_only=weights_only), lambda items: _fill(object_list, items)
    )


@collective()
def gather_object(
    obj: object,
    object_gather_list: list[Any] | None = None,
    dst: int | None = None,
    group: Group = None,
    group_dst: int | None = None,
    weights_only: bool = False,
) -> Awaitable[None]:
    """Collect every rank's ``obj`` on one rank; by default on global rank 0.

    Args:
        object_gather_list: on the root, a list with an item for each rank, which ``await`` fills; None or empty on
            other ranks.
    """
    pg = member(group)
    root = root_rank(pg, dst, group_dst, "dst")
    check_root_list(pg, root, "object_gather_list", object_gather_list)
    room = object_gather_list
    if room is not None and root == pg.rank():
        _check_room("object_gather_list", room, pg.size())
    work = pg.comm().gather_object(obj, root, weights_only=weights_only)
    return ResultWork(work, lambda items: _fill(room, items) if room is not None and items is not None else None)


@collective()
def broadcast_object_list(
    object_list: list[Any],
    src: int | None = None,
    group: Group = None,
    device: torch.device | None = None,
    group_src: int | None = None,
    weights_only: bool = False,
) -> Awaitable[Any]:
    """Replace the items of all ranks' ``object_list`` by one rank's items; by default by global rank 0's.

    Args:
        object_list: of equal length on all ranks; ``await`` fills the list.
        device: selects the comm that carries the objects, if the group has several.
    """
    pg = member(group)
    root = root_rank(pg, src, group_src, "src")
    return ResultWork(
        pg.comm(device).broadcast_object_list(object_list, root, weights_only=weights_only), lambda items: items
    )


@collective(names={"input_list": "scatter_object_input_list"})
def scatter_object_list(
    scatter_object_output_list: list[Any],
    scatter_object_input_list: Sequence[object] | None = None,
    src: int | None = None,
    group: Group = None,
    group_src: int | None = None,
    weights_only: bool = False,
) -> Awaitable[None]:
    """Send each rank one object of one rank's list; by default from global rank 0.

    Args:
        scatter_object_output_list: a list of at least one item; ``await`` replaces the first.
        scatter_object_input_list: on the root, one object for each rank; ignored on other ranks.
    """
    pg = member(group)
    room = scatter_object_output_list
    if not isinstance(room, list) or not room:
        raise ValueError(f"scatter_object_output_list must be a list of at least one item, got {room!r}")
    root = root_rank(pg, src, group_src, "src")
    given = scatter_object_input_list if root == pg.rank() else None
    if root == pg.rank() and given is None:
        raise ValueError("scatter_object_input_list must be given on the rank that scatters")
    return ResultWork(
        pg.comm().scatter_object_list(given, root, weights_only=weights_only), lambda item: _fill(room, [item])
    )


@collective()
def send_object_list(
    object_list: Sequence[object],
    dst: int | None = None,
    group: Group = None,
    device: torch.device | None = None,
    group_dst: int | None = None,
    use_batch: bool = False,
    weights_only: bool = False,
) -> Awaitable[Any]:
    """Send objects to global rank ``dst``, or to ``group_dst`` in the group; not to this rank itself.

    Args:
        device: selects the comm that carries the objects, if the group has several.
        use_batch: has no effect: no pair of ranks needs a communicator of its own.
    """
    pg = member(group)
    to = canonical_rank(pg, dst, group_dst, name="dst")
    check_not_self(pg, to, "dst")
    return pg.comm(device).send_object_list(object_list, to, weights_only=weights_only)


@collective(outside=NoopWork(-1))
def recv_object_list(
    object_list: list[Any],
    src: int | None = None,
    group: Group = None,
    device: torch.device | None = None,
    group_src: int | None = None,
    use_batch: bool = False,
    weights_only: bool = False,
) -> Awaitable[int]:
    """Receive objects from global rank ``src``, or from ``group_src`` in the group; without both, from any rank.

    ``await`` it for the sender's global rank; -1 if this rank is not in the group.

    Args:
        object_list: as long as the sender's; ``await`` fills the list.
        device, use_batch: see :func:`send_object_list`.
    """
    pg = member(group)
    source = None if src is None and group_src is None else canonical_rank(pg, src, group_src, name="src")
    check_not_self(pg, source, "src")
    work = pg.comm(device).recv_object_list(object_list, source, weights_only=weights_only)
    return ResultWork(work, lambda _: pg.global_ranks[sender_of(work, source)])


def _check_room(name: str, room: object, size: int) -> None:
    if not isinstance(room, list):
        raise TypeError(f"{name} must be a list, got {room!r} ({type(room).__name__})")
    if len(room) < size:
        raise ValueError(f"{name} must have a place for each of the {size} ranks, got {len(room)}")


def _fill(room: list[Any], items: Sequence[Any]) -> None:
    room[: len(items)] = items


def pg_default_device(group: Group = None) -> torch.device:
    """Device of the group's objects, without an index.

    Raises: RuntimeError if the group has no backend.
    """
    warnings.warn(
        "_get_pg_default_device is deprecated: use _get_object_coll_device or _device_capability",
        FutureWarning,
        stacklevel=2,
    )
    pg = group_or_default(group)
    if not pg.device_types:
        raise RuntimeError(f"{pg!r} has no backend, and thus no default device")
    return torch.device(pg.object_device)
