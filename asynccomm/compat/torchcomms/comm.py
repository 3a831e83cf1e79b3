"""TorchComm, and the function that makes one."""

from __future__ import annotations

import asyncio
import uuid as uuids
from collections.abc import Callable, Coroutine, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from datetime import timedelta
from typing import Any, SupportsIndex, final

import torch
from torch import Tensor
from torch import distributed as dist

from asynccomm.backends.base import Backend
from asynccomm.comm.methods.windows import SIGNALS
from asynccomm.comm.new_comm import new_comm as new_awaitable
from asynccomm.comm.pairs import meet
from asynccomm.comm.pending import PendingComm
from asynccomm.compat import operators
from asynccomm.compat.either import EitherComm, at_once
from asynccomm.compat.torchcomms.allocator import MemAllocator
from asynccomm.compat.torchcomms.collectives import Hints, Limit, TorchCollectiveMethods
from asynccomm.compat.torchcomms.errors import made_or_refused, refusing
from asynccomm.compat.torchcomms.options import CommOptions
from asynccomm.compat.torchcomms.registration import Hooks, OpArguments, RemovableHandle
from asynccomm.compat.torchcomms.window import TorchCommWindow
from asynccomm.compat.torchcomms.work import TorchWork
from asynccomm.errors import BrokenError
from asynccomm.ops.windows import check_nbytes
from asynccomm.options import DEFAULT_TIMEOUT, check_bool, check_name, check_strings, seconds
from asynccomm.options import CommOptions as OwnOptions
from asynccomm.rendezvous.launchers import process_number
from asynccomm.rendezvous.spec import resolve_spec
from asynccomm.store.base import Store


def new_comm(
    backend: str,
    device: str | torch.device,
    name: str,
    abort_process_on_timeout_or_error: bool | None = None,
    timeout: timedelta | None = None,
    high_priority_stream: bool | None = None,
    store: dist.Store | Store | str | None = None,
    hints: Mapping[str, str] | None = None,
    *,
    enable_reconfigure: bool = False,
) -> Any:
    """Make a TorchComm of all ranks; in a coroutine, ``await`` the call. Collective: all ranks call it.

    Args:
        backend: a name from ``asynccomm.backend_names()``, or ``"auto"``.
        name: the same on all ranks, and unique among the open comms of this process.
        abort_process_on_timeout_or_error: end the process when the comm breaks; None: no.
        timeout: for connecting, and of an operation; None: 600 s.
        store: None: from the environment that launchers set. Rank and size come from RANK and WORLD_SIZE.
        enable_reconfigure: make a TorchComm without ranks, which :meth:`TorchComm.reconfigure` connects.

    Returns: a TorchComm; an awaitable of it where a loop runs.

    Raises: RuntimeError for wrong values and names in use; TypeError; the errors of ``asynccomm.new_comm``.
    """
    if hints is not None:
        check_strings(hints)
    options = CommOptions(bool(abort_process_on_timeout_or_error), store=store, hints=dict(hints or {}))
    options.high_priority_stream = bool(high_priority_stream)
    if timeout is not None:
        options.timeout = timeout
    place = torch.device(device)
    if enable_reconfigure:
        return at_once(TorchComm(name, backend, place, options, None))
    return made_or_refused(
        lambda: EitherComm.make(
            lambda: connecting(name, backend, place, options),
            lambda comm: TorchComm(name, backend, place, options, comm),
        )
    )


def connecting(name: str, backend: str, device: torch.device, options: CommOptions) -> PendingComm[Any]:
    """A comm in the making, by torchcomms' options."""
    return new_awaitable(
        backend,
        device,
        name=name,
        timeout=options.timeout,
        store=options.store,
        hints=options.hints,
        abort_process_on_timeout_or_error=options.abort_process_on_timeout_or_error,
        high_priority_stream=options.high_priority_stream,
    )


