"""vLLM's GroupCoordinator, over asynccomm.

::

    from asynccomm.compat.vllm import GroupCoordinator, init_distributed_environment

    init_distributed_environment()
    tp = GroupCoordinator([[0, 1], [2, 3]], local_rank, "gloo", use_device_communicator=True, group_name="tp")
    total = tp.all_reduce(tensor)

On a thread without an event loop, calls block as in vLLM; in a coroutine the same calls are awaited.
"""

from asynccomm.compat.vllm.coordinator import GroupCoordinator as GroupCoordinator
from asynccomm.compat.vllm.message_queue import MessageQueue as MessageQueue
from asynccomm.compat.vllm.world import destroy_distributed_environment as destroy_distributed_environment
from asynccomm.compat.vllm.world import init_distributed_environment as init_distributed_environment

__all__ = ["GroupCoordinator", "MessageQueue", "destroy_distributed_environment", "init_distributed_environment"]
