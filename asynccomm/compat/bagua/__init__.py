"""Bagua's communication functions and process groups, over asynccomm.

::

    from asynccomm.compat import bagua

    bagua.init_process_group()
    bagua.allreduce(send_tensor, recv_tensor)
    group = bagua.new_group([0, 1])
    bagua.broadcast(tensor, 0, group.get_global_communicator())

On a thread without an event loop, calls block as in Bagua; in a coroutine the same calls are awaited.
"""

from asynccomm.compat.bagua.communication import allgather as allgather
from asynccomm.compat.bagua.communication import allgather_inplace as allgather_inplace
from asynccomm.compat.bagua.communication import allreduce as allreduce
from asynccomm.compat.bagua.communication import allreduce_inplace as allreduce_inplace
from asynccomm.compat.bagua.communication import alltoall as alltoall
from asynccomm.compat.bagua.communication import alltoall_inplace as alltoall_inplace
from asynccomm.compat.bagua.communication import barrier as barrier
from asynccomm.compat.bagua.communication import broadcast as broadcast
from asynccomm.compat.bagua.communication import broadcast_object as broadcast_object
from asynccomm.compat.bagua.communication import gather as gather
from asynccomm.compat.bagua.communication import gather_inplace as gather_inplace
from asynccomm.compat.bagua.communication import recv as recv
from asynccomm.compat.bagua.communication import reduce as reduce
from asynccomm.compat.bagua.communication import reduce_inplace as reduce_inplace
from asynccomm.compat.bagua.communication import reduce_scatter as reduce_scatter
from asynccomm.compat.bagua.communication import reduce_scatter_inplace as reduce_scatter_inplace
from asynccomm.compat.bagua.communication import scatter as scatter
from asynccomm.compat.bagua.communication import scatter_inplace as scatter_inplace
from asynccomm.compat.bagua.communication import send as send
from asynccomm.compat.bagua.groups import BaguaProcessGroup as BaguaProcessGroup
from asynccomm.compat.bagua.groups import BaguaSingleCommunicatorPy as BaguaSingleCommunicatorPy
from asynccomm.compat.bagua.groups import destroy_process_group as destroy_process_group
from asynccomm.compat.bagua.groups import from_torch_group as from_torch_group
from asynccomm.compat.bagua.groups import get_local_rank as get_local_rank
from asynccomm.compat.bagua.groups import get_rank as get_rank
from asynccomm.compat.bagua.groups import get_world_size as get_world_size
from asynccomm.compat.bagua.groups import init_process_group as init_process_group
from asynccomm.compat.bagua.groups import is_initialized as is_initialized
from asynccomm.compat.bagua.groups import new_group as new_group
from asynccomm.compat.bagua.reduction import ReduceOp as ReduceOp

__all__ = [
    "BaguaProcessGroup",
    "BaguaSingleCommunicatorPy",
    "ReduceOp",
    "allgather",
    "allgather_inplace",
    "allreduce",
    "allreduce_inplace",
    "alltoall",
    "alltoall_inplace",
    "barrier",
    "broadcast",
    "broadcast_object",
    "destroy_process_group",
    "from_torch_group",
    "gather",
    "gather_inplace",
    "get_local_rank",
    "get_rank",
    "get_world_size",
    "init_process_group",
    "is_initialized",
    "new_group",
    "recv",
    "reduce",
    "reduce_inplace",
    "reduce_scatter",
    "reduce_scatter_inplace",
    "scatter",
    "scatter_inplace",
    "send",
]
