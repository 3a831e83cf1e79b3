"""Types and constants of ``torch.distributed``: torch's own where programs may compare them or pass them to torch.

``ReduceOp``, ``Store``, ``PrefixStore``, ``DebugLevel`` and the option structs are torch's. ``ProcessGroup`` and
``Work`` are ours, since their operations are awaitable: see ``process_group`` and ``work``.
"""

from __future__ import annotations

import warnings
from datetime import timedelta
from typing import Any, Final, NewType, final

from torch._C import _DistBackendError, _DistError, _DistNetworkError, _DistStoreError
from torch._C._distributed_c10d import AllgatherOptions as AllgatherOptions
from torch._C._distributed_c10d import DebugLevel as DebugLevel
from torch._C._distributed_c10d import FileStore as FileStore
from torch._C._distributed_c10d import HashStore as HashStore
from torch._C._distributed_c10d import PrefixStore as PrefixStore
from torch._C._distributed_c10d import ReduceOp as ReduceOp
from torch._C._distributed_c10d import Store as Store
from torch._C._distributed_c10d import TCPStore as TCPStore
from torch._C._distributed_c10d import get_debug_level as get_debug_level
from torch.distributed import distributed_c10d as _torch
from torch.distributed import is_available as is_available
from torch.distributed.constants import default_pg_nccl_timeout as default_pg_nccl_timeout
from torch.distributed.constants import default_pg_timeout as default_pg_timeout
from typing_extensions import deprecated

from asynccomm.ops import reduce_op as _ours

export_c_types = _torch._export_c_types  # names torch's types, which are the types here, after torch's public module

DistBackendError = _DistBackendError
DistError = _DistError
DistNetworkError = _DistNetworkError
DistStoreError = _DistStoreError
AllreduceCoalescedOptions = _torch.AllreduceCoalescedOptions
AllreduceOptions = _torch.AllreduceOptions
AllToAllOptions = _torch.AllToAllOptions
BarrierOptions = _torch.BarrierOptions
BroadcastOptions = _torch.BroadcastOptions
GatherOptions = _torch.GatherOptions
ReduceOptions = _torch.ReduceOptions
ReduceScatterOptions = _torch.ReduceScatterOptions
ScatterOptions = _torch.ScatterOptions

GroupName = NewType("GroupName", str)

NON_GROUP_MEMBER: Final = -100  # in place of a group, on ranks outside the group
PG_WRAPPER_STORE_PREFIX: Final = "pg_wrapper"
STORE_BASED_BARRIER_PREFIX: Final = "store_based_barrier_key"
SHRINK_DEFAULT: Final = 0x00
SHRINK_ABORT: Final = 0x01

_NOT_FOR_COMPLEX: Final = frozenset({"MAX", "MIN", "PRODUCT", "BAND", "BOR", "BXOR"})
_SUM: Final = ReduceOp.SUM


def reduction(op: object) -> _ours.ReduceOp:
    """Convert ``op``, torch's or ours, to our ReduceOp. Raises: TypeError."""
    return _ours.ReduceOp.SUM if op is _SUM else _ours.ReduceOp.of(op)  # a fast path for the most frequent op


def supports_complex(reduceOp: object) -> bool:
    """Whether complex tensors can be reduced by the op; orders and bitwise ops are undefined for complex numbers."""
    # the attribute is not in the types of every version of torch
    kind = getattr(reduceOp, "op", None) if type(reduceOp) is ReduceOp else reduceOp
    if isinstance(kind, _ours.ReduceOp):
        kind = kind.type
    return getattr(kind, "name", "") not in _NOT_FOR_COMPLEX


@final
class _Deprecated:
    """The members of ``ReduceOp``, under the deprecated name ``reduce_op``."""

    def __init__(self) -> None:
        members = ReduceOp.RedOpType.__members__
        for name, member in members.items():
            setattr(self, name, member)
        self.__members__ = members

    @deprecated("`reduce_op` is deprecated, use `ReduceOp`", category=FutureWarning)
    def __getattribute__(self, key: str) -> Any:
        return object.__getattribute__(self, key)


reduce_op: Final = _Deprecated()


def default_timeout(backend: str) -> timedelta:
    """Default timeout of a group of ``backend``."""
    if backend != "nccl":  # also "cpu:gloo,cuda:nccl" gets the other default
        return default_pg_timeout
    if not isinstance(default_pg_nccl_timeout, timedelta):
        warnings.warn("torch was built without NCCL: its default timeout is that of other backends", stacklevel=3)
        return default_pg_timeout
    return default_pg_nccl_timeout


def check_reconfigure(enable_reconfigure: object) -> None:
    """Raise NotImplementedError if torch's own reconfiguration is asked for."""
    if enable_reconfigure:
        raise NotImplementedError("enable_reconfigure is not supported: use Comm.reconfigure or Comm.shrink")


def check_valid_timeout(timeout: object) -> None:
    """Raise TypeError unless ``timeout`` is a timedelta."""
    if not isinstance(timeout, timedelta):
        raise TypeError(f"timeout must be a datetime.timedelta, got {timeout!r} ({type(timeout).__name__})")