@final
class TorchComm(TorchCollectiveMethods):
    """A group of ranks with torchcomms' methods; made by :func:`new_comm` and :meth:`split`.

    Ranks are ranks in the comm. Any thread may call the methods.
    """

    _instead = "make a comm there, by new_comm() or comm.split()"

    def __init__(
        self, name: str, backend: str, device: torch.device, options: CommOptions, comm: EitherComm | None
    ) -> None:
        """Not for users: see :func:`new_comm`."""
        self._name, self._backend, self._device, self._options = name, backend, device, options
        self._either = comm
        self._finalized = self._aborted = False
        self._hooks = Hooks()
        self._hints: dict[str, str] | None = None
        self._handle = f"{name}:{uuids.uuid4().hex}"
        self.operator_name: str = operators.unique_name(f"torchcomms/{name}")  #: for ``functional``
        operators.register(self.operator_name, self)

    def _here(self) -> EitherComm:
        if self._finalized:
            raise RuntimeError(f"comm {self._name!r} is finalized")
        if self._either is None:
            raise RuntimeError(f"comm {self._name!r} has no ranks yet: call reconfigure()")
        return self._either

    # -- identity -----------------------------------------------------------------------------------------------------

    def get_rank(self) -> int:
        """This process's rank in the comm."""
        return self._comm.rank

    def get_size(self) -> int:
        """The number of ranks."""
        return self._comm.size

    def get_name(self) -> str:
        """The name given to ``new_comm`` or ``split``."""
        return self._name

    def get_device(self) -> torch.device:
        """The device of the comm's tensors."""
        return self._device

    def get_backend(self) -> str:
        """The name of the backend in use, and never ``"auto"`` on a connected comm."""
        return self._backend if self._either is None else self._either.comm.backend

    def get_options(self) -> CommOptions:
        """A copy of the comm's options."""
        return replace(self._options, hints=dict(self._options.hints))

    def unsafe_get_backend(self) -> Backend:
        """The backend object: an escape hatch, without promises of compatibility."""
        return self._comm.unsafe_get_backend()

    def get_mem_allocator(self) -> MemAllocator:
        """The allocator of tensors that operations of this comm need not copy to the ranks of the same host."""
        return MemAllocator(self._comm)

    @property
    def mem_allocator(self) -> MemAllocator:
        """As :meth:`get_mem_allocator`."""
        return self.get_mem_allocator()

    # -- groups and ends ----------------------------------------------------------------------------------------------

    def split(self, ranks: Sequence[SupportsIndex], name: str, hints: Hints = None, timeout: Limit = None) -> Any:
        """Make a comm of some ranks of this one, in their order; only these ranks pass the list, the others ``[]``.

        Returns: a TorchComm, or None if ``ranks`` is empty; an awaitable of it where a loop runs.

        Raises: RuntimeError if this rank is not in a list that is not empty, and for other wrong values.
        """
        here = self._here()

        def then(comm: EitherComm | None) -> TorchComm | None:
            child = None if comm is None else made(comm)
            for hook in list(self._hooks.on_split):
                hook(name, list(map(int, ranks)), child)
            return child

        def made(comm: EitherComm) -> TorchComm:
            options = self.get_options()
            if timeout is not None:
                options.timeout = timeout
            if hints is not None:
                options.hints = dict(hints)
            return TorchComm(name, self._backend, self._device, options, comm)

        return made_or_refused(
            lambda: here.derive(lambda: here.comm.split(ranks, name, hints=hints, timeout=timeout), then)
        )

    def finalize(self) -> Any:
        """Wait for the operations in flight, and free everything; in a coroutine, ``await`` the call.

        Raises: RuntimeError if the comm was finalized, or never connected.
        """
        here = self._here()
        self._finalized = True
        return here.close()

    def abort(self) -> None:
        """Stop all operations, here and on the other ranks, without waiting for them. Calls the abort hooks first."""
        comm = self._comm
        for hook in list(self._hooks.on_abort):
            hook()
        self._aborted = True
        comm.abort("abort() was called")

    def is_aborted(self) -> bool:
        """Whether the comm was aborted here, or has broken: operations raise the error then."""
        error = None if self._either is None else self._either.comm._session.error
        return self._aborted or isinstance(error, BrokenError)

    def is_abort_supported(self) -> bool:
        """True: on all backends."""
        return True

    # -- registered memory --------------------------------------------------------------------------------------------

    def tensor_register(self, tensor: Tensor) -> Any:
        """Register the memory of ``tensor`` with NCCL; in a coroutine, ``await`` the call. The comm keeps the tensor.

        Raises: NotImplementedError on other backends; RuntimeError for a tensor that is registered, has no elements, or
            is not contiguous.
        """
        return self._registration(self._here().comm.register, tensor)

    def tensor_deregister(self, tensor: Tensor) -> Any:
        """End the registration of ``tensor``, once earlier collectives are over; in a coroutine, ``await`` the call.

        Raises: RuntimeError for a tensor that is not registered.
        """
        return self._registration(self._here().comm.deregister, tensor)

    def _registration(self, call: Callable[[Tensor], Coroutine[Any, Any, None]], tensor: Tensor) -> Any:
        async def made() -> None:
            with refusing():
                await call(tensor)

        return self._here().awaited(made)

    # -- windows ------------------------------------------------------------------------------------------------------

    def window_allocate(
        self, window_size: SupportsIndex, cpu_buf: bool = False, signal_size: SupportsIndex = SIGNALS
    ) -> Any:
        """Make a window; in a coroutine, ``await`` the call. Collective: all ranks call it.

        Args:
            window_size: bytes of this rank's memory; the ranks may differ in it.
            cpu_buf: whether the memory is the host's; on the CPU it always is, and never on a GPU.
            signal_size: number of signals of each rank, the same on all ranks.

        Returns: a TorchCommWindow; an awaitable of it where a loop runs.

        Raises: RuntimeError for wrong values; NotImplementedError on a backend without windows; TypeError.
        """
        check_bool("cpu_buf", cpu_buf)
        here = self._here()
        if cpu_buf and here.comm.device.type != "cpu":
            with refusing():
                raise ValueError(
                    f"cpu_buf must be False: windows of backend {here.comm.backend!r} are in the GPU's memory"
                )

        async def made() -> TorchCommWindow:
            with refusing({"nbytes": "window_size", "signals": "signal_size"}):
                window = await here.comm.window(check_nbytes(window_size), signals=signal_size)
            return TorchCommWindow(window, here, self._run)

        return here.awaited(made)

    # -- defaults -----------------------------------------------------------------------------------------------------

    def set_timeout(self, timeout: timedelta) -> None:
        """Change the time limit of later operations without ``timeout``, on this rank alone."""
        with refusing():
            self._comm.set_timeout(timeout)
        self._options.timeout = timeout

    def set_hints(self, hints: Mapping[str, str]) -> None:
        """Use ``hints`` for later operations without hints of their own. Raises: TypeError."""
        self._here()
        check_strings(hints)
        self._hints = dict(hints)

    # -- hooks --------------------------------------------------------------------------------------------------------

    def register_pre_hook(self, hook: Callable[[str, int, OpArguments], object]) -> RemovableHandle:
        """Call ``hook(name, op_id, arguments)`` before each operation; an exception of the hook prevents it."""
        return self._hooks.register(self._hooks.before, hook)

    def register_post_hook(self, hook: Callable[[int, OpArguments], object]) -> RemovableHandle:
        """Call ``hook(op_id, arguments)`` once each call has sent its operation; ``arguments.work`` is its TorchWork.

        The TorchWork can be asked whether the operation is done; with ``async_op=False`` the call waits after the hook.
        """
        return self._hooks.register(self._hooks.after, hook)

    def register_abort_hook(self, hook: Callable[[], object]) -> RemovableHandle:
        """Call ``hook()`` in :meth:`abort`, before operations are stopped."""
        return self._hooks.register(self._hooks.on_abort, hook)

    # -- other ranks --------------------------------------------------------------------------------------------------

    def get_init_handle(self) -> str:
        """This process's handle for :meth:`reconfigure`, the same as long as the TorchComm exists."""
        return self._handle

    def reconfigure(
        self,
        uuid: str,
        init_handles: Sequence[str] | AbstractSet[str],
        timeout: Limit = None,
        hints: Hints = None,
    ) -> Any:
        """Connect to the processes of ``init_handles``, in place of the ranks so far; all of them call it.

        The processes meet at the comm's store, or that of the launcher, which must be alive. Where the launcher has no
        store of its own, the process with RANK 0 hosts the store: this process takes part in the first step, and later
        steps can leave it out as long as its comm is open. At a ``tcp://`` address that was given as the store, the
        new rank 0 hosts it.

        Args:
            uuid: of this step, the same on all ranks, and another for each step.
            init_handles: of all members, this process included. A list: in the order of the new ranks. A set: in the
                order of strings.

        Returns: a TorchWork that is done; an awaitable of it where a loop runs.

        Raises: RuntimeError for wrong values and TypeError, before anything changes; the errors of
            ``asynccomm.new_comm``.
        """
        if self._finalized:
            raise RuntimeError(f"comm {self._name!r} is finalized")
        if not isinstance(init_handles, (Sequence, AbstractSet)):
            raise TypeError(f"init_handles must be a list or a set of handles, got {init_handles!r}")
        handles = sorted(init_handles) if isinstance(init_handles, AbstractSet) else list(init_handles)
        if self._handle not in handles or len(set(handles)) < len(handles):
            raise RuntimeError(f"init_handles must be different, and have this process's handle, got {handles}")
        options = self.get_options()
        if timeout is not None:
            options.timeout = timeout
        if hints is not None:
            check_strings(hints)
            options.hints = dict(hints)
        with refusing({"name": "uuid"}):  # a wrong value is refused before the ranks so far are left
            pending = self._meeting(f"{self._name}/{uuid}", handles.index(self._handle), len(handles), options)
        if asyncio._get_running_loop() is not None:
            return self._reconfigured(pending)
        if (old := self._leave()) is not None:
            old.close()
        with refusing():
            work = TorchWork(EitherComm.make(lambda: pending, self._enter).comm.barrier())
        work.wait()
        return work

    def _meeting(self, name: str, rank: int, size: int, options: CommOptions) -> PendingComm[Any]:
        check_name(name)
        ours = OwnOptions(
            timeout=seconds("timeout", options.timeout, DEFAULT_TIMEOUT),
            abort_process_on_timeout_or_error=options.abort_process_on_timeout_or_error,
            high_priority_stream=options.high_priority_stream,
        )
        # not the new rank 0: the host so far may keep the port, or the launcher's address may be another machine's
        number = process_number(rank) if options.store is None else rank
        place = resolve_spec(options.store, number, max(size, number + 1))
        return meet(place, name, rank, size, self._backend, self._device, ours, options.hints)

    async def _reconfigured(self, pending: PendingComm[Any]) -> TorchWork:
        if (old := self._leave()) is not None:
            await old.close()
        with refusing():
            work = TorchWork((await EitherComm.make(lambda: pending, self._enter)).comm.barrier())
        await work
        return work

    def _leave(self) -> EitherComm | None:
        old, self._either = self._either, None
        return old

    def _enter(self, comm: EitherComm | None) -> EitherComm:
        assert comm is not None
        self._either, self._aborted = comm, False
        return comm
