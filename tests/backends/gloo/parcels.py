"""Parcels for tests: what is sent, and a place for what comes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from asynccomm import Comm, Work
from asynccomm.backends.regions import bytes_of
from asynccomm.ops import Call, MessageSpace, Parcel, Parcels, RecvParcel, SendParcel


class Shelf:
    """Takes what comes, in tensors that ``make`` makes of the number of bytes."""

    def __init__(self, make: Callable[[int], Sequence[Tensor]] | None = None) -> None:
        self._make = make or (lambda nbytes: [torch.zeros(nbytes, dtype=torch.uint8)])
        self.calls: list[tuple[int, bytes, dict[int, int]]] = []
        self.tensors: dict[int, Sequence[Tensor]] = {}

    def __call__(self, source: int, head: bytes, lengths: Mapping[int, int]) -> Sequence[Tensor]:
        self.calls.append((source, head, dict(lengths)))
        self.tensors[source] = self._make(lengths[source])
        return self.tensors[source]

    def got(self, source: int) -> Tensor:
        return joined(self.tensors[source])


def joined(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([bytes_of(tensor) for tensor in tensors])


def data(nbytes: int, salt: int = 0) -> Tensor:
    """``7 * i + salt``, for each byte ``i``."""
    period = (torch.arange(256) * 7 + salt).to(torch.uint8)
    return period.repeat(-(-nbytes // 256))[:nbytes]


def submit(comm: Comm, call: Call) -> Work[Any]:
    return comm._submit(call, None, None)


def send(comm: Comm, parcel: Parcel, dst: int, tag: int = 0, channel: MessageSpace = MessageSpace.OBJECTS) -> Work[Any]:
    return submit(comm, Call(SendParcel("send_object", dst, tag, channel), (), (), None, None, (parcel,)))


def recv(
    comm: Comm, place: Any, src: int | None, tag: int = 0, channel: MessageSpace = MessageSpace.OBJECTS
) -> Work[Any]:
    return submit(comm, Call(RecvParcel("recv_object", src, tag, channel), (), (), None, None, (), place))


def collective(comm: Comm, op: Parcels, parcels: Sequence[Parcel], place: Any) -> Work[Any]:
    mine = tuple(parcels) if op.gives(comm.rank) else ()
    return submit(comm, Call(op, (), (), None, None, mine, place if op.takes(comm.rank) else None))
