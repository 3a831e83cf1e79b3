"""GroupCoordinator: vLLM's group of processes, with a comm for tensors and one for objects."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Final, final

import torch

from asynccomm.comm.comm import Comm, GraphCapture
from asynccomm.comm.methods.tensor_dicts import GatheredDict
from asynccomm.compat import operators
from asynccomm.compat.either import EitherComm, at_once, in_order, outcome, same
from asynccomm.compat.vllm.broadcasters import GroupQueues
from asynccomm.compat.vllm.experts import GroupExperts
from asynccomm.compat.vllm.message_queue import MessageQueue
from asynccomm.compat.vllm.world import environment
from asynccomm.core.tasks import shielded
from asynccomm.core.work import Work
from asynccomm.errors import describe_exception
from asynccomm.ops.renamed import Renamed
from asynccomm.ops.validation import as_index

_FROM: Final = Renamed({"root": "src", "object_list": "obj_list"})


@final
class GroupCoordinator(GroupExperts, GroupQueues, Awaitable["GroupCoordinator"]):
    """A group of processes; all processes make the same groups in the same order, and a refused call counts.

    On a thread without a loop the constructor connects the group, and methods block. In a coroutine,
    ``group = await GroupCoordinator(...)``, and await the methods' results.

    ``src`` and ``dst`` are ranks in the group. ``ranks``, ``first_rank``, ``next_rank`` and so on are global.

    Args:
        group_ranks: lists of global ranks, without common ranks, one of them with this process; each list is a group,
            in the order of its ranks.
        local_rank: this process's number on its host.
        torch_distributed_backend: the transport is that of ``init_distributed_environment``; ``"nccl"`` needs it there.
        use_device_communicator: without it, ``dispatch`` and ``combine`` leave the tokens where they are.
        use_message_queue_broadcaster: make ``mq_broadcaster``, a queue by which rank 0 broadcasts objects, so that it
            does not wait for the other ranks. None in a group of one rank.
        group_name: None: "anonymous". ``unique_name`` has a number appended, and operators find the group by it.

    Raises: RuntimeError before ``init_distributed_environment``; ValueError naming the argument; errors of connecting,
    after which nothing is left open. Cancelling the await is safe; the other processes then get an error.
    """

    _instead = "make the group there"

    def __init__(
        self,
        group_ranks: Sequence[Sequence[int]],
        local_rank: int,
        torch_distributed_backend: object,
        use_device_communicator: bool,
        use_message_queue_broadcaster: bool = False,
        group_name: str | None = None,
    ) -> None:
        world = environment()
        # not the unique name: processes may count differently. Also of a refused call: the other processes count theirs
        label = world.name_of_next(group_name or "anonymous")
        self._device_comm: EitherComm | None = None
        self._cpu_comm: EitherComm | None = None
        self._queues: list[MessageQueue] = []
        self._use_device_communicator = use_device_communicator
        self.mq_broadcaster: MessageQueue | None = None
        self.rank: int = world.cpu.comm.rank
        self.local_rank: int = local_rank
        if str(torch_distributed_backend) == "nccl" and world.device.comm.backend != "nccl":
            raise ValueError(
                "torch_distributed_backend 'nccl' needs init_distributed_environment(backend='nccl'), which connects "
                f"the GPUs; this environment uses {world.device.comm.backend!r}"
            )
        self.ranks: list[int] = _own(group_ranks, self.rank, world.cpu.comm.size)
        self.world_size: int = len(self.ranks)
        self.rank_in_group: int = self.ranks.index(self.rank)
        self.device: torch.device = world.device.comm.device
        self.unique_name: str = operators.unique_name(group_name or "anonymous")
        self._weights_only = world.weights_only
        parents = [world.cpu] if world.device is world.cpu else [world.cpu, world.device]
        self._connected = False
        steps: list[Callable[[], Any]] = [
            partial(parent.derive, partial(parent.comm.split, self.ranks, label), self._join) for parent in parents
        ]
        if use_message_queue_broadcaster and self.world_size > 1:
            steps.append(self.create_mq_broadcaster)
        self._connecting: Any = self._connect(steps)

    def _connect(self, steps: Sequence[Callable[[], Any]]) -> Any:
        """Run the steps. If one fails, the other ranks of the comms made so far get an error, and the comms close."""
        if asyncio._get_running_loop() is not None:
            return self._connect_awaited(steps)
        try:
            return in_order(steps, self._finish)
        except BaseException as exc:
            self._abort(exc)
            self.destroy()
            raise

    async def _connect_awaited(self, steps: Sequence[Callable[[], Any]]) -> None:
        try:
            await in_order(steps, self._finish)
        except BaseException as exc:
            self._abort(exc)
            await shielded(self.destroy())
            raise

    def _abort(self, error: BaseException) -> None:
        for comm in (self._device_comm, self._cpu_comm):
            if comm is not None:
                comm.comm.abort(f"group {self.unique_name!r} could not be made: {describe_exception(error)}")

    def _join(self, comm: EitherComm | None) -> None:
        assert comm is not None
        self._cpu_comm, self._device_comm = self._cpu_comm or comm, comm

    def _finish(self, _: object) -> None:
        self.mq_broadcaster = self._queues[0] if self._queues else None
        self._connected = True
        operators.register(self.unique_name, self)

    def __await__(self) -> Generator[Any, None, GroupCoordinator]:
        if not self._connected:
            yield from self._connecting.__await__()
        return self

    def _on_device(self) -> EitherComm:
        if self._device_comm is None:
            raise RuntimeError(f"group {self.unique_name!r} was destroyed, or not awaited")
        return self._device_comm

    def _on_cpu(self) -> EitherComm:
        self._on_device()
        assert self._cpu_comm is not None
        return self._cpu_comm

    # -- ranks --------------------------------------------------------------------------------------------------------

    @property
    def device_group(self) -> Comm:
        """The comm of the tensors."""
        return self._on_device().comm

    @property
    def cpu_group(self) -> Comm:
        """The comm of the objects and of barriers; on the CPU the same as ``device_group``."""
        return self._on_cpu().comm

    @property
    def first_rank(self) -> int:
        """The global rank of the group's first process."""
        return self.ranks[0]

    @property
    def last_rank(self) -> int:
        """The global rank of the group's last process."""
        return self.ranks[-1]

    @property
    def is_first_rank(self) -> bool:
        """Whether this process is the first."""
        return self.rank_in_group == 0

    @property
    def is_last_rank(self) -> bool:
        """Whether this process is the last."""
        return self.rank_in_group == self.world_size - 1

    @property
    def next_rank(self) -> int:
        """The global rank of the next process; after the last comes the first."""
        return self.ranks[(self.rank_in_group + 1) % self.world_size]

    @property
    def prev_rank(self) -> int:
        """The global rank of the previous process; before the first comes the last."""
        return self.ranks[self.rank_in_group - 1]

    def _instead_of(self, group: object) -> GroupCoordinator:
        """``group``, or for None this group. Raises: TypeError."""
        if group is not None and not isinstance(group, GroupCoordinator):
            raise TypeError(f"group must be a GroupCoordinator, got {group!r}")
        return self if group is None else group

    # -- objects ------------------------------------------------------------------------------------------------------

    def barrier(self) -> Any:
        """Wait until every rank has called it; on the CPU's comm."""
        return outcome(self._on_cpu().call(self.cpu_group.barrier), same)

    def broadcast_object(self, obj: Any = None, src: int = 0) -> Any:
        """The ``obj`` of rank ``src``, on all ranks; from rank 0 through ``mq_broadcaster``, if the group has it."""
        if self.world_size == 1:
            return at_once(obj)
        if self.mq_broadcaster is not None and src == 0:
            return self.mq_broadcaster.broadcast_object(obj)
        with _FROM:
            work = self._on_cpu().call(self.cpu_group.broadcast_object, obj, src, weights_only=self._weights_only)
        return outcome(work, same)

    def broadcast_object_list(self, obj_list: list[Any], src: int = 0, group: GroupCoordinator | None = None) -> Any:
        """Replace the items of ``obj_list`` by those of rank ``src``, and give the list.

        Args:
            group: the ranks; None: this group.
        """
        here = self._instead_of(group)._on_cpu()
        with _FROM:
            work = here.call(here.comm.broadcast_object_list, obj_list, src, weights_only=self._weights_only)
        return outcome(work, same)

    def send_object(self, obj: Any, dst: int) -> Any:
        """Send ``obj`` to rank ``dst``, which is another rank."""
        self._check_other("dst", dst)
        method = self.cpu_group.send_object
        return outcome(self._on_cpu().call(method, obj, dst, weights_only=self._weights_only), same)

    def recv_object(self, src: int) -> Any:
        """The object that rank ``src`` sends, which is another rank."""
        self._check_other("src", src)
        method = self.cpu_group.recv_object
        return outcome(self._on_cpu().call(method, src, weights_only=self._weights_only), same)

    # -- dicts --------------------------------------------------------------------------------------------------------

    def broadcast_tensor_dict(
        self,
        tensor_dict: dict[Any, Any] | None = None,
        src: int = 0,
        group: GroupCoordinator | None = None,
        metadata_group: object = None,
    ) -> Any:
        """The ``tensor_dict`` of rank ``src``, on all ranks.

        Args:
            group: the ranks; None: this group.
            metadata_group: not used: the metadata are part of the same message.
        """
        here = self._instead_of(group)._on_device()
        if here.comm.size == 1:
            return at_once(tensor_dict)
        with _FROM:
            work = here.call(here.comm.broadcast_tensor_dict, tensor_dict, src, weights_only=self._weights_only)
        return outcome(work, same)

    def send_tensor_dict(
        self,
        tensor_dict: dict[Any, Any],
        dst: int | None = None,
        all_gather_group: GroupCoordinator | None = None,
        all_gather_tensors: Mapping[Any, bool] | None = None,
    ) -> Any:
        """Send ``tensor_dict`` to rank ``dst``; None: the next rank. Gives None; in a group of one rank the dict.

        Args:
            all_gather_group: the ranks of this stage, which all send the same tensors: each sends a share of them, and
                the receivers gather the shares. The receivers give their group of the same size.
            all_gather_tensors: by key, exceptions: False for tensors that differ among the ranks of the group.
        """
        if self.world_size == 1:
            return at_once(tensor_dict)
        peer = (self.rank_in_group + 1) % self.world_size if dst is None else dst
        self._check_other("dst", peer)
        work = self._on_device().call(
            self.device_group.send_tensor_dict,
            tensor_dict,
            peer,
            all_gather_group=_shares(all_gather_group),
            all_gather_tensors=all_gather_tensors,
            weights_only=self._weights_only,
        )
        return outcome(work, same)

    def recv_tensor_dict(
        self,
        src: int | None = None,
        all_gather_group: GroupCoordinator | None = None,
        all_gather_tensors: Mapping[Any, bool] | None = None,
    ) -> Any:
        """The dict that rank ``src`` sends; None: the previous rank. None in a group of one rank.

        Args:
            all_gather_group: if the sender gave one.
            all_gather_tensors: not used: the sender's choice comes with the dict.
        """
        if self.world_size == 1:
            return at_once(None)
        peer = (self.rank_in_group - 1) % self.world_size if src is None else src
        self._check_other("src", peer)
        here = self._on_device()
        received: Work[Any] | GatheredDict = here.call(
            here.comm.recv_tensor_dict,
            peer,
            all_gather_group=_shares(all_gather_group),
            weights_only=self._weights_only,
        )
        if isinstance(received, Work):
            return outcome(received, same)

        async def gathered() -> dict[Any, Any]:
            return await received

        return here.awaited(gathered)

    # -- graphs and ends ----------------------------------------------------------------------------------------------

    @contextmanager
    def graph_capture(self, graph_capture_context: GraphCapture | None = None) -> Iterator[GraphCapture]:
        """A stream for capturing CUDA graphs with operations of this group; see ``asynccomm.Comm.graph_capture``.

        Args:
            graph_capture_context: of another group, to capture on the same stream; None: a new stream.
        """
        stream = None if graph_capture_context is None else graph_capture_context.stream
        with self.device_group.graph_capture(stream) as capture:
            yield capture

    def destroy(self) -> Any:
        """Close the group's queues and comms, and forget its name; in a coroutine, ``await`` the call. Idempotent."""
        operators.unregister(self.unique_name)
        cpu, device, self._cpu_comm, self._device_comm = self._cpu_comm, self._device_comm, None, None
        comms = [comm for comm in dict.fromkeys([device, cpu]) if comm is not None]
        queues, self._queues, self.mq_broadcaster = self._queues, [], None
        return in_order([*[queue.close for queue in queues], *[comm.close for comm in comms]], _nothing)

    def __repr__(self) -> str:
        return f"<GroupCoordinator {self.unique_name!r} of ranks {self.ranks}, rank {self.rank_in_group} in the group>"


