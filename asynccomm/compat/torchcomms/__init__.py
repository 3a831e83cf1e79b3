"""torchcomms' names and arguments, over asynccomm.

::

    from asynccomm.compat import torchcomms

    comm = torchcomms.new_comm("gloo", torch.device("cpu"), name="main")
    work = comm.all_reduce(tensor, torchcomms.ReduceOp.SUM, async_op=True)
    work.wait()
    comm.finalize()

On a thread without an event loop, calls block as in torchcomms. In a coroutine the same calls are awaited: ``comm =
await torchcomms.new_comm(...)``, ``await work``, ``await comm.finalize()``; functions of ``objcol`` as well.
"""

from asynccomm.compat.torchcomms import device_mesh as device_mesh
from asynccomm.compat.torchcomms import functional as functional
from asynccomm.compat.torchcomms import hooks as hooks
from asynccomm.compat.torchcomms import objcol as objcol
from asynccomm.compat.torchcomms.batch import BatchSendRecv as BatchSendRecv
from asynccomm.compat.torchcomms.batch import P2POp as P2POp
from asynccomm.compat.torchcomms.batch import P2POpType as P2POpType
from asynccomm.compat.torchcomms.comm import TorchComm as TorchComm
from asynccomm.compat.torchcomms.comm import new_comm as new_comm
from asynccomm.compat.torchcomms.options import BatchP2POptions as BatchP2POptions
from asynccomm.compat.torchcomms.options import CommOptions as CommOptions
from asynccomm.compat.torchcomms.registration import OpArguments as OpArguments
from asynccomm.compat.torchcomms.registration import RemovableHandle as RemovableHandle
from asynccomm.compat.torchcomms.window import TorchCommWindow as TorchCommWindow
from asynccomm.compat.torchcomms.work import TorchWork as TorchWork
from asynccomm.ops.reduce_op import RedOpType as RedOpType
from asynccomm.ops.reduce_op import ReduceOp as ReduceOp
from asynccomm.ops.windows import SignalCmpOp as SignalCmpOp

__all__ = [
    "BatchP2POptions",
    "BatchSendRecv",
    "CommOptions",
    "OpArguments",
    "P2POp",
    "P2POpType",
    "RedOpType",
    "ReduceOp",
    "RemovableHandle",
    "SignalCmpOp",
    "TorchComm",
    "TorchCommWindow",
    "TorchWork",
    "device_mesh",
    "functional",
    "hooks",
    "new_comm",
    "objcol",
]
