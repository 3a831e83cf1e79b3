"""Collective communication for PyTorch tensors that you can await.

``new_comm`` makes a Comm, its methods return Works, ``run`` runs a program. The contract is in ``comm/README.md``.

Names are loaded at first use: importing torch takes seconds, a cost to spare the launcher and pytest runs that only
have the plugin installed.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from asynccomm.core.interpreter import check_interpreter

check_interpreter()

if TYPE_CHECKING:
    from asynccomm import blocking as blocking
    from asynccomm import compat as compat
    from asynccomm import experts as experts
    from asynccomm import interop as interop
    from asynccomm import observe as observe
    from asynccomm import testing as testing
    from asynccomm import weights as weights
    from asynccomm.backends.names import backend_names as backend_names
    from asynccomm.cli.spawning import spawn as spawn
    from asynccomm.comm.comm import Comm as Comm
    from asynccomm.comm.comm import coalesce as coalesce
    from asynccomm.comm.in_flight import CommStatistics as CommStatistics
    from asynccomm.comm.join_comm import join_comm as join_comm
    from asynccomm.comm.methods.p2p import BatchSendRecv as BatchSendRecv
    from asynccomm.comm.methods.p2p import Sink as Sink
    from asynccomm.comm.methods.p2p import Stream as Stream
    from asynccomm.comm.new_comm import new_comm as new_comm
    from asynccomm.comm.pairs import pair_comm as pair_comm
    from asynccomm.comm.scopes import CoalesceScope as CoalesceScope
    from asynccomm.comm.scopes import Estimate as Estimate
    from asynccomm.control.diagnosis import Diagnosis as Diagnosis
    from asynccomm.control.diagnosis import PendingOp as PendingOp
    from asynccomm.control.diagnosis import RankState as RankState
    from asynccomm.core.work import Work as Work
    from asynccomm.errors import AbortedError as AbortedError
    from asynccomm.errors import AsyncCommError as AsyncCommError
    from asynccomm.errors import BackendError as BackendError
    from asynccomm.errors import BrokenError as BrokenError
    from asynccomm.errors import ClosedError as ClosedError
    from asynccomm.errors import CollectiveMismatchError as CollectiveMismatchError
    from asynccomm.errors import CollectiveTimeoutError as CollectiveTimeoutError
    from asynccomm.errors import LeftOutError as LeftOutError
    from asynccomm.errors import MonitoredBarrierError as MonitoredBarrierError
    from asynccomm.errors import NotSentError as NotSentError
    from asynccomm.errors import PayloadError as PayloadError
    from asynccomm.errors import PayloadTypeError as PayloadTypeError
    from asynccomm.errors import PeerLostError as PeerLostError
    from asynccomm.errors import QuorumError as QuorumError
    from asynccomm.errors import RendezvousError as RendezvousError
    from asynccomm.errors import StoreError as StoreError
    from asynccomm.errors import StoreProtocolError as StoreProtocolError
    from asynccomm.errors import StoreTimeoutError as StoreTimeoutError
    from asynccomm.errors import WouldBlockError as WouldBlockError
    from asynccomm.gradients.bucket import GradientBucket as GradientBucket
    from asynccomm.gradients.reducer import GradientReducer as GradientReducer
    from asynccomm.interop.wrap import wrap as wrap
    from asynccomm.ops.experts import Dispatched as Dispatched
    from asynccomm.ops.reduce_op import RedOpType as RedOpType
    from asynccomm.ops.reduce_op import ReduceOp as ReduceOp
    from asynccomm.ops.routing import Routing as Routing
    from asynccomm.ops.windows import SignalCmpOp as SignalCmpOp
    from asynccomm.options import CommOptions as CommOptions
    from asynccomm.queues.attaching import attach_queue as attach_queue
    from asynccomm.queues.errors import EndOfQueueError as EndOfQueueError
    from asynccomm.queues.errors import ParticipantLostError as ParticipantLostError
    from asynccomm.queues.errors import QueueError as QueueError
    from asynccomm.queues.queue import MessageQueue as MessageQueue
    from asynccomm.queues.queue import QueueStatistics as QueueStatistics
    from asynccomm.runner import run as run
    from asynccomm.serialization.values import register_safe as register_safe
    from asynccomm.store.base import PrefixStore as PrefixStore
    from asynccomm.store.base import Store as Store
    from asynccomm.store.client import StoreClient as StoreClient
    from asynccomm.store.memory import MemoryStore as MemoryStore
    from asynccomm.store.torch_store import TorchStore as TorchStore
    from asynccomm.version import __version__ as __version__
    from asynccomm.windows.window import Window as Window

_HOMES = {
    "backend_names": "asynccomm.backends.names",
    "CoalesceScope": "asynccomm.comm.scopes",
    "Estimate": "asynccomm.comm.scopes",
    "Comm": "asynccomm.comm.comm",
    "CommStatistics": "asynccomm.comm.in_flight",
    "join_comm": "asynccomm.comm.join_comm",
    "new_comm": "asynccomm.comm.new_comm",
    "pair_comm": "asynccomm.comm.pairs",
    "Diagnosis": "asynccomm.control.diagnosis",
    "PendingOp": "asynccomm.control.diagnosis",
    "RankState": "asynccomm.control.diagnosis",
    "AbortedError": "asynccomm.errors",
    "AsyncCommError": "asynccomm.errors",
    "BackendError": "asynccomm.errors",
    "BrokenError": "asynccomm.errors",
    "ClosedError": "asynccomm.errors",
    "CollectiveMismatchError": "asynccomm.errors",
    "CollectiveTimeoutError": "asynccomm.errors",
    "NotSentError": "asynccomm.errors",
    "PayloadError": "asynccomm.errors",
    "PayloadTypeError": "asynccomm.errors",
    "LeftOutError": "asynccomm.errors",
    "MonitoredBarrierError": "asynccomm.errors",
    "PeerLostError": "asynccomm.errors",
    "QuorumError": "asynccomm.errors",
    "RendezvousError": "asynccomm.errors",
    "StoreError": "asynccomm.errors",
    "StoreProtocolError": "asynccomm.errors",
    "StoreTimeoutError": "asynccomm.errors",
    "WouldBlockError": "asynccomm.errors",
    "GradientBucket": "asynccomm.gradients.bucket",
    "GradientReducer": "asynccomm.gradients.reducer",
    "wrap": "asynccomm.interop.wrap",
    "BatchSendRecv": "asynccomm.comm.methods.p2p",
    "coalesce": "asynccomm.comm.comm",
    "Sink": "asynccomm.comm.methods.p2p",
    "Stream": "asynccomm.comm.methods.p2p",
    "CommOptions": "asynccomm.options",
    "Dispatched": "asynccomm.ops.experts",
    "Routing": "asynccomm.ops.routing",
    "RedOpType": "asynccomm.ops.reduce_op",
    "ReduceOp": "asynccomm.ops.reduce_op",
    "attach_queue": "asynccomm.queues.attaching",
    "EndOfQueueError": "asynccomm.queues.errors",
    "ParticipantLostError": "asynccomm.queues.errors",
    "QueueError": "asynccomm.queues.errors",
    "MessageQueue": "asynccomm.queues.queue",
    "QueueStatistics": "asynccomm.queues.queue",
    "run": "asynccomm.runner",
    "spawn": "asynccomm.cli.spawning",
    "register_safe": "asynccomm.serialization.values",
    "PrefixStore": "asynccomm.store.base",
    "Store": "asynccomm.store.base",
    "StoreClient": "asynccomm.store.client",
    "MemoryStore": "asynccomm.store.memory",
    "TorchStore": "asynccomm.store.torch_store",
    "__version__": "asynccomm.version",
    "SignalCmpOp": "asynccomm.ops.windows",
    "Window": "asynccomm.windows.window",
    "Work": "asynccomm.core.work",
}
_PACKAGES = ("blocking", "compat", "experts", "interop", "observe", "testing", "weights")
__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name in _PACKAGES:
        return import_module(f"asynccomm.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_HOMES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES, *_PACKAGES})