def _own(group_ranks: Sequence[Sequence[int]], rank: int, size: int) -> list[int]:
    """The list with ``rank``. Raises: ValueError for lists that are no groups of ``size`` processes."""
    if not isinstance(group_ranks, Sequence) or not all(isinstance(group, Sequence) for group in group_ranks):
        raise TypeError(f"group_ranks must be a list of lists of ranks, got {group_ranks!r}")
    known = [each for group in group_ranks for each in group]
    if any(as_index(each) is None for each in known):
        raise TypeError(f"group_ranks must be a list of lists of ranks, got {group_ranks!r}")
    if len(set(known)) < len(known) or not all(0 <= each < size for each in known):
        raise ValueError(f"group_ranks must be lists of different ranks in [0, {size}), got {group_ranks!r}")
    for group in group_ranks:
        if rank in group:
            return list(group)
    raise ValueError(f"group_ranks must have this process, rank {rank}, in one of the lists, got {group_ranks!r}")


def _shares(group: GroupCoordinator | None) -> Comm | None:
    """The comm that shares are gathered in; None: there are no shares. Raises: TypeError."""
    if group is not None and not isinstance(group, GroupCoordinator):
        raise TypeError(f"all_gather_group must be a GroupCoordinator, got {group!r}")
    return None if group is None or group.world_size == 1 else group.device_group


def _nothing(_: object) -> None:
    """The result of closing."""
