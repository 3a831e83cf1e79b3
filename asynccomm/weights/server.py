"""The servers' side: versions of weights arrive in the background, and take effect between two requests."""

from __future__ import annotations

import itertools
import os
import socket
from collections.abc import Mapping
from datetime import timedelta
from functools import partial
from typing import final

import torch
from torch import distributed as dist

from asynccomm.backends.base import device_of
from asynccomm.comm.comm import Comm
from asynccomm.comm.methods.state_dict import check_copies
from asynccomm.comm.pairs import meeting_place
from asynccomm.core.handles import Handle
from asynccomm.ops.validation import CommInfo
from asynccomm.options import DEFAULT_TIMEOUT, check_bool, check_name, check_strings, seconds
from asynccomm.store.base import Store
from asynccomm.weights.layout import Region, Rename, Shard, State, collect
from asynccomm.weights.updates import Site, Updates

__all__ = ["Server"]

_numbers = itertools.count(1)


@final
class Server(Handle):
    """Receives weights from the trainers of a :class:`Publisher`, while this process goes on with its work.

    ::

        server = weights.Server(model)
        async with server.updates() as updates:
            async for update in updates:
                update.apply()

    Args:
        state: a module, for all parameters and buffers in its ``state_dict()``, or a mapping of names to tensors: the
            part of this server. The part of a DTensor follows from its placements; other tensors are whole, unless
            ``shards`` names their parts. A server may have other parts and other floating dtypes than the trainers.
            A ``state_dict()`` of copies, as of ``FullyShardedDataParallel``, is refused.
        store: the store of the publisher, see :func:`asynccomm.pair_comm`; None: that of the launcher.
        name: of the publisher.
        label: a name of this server for errors and results; None: host and process.
        shards, rename: see :class:`Publisher`. A server does not receive tensors that ``rename`` leaves out.
        strict: refuse trainers that have tensors which this server does not have.
        in_place: receive into the weights themselves, without a second copy: see :meth:`Update.receive`.
        device: of the tensors.
        timeout: seconds or a timedelta for connecting, and for each message of a trainer; None: 600.
        hints: for the backend, which is the publisher's.

    Raises: TypeError, ValueError naming the argument.
    """

    _instead = "make one in each process"

    def __init__(
        self,
        state: State,
        *,
        store: Comm | Store | dist.Store | str | None = None,
        name: str = "weights",
        label: str | None = None,
        shards: Mapping[str, Shard | Region] | None = None,
        rename: Rename | None = None,
        strict: bool = True,
        in_place: bool = False,
        device: str | torch.device = "cpu",
        timeout: float | timedelta | None = None,
        hints: Mapping[str, str] | None = None,
    ) -> None:
        check_name(name)
        label = label if label is not None else f"{socket.gethostname()}-{os.getpid()}-{next(_numbers)}"
        check_name(label, "label")
        check_bool("strict", strict)
        check_bool("in_place", in_place)
        if store is not None:  # the launcher's may not be known yet
            meeting_place(store)
        if hints is not None:
            check_strings(hints)
        own = CommInfo(label, 0, 1, device_of(device), "server")
        read = partial(collect, state, own, shards=shards, rename=rename, written=True)
        first, second = read().tensors, read().tensors  # both alive, so that copies have other memory
        if first.keys() != second.keys():
            raise ValueError(
                f"state and rename must give the same names each time, got {sorted(first)}, then {sorted(second)}"
            )
        check_copies(first, second)
        limit = seconds("timeout", timeout, DEFAULT_TIMEOUT)
        self._site = Site(label, store, name, read, strict, in_place, own.device, limit, hints)

    @property
    def label(self) -> str:
        """The name of this server in errors and results."""
        return self._site.label

    @property
    def version(self) -> int:
        """The version in effect; 0: none of the publisher's."""
        return self._site.version

    def updates(self, *, automatic: bool = False) -> Updates:
        """The versions that the trainers push; use it with ``async with``.

        Args:
            automatic: apply each version when it is complete, in a step of the event loop: between two requests that
                are answered without an ``await``. Else each version waits for its ``apply``, and trainers that push
                the next one wait, too.

        Updates may be opened again after they have ended or were left, also for a publisher that has taken the place of
        a lost one.
        """
        check_bool("automatic", automatic)
        return Updates(self._site, automatic)
