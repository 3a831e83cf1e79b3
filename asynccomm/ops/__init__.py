"""Every operation as a frozen value, with all its argument checks.

``AllReduce.of(group, tensor, op)`` checks the arguments of one call, raises ``TypeError`` or ``ValueError`` naming the
argument and the value, and returns a :class:`Call`: the description (an :class:`Op`), the tensors to read, the tensors
to write, and the result of ``await``. A backend never has to check an argument again.

Rules common to all operations:

- Tensors are dense and live on the comm's device. Any shape, strides and zero sizes are fine, except that a written
  tensor must not overlap itself (``expand``).
- All tensors of one call have one dtype, except that a complex tensor and a tensor of the corresponding real type go
  together: a complex number then counts as two elements.
- Data that is only moved is described in reals, so some ranks may pass complex tensors and others real ones.
- Where one tensor stands for all ranks ("single" forms), only the number of elements and the flat, row-major order
  count: ``(size * n, ...)`` (concatenated) and ``(size, n, ...)`` (stacked) are the same.
- A rank is anything with ``__index__`` except a bool.
"""

from asynccomm.ops.base import Begin as Begin
from asynccomm.ops.base import Call as Call
from asynccomm.ops.base import Fill as Fill
from asynccomm.ops.base import GroupedOp as GroupedOp
from asynccomm.ops.base import Op as Op
from asynccomm.ops.base import Parcel as Parcel
from asynccomm.ops.base import PayloadAllocator as PayloadAllocator
from asynccomm.ops.base import PeerOp as PeerOp
from asynccomm.ops.base import Several as Several
from asynccomm.ops.base import TensorOp as TensorOp
from asynccomm.ops.base import layout_of as layout_of
from asynccomm.ops.movement import AllGather as AllGather
from asynccomm.ops.movement import AllGatherSingle as AllGatherSingle
from asynccomm.ops.movement import AllToAll as AllToAll
from asynccomm.ops.movement import AllToAllSingle as AllToAllSingle
from asynccomm.ops.movement import Barrier as Barrier
from asynccomm.ops.movement import Broadcast as Broadcast
from asynccomm.ops.movement import Gather as Gather
from asynccomm.ops.movement import Scatter as Scatter
from asynccomm.ops.p2p import Recv as Recv
from asynccomm.ops.p2p import Send as Send
from asynccomm.ops.parcels import MessageSpace as MessageSpace
from asynccomm.ops.parcels import Parcels as Parcels
from asynccomm.ops.parcels import PeerParcel as PeerParcel
from asynccomm.ops.parcels import RecvParcel as RecvParcel
from asynccomm.ops.parcels import SendParcel as SendParcel
from asynccomm.ops.reductions import AllReduce as AllReduce
from asynccomm.ops.reductions import Reduce as Reduce
from asynccomm.ops.reductions import ReduceScatter as ReduceScatter
from asynccomm.ops.reductions import ReduceScatterSingle as ReduceScatterSingle
from asynccomm.ops.windows import MakeWindow as MakeWindow
from asynccomm.ops.windows import SignalCmpOp as SignalCmpOp
from asynccomm.ops.windows import WindowAccumulate as WindowAccumulate
from asynccomm.ops.windows import WindowFence as WindowFence
from asynccomm.ops.windows import WindowGet as WindowGet
from asynccomm.ops.windows import WindowInfo as WindowInfo
from asynccomm.ops.windows import WindowOp as WindowOp
from asynccomm.ops.windows import WindowPut as WindowPut
from asynccomm.ops.windows import WindowSignal as WindowSignal
from asynccomm.ops.windows import WindowTransfer as WindowTransfer
from asynccomm.ops.windows import WindowWait as WindowWait
