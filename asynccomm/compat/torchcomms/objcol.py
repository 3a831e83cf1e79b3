"""Objects by torchcomms' functions, which fill lists; each blocks, or gives an awaitable where a loop runs.

Objects are safe values by default, and with ``weights_only=False`` on all ranks any that can be pickled; the variable
TORCHCOMMS_SERIALIZATION=pickle means the latter for all calls. ``timeout=None``: that of the comm.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from asynccomm.compat.either import outcome
from asynccomm.compat.torchcomms.comm import TorchComm
from asynccomm.compat.torchcomms.errors import RefusedError, refusing


def all_gather_object(
    comm: TorchComm, object_list: list[Any], obj: object, timeout: timedelta | None = None, weights_only: bool = True
) -> Any:
    """Fill ``object_list``, of one item for each rank, with every rank's ``obj``."""
    _check_length(comm, "object_list", object_list)
    method = _known(comm)._comm.all_gather_object
    return _filled(comm, object_list, method, obj, timeout=timeout, weights_only=_safe(weights_only))


def gather_object(
    comm: TorchComm,
    obj: object,
    root: int,
    object_gather_list: list[Any] | None = None,
    timeout: timedelta | None = None,
    weights_only: bool = True,
) -> Any:
    """Fill ``object_gather_list`` of rank ``root``, of one item for each rank; elsewhere it is None."""
    if _known(comm).get_rank() == root:
        _check_length(comm, "object_gather_list", object_gather_list)
    elif object_gather_list is not None:
        raise RefusedError(f"object_gather_list must be None except on the root, got {object_gather_list!r}")
    method = _known(comm)._comm.gather_object
    return _filled(comm, object_gather_list, method, obj, root, timeout=timeout, weights_only=_safe(weights_only))


def broadcast_object_list(
    comm: TorchComm, object_list: list[Any], root: int, timeout: timedelta | None = None, weights_only: bool = True
) -> Any:
    """Replace the items of ``object_list``, of one length on all ranks, by those of rank ``root``."""
    method = _known(comm)._comm.broadcast_object_list
    return _filled(comm, None, method, object_list, root, timeout=timeout, weights_only=_safe(weights_only))


def scatter_object_list(
    comm: TorchComm,
    root: int,
    scatter_object_output_list: list[Any],
    scatter_object_input_list: list[Any] | None = None,
    timeout: timedelta | None = None,
    weights_only: bool = True,
) -> Any:
    """Put the root's ``scatter_object_input_list[rank]`` into the first place of ``scatter_object_output_list``."""
    outputs = scatter_object_output_list
    if not isinstance(outputs, list) or not outputs:
        raise RefusedError(f"scatter_object_output_list must be a list of at least one item, got {outputs!r}")
    inputs = scatter_object_input_list if _known(comm).get_rank() == root else None

    def fill(obj: Any) -> None:
        outputs[0] = obj

    method = _known(comm)._comm.scatter_object_list
    with refusing({"input_list": "scatter_object_input_list"}):
        work = comm._here().call(method, inputs, root, timeout=timeout, weights_only=_safe(weights_only))
    return outcome(work, fill)


def send_object_list(comm: TorchComm, object_list: list[Any], dst: int, timeout: timedelta | None = None) -> Any:
    """Send the items of ``object_list`` to rank ``dst``: as safe values where they are, else as pickles."""
    method, call = _known(comm)._comm.send_object_list, comm._here().call
    with refusing():
        try:
            work = call(method, object_list, dst, timeout=timeout, weights_only=_safe(True))
        except TypeError:  # the receiver decides, by its ``weights_only``
            work = call(method, object_list, dst, timeout=timeout, weights_only=False)
    return outcome(work, _nothing)


def recv_object_list(
    comm: TorchComm, object_list: list[Any], src: int, timeout: timedelta | None = None, weights_only: bool = True
) -> Any:
    """Replace the items of ``object_list``, as long as the sender's, by those that rank ``src`` sends."""
    method = _known(comm)._comm.recv_object_list
    return _filled(comm, None, method, object_list, src, timeout=timeout, weights_only=_safe(weights_only))


def _filled(comm: TorchComm, into: list[Any] | None, method: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Call ``method``, and put the items that it gives into the list ``into``."""

    def fill(items: Any) -> None:
        if into is not None:
            into[:] = items

    with refusing():
        work = comm._here().call(method, *args, **options)
    return outcome(work, fill)


def _known(comm: object) -> TorchComm:
    """``comm``. Raises: TypeError if it is no TorchComm."""
    if not isinstance(comm, TorchComm):
        raise TypeError(f"comm must be a TorchComm, got {comm!r}")
    return comm


def _nothing(_: object) -> None:
    """The result of a send."""


def _safe(weights_only: bool) -> bool:
    return weights_only and os.environ.get("TORCHCOMMS_SERIALIZATION") != "pickle"


def _check_length(comm: TorchComm, name: str, items: object) -> None:
    if not isinstance(items, list) or len(items) != _known(comm).get_size():
        raise RefusedError(f"{name} must be a list of one item for each of the {comm.get_size()} ranks, got {items!r}")
