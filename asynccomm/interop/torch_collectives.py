"""The operations of a torch group, under the names of all versions of torch.

Each operation makes one or several calls of a comm, and returns a TorchWork. A list of tensors must have one entry
where torch's interface allows several GPUs of one process, which no backend supports any more. As in torch's own
groups, options may be omitted, and a tensor may be passed without a list.
"""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Final, final

import torch
from torch import Tensor

from asynccomm.blocking.loop_thread import detached
from asynccomm.comm.comm import coalesce
from asynccomm.comm.scopes import CoalesceScope
from asynccomm.core.work import Work
from asynccomm.errors import MonitoredBarrierError
from asynccomm.interop.group_comms import GroupComms
from asynccomm.interop.torch_version import checked_limit, time_limit, uncompiled
from asynccomm.interop.torch_words import monitored_barrier_failed
from asynccomm.interop.torch_work import TorchWork
from asynccomm.observe.profiling import is_profiling, recorded
from asynccomm.ops.reduce_op import ReduceOp
from asynccomm.ops.renamed import Renamed
from asynccomm.ops.validation import check_all_rows

NAME: Final = "asynccomm"  #: of the backend, in torch
DEVICES: Final = ("cpu", "cuda")
# By method of the comm: the names of its arguments in torch's functions, where they differ. torch itself checks
# ``src`` and ``dst``, but neither ``group_src`` nor ``group_dst``
_TORCHS: Final = {
    "broadcast": Renamed({"root": "group_src"}),
    "reduce": Renamed({"root": "group_dst"}),
    "all_gather_single": Renamed({"output": "output_tensor", "input": "input_tensor"}),
    "gather": Renamed({"output_list": "gather_list", "input": "tensor", "root": "group_dst"}),
    "gather_single": Renamed({"output": "gather_tensor", "input": "tensor", "root": "group_dst"}),
    "scatter": Renamed({"output": "tensor", "input_list": "scatter_list", "root": "group_src"}),
    "all_to_all": Renamed({"output_list": "output_tensor_list", "input_list": "input_tensor_list"}),
}


@final
class _LastWork(threading.local):
    """The Work of this thread's last call, as long as another reference holds it."""

    work: weakref.ref[TorchWork] | None = None


@final
class _TorchScope:
    """The operations of a thread between ``start_coalescing`` and ``end_coalescing``."""

    def __init__(self, scope: CoalesceScope) -> None:
        self.scope = scope
        self.works: list[TorchWork] = []
        self.error: Exception | None = None  #: of the first call that was refused


@uncompiled
class TorchCollectives:
    """Mixin for torch's ``Backend`` or ``ProcessGroup``. Call ``set_up`` before all other methods."""

    def set_up(self, comms: GroupComms) -> None:
        """Not for users."""
        self.comms = comms
        self._called = 0  # number of collectives
        self._last = _LastWork()
        self._scopes: dict[int, _TorchScope] = {}  # by thread

    def taken(self) -> TorchWork | None:
        """Take the Work of this thread's last call; None if there was no call since, or torch has dropped the Work."""
        last, self._last.work = self._last.work, None
        return None if last is None else last()

    # -- reductions ---------------------------------------------------------------------------------------------------

    def allreduce(self, tensors: Any, opts: Any = None, timeout: Any = None, *, op: Any = None) -> TorchWork:
        outputs, op, limit = _several(tensors), _op(opts, op), _limit(opts, timeout)
        if outputs[0].layout is torch.sparse_coo:
            return self._sparse(outputs, op, limit)
        comm = self.comms.of(outputs[0])
        if len(outputs) == 1:
            return self._start(outputs, comm.all_reduce, outputs[0], op, timeout=limit)
        return self._start(outputs, comm.all_reduce_coalesced, outputs, op, timeout=limit)

    def allreduce_sparse(self, tensors: Any, opts: Any = None) -> TorchWork:
        return self.allreduce(tensors, opts)

    def allreduce_coalesced(self, tensors: Any, opts: Any = None) -> TorchWork:
        outputs = _several(tensors)
        comm = self.comms.of(outputs[0])
        return self._start(outputs, comm.all_reduce_coalesced, outputs, _op(opts), timeout=_limit(opts))

    def reduce(
        self, tensors: Any, opts: Any = None, op: Any = None, timeout: Any = None, *, root: Any = None
    ) -> TorchWork:
        tensor = _one(tensors)
        if root is None:
            root, opts = (opts, None) if isinstance(opts, int) else (opts.rootRank, opts)
        comm = self.comms.of(tensor)
        return self._start([tensor], comm.reduce, tensor, root, _op(opts, op), timeout=_limit(opts, timeout))

    def reduce_scatter(
        self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None, *, op: Any = None
    ) -> TorchWork:
        output = _one(outputs)
        parts = inputs if isinstance(outputs, Tensor) else _one(inputs)
        comm = self.comms.of(output)
        return self._start([output], comm.reduce_scatter, output, parts, _op(opts, op), timeout=_limit(opts, timeout))

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> TorchWork:
        comm = self.comms.of(output)
        return self._start([output], comm.reduce_scatter_single, output, input, _op(opts), timeout=_limit(opts))

    def _reduce_scatter_base(self, output: Tensor, input: Tensor, opts: Any = None) -> TorchWork:
        return self.reduce_scatter_single(output, input, opts)

    def reduce_scatter_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> TorchWork:
        comm = self.comms.of(outputs[0])
        return self._start(
            list(outputs), comm.reduce_scatter_coalesced, outputs, inputs, _op(opts), timeout=_limit(opts)
        )

    def reduce_scatter_tensor_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> TorchWork:
        return self.reduce_scatter_single_coalesced(outputs, inputs, opts)

    # -- data movement ------------------------------------------------------------------------------------------------

    def broadcast(self, tensors: Any, opts: Any = None, timeout: Any = None, *, root: Any = None) -> TorchWork:
        tensor = _one(tensors)
        if root is None:
            root = opts if isinstance(opts, int) else opts.rootRank
        return self._start([tensor], self.comms.of(tensor).broadcast, tensor, root, timeout=_limit(opts, timeout))

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None) -> TorchWork:
        tensor = _one(inputs)
        mine = outputs if isinstance(inputs, Tensor) else _one(outputs)
        comm = self.comms.of(tensor)
        return self._start([list(mine)], comm.all_gather, mine, tensor, timeout=_limit(opts, timeout))

    def allgather_coalesced(self, output_lists: Any, inputs: Any, opts: Any = None) -> TorchWork:
        comm = self.comms.of(inputs[0])
        result = [list(outputs) for outputs in output_lists]
        return self._start(result, comm.all_gather_coalesced, result, inputs, timeout=_limit(opts))

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> TorchWork:
        comm = self.comms.of(output)
        return self._start([output], comm.all_gather_single, output, input, timeout=_limit(opts))

    def _allgather_base(self, output: Tensor, input: Tensor, opts: Any = None) -> TorchWork:
        return self.all_gather_single(output, input, opts)

    def all_gather_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> TorchWork:
        comm, limit = self.comms.of(outputs[0]), _limit(opts)
        pairs = list(zip(outputs, inputs, strict=True))

        def start() -> list[Work[Any]]:
            with comm.coalesce():
                return [comm.all_gather_single(output, input, timeout=limit) for output, input in pairs]

        return self._start_several("all_gather_single_coalesced", list(outputs), start)

    def allgather_into_tensor_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> TorchWork:
        return self.all_gather_single_coalesced(outputs, inputs, opts)

    def gather(
        self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None, *, root: Any = None
    ) -> TorchWork:
        tensor = _one(inputs)
        if root is None:
            root = opts if isinstance(opts, int) else opts.rootRank
        mine = outputs if isinstance(inputs, Tensor) else outputs[0] if outputs else []
        result = [list(mine)] if mine else []
        return self._start(result, self.comms.of(tensor).gather, mine, tensor, root, timeout=_limit(opts, timeout))

    def gather_single(self, output: Any, input: Tensor, opts: Any = None) -> TorchWork:
        here = opts.rootRank == self.comms.rank
        comm = self.comms.of(input)
        mine = output if here else None
        return self._start([output], comm.gather_single, mine, input, opts.rootRank, timeout=_limit(opts))

    def gather_into_tensor(self, output: Any, input: Tensor, opts: Any = None) -> TorchWork:
        return self.gather_single(output, input, opts)

    def scatter(
        self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None, *, root: Any = None
    ) -> TorchWork:
        output = _one(outputs)
        if root is None:
            root = opts if isinstance(opts, int) else opts.rootRank
        parts = inputs if isinstance(outputs, Tensor) else inputs[0] if inputs else []
        return self._start([output], self.comms.of(output).scatter, output, parts, root, timeout=_limit(opts, timeout))

    def alltoall(self, outputs: Any, inputs: Any, opts: Any = None) -> TorchWork:
        comm = self.comms.of(outputs[0])
        return self._start(list(outputs), comm.all_to_all, outputs, inputs, timeout=_limit(opts))

    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        output_split_sizes: Sequence[int] = (),
        input_split_sizes: Sequence[int] = (),
        opts: Any = None,
    ) -> TorchWork:
        comm, limit = self.comms.of(output), _limit(opts)
        if not output_split_sizes and not input_split_sizes:
            return self._start([output], comm.all_to_all_single, output, input, timeout=limit)
        try:
            receives = self._rows("output", output, output_split_sizes)
            sends = self._rows("input", input, input_split_sizes)
        except Exception as exc:
            if not self._kept(exc):
                raise
            return TorchWork((), [output])
        return self._start([output], comm.all_to_all_v_single, output, input, receives, sends, timeout=limit)

    def alltoall_base(
        self, output: Tensor, input: Tensor, receives: Sequence[int], sends: Sequence[int], opts: Any = None
    ) -> TorchWork:
        return self.all_to_all_single(output, input, receives, sends, opts)

    def _rows(self, name: str, tensor: Tensor, sizes: Sequence[int]) -> list[int]:
        """The split sizes. A comm's tensors may have more rows than these add up to, torch's may not."""
        size = self.comms.size
        if sizes:
            return check_all_rows(f"{name}_split_sizes", sizes, name, tensor, size)
        if not tensor.dim() or tensor.shape[0] % size:
            raise ValueError(f"{name} must divide evenly among {size} ranks, got shape {tuple(tensor.shape)}")
        return [tensor.shape[0] // size] * size

    def barrier(self, opts: Any = None, timeout: Any = None) -> TorchWork:
        device = getattr(opts, "device", None)
        comm = self.comms.any() if device is None else self.comms.connect(device)
        return self._start([], comm.barrier, timeout=_limit(opts, timeout))

    def monitored_barrier(self, opts: Any = None, wait_all_ranks: bool = False) -> None:
        """Block until all ranks have arrived. Raises: torch's RuntimeError, which names the missing ranks."""
        limit = checked_limit(opts) if isinstance(opts, timedelta) else _limit(opts)
        with detached():
            work = self.comms.any().monitored_barrier(limit, wait_all_ranks)
            try:
                work.wait()
            except MonitoredBarrierError as exc:
                waited = self.comms.timeout if limit is None else limit
                raise monitored_barrier_failed(exc, self.comms.rank, waited, wait_all_ranks) from exc

    # -- point to point -----------------------------------------------------------------------------------------------

    def send(self, tensors: Any, dst: int, tag: int = 0) -> TorchWork:
        return self._message("send", tensors, dst, tag)

    def recv(self, tensors: Any, src: int, tag: int = 0) -> TorchWork:
        return self._message("recv", tensors, src, tag)

    def recv_anysource(self, tensors: Any, tag: int = 0) -> TorchWork:
        return self._message("recv", tensors, None, tag)

    def _message(self, method: str, tensors: Any, peer: int | None, tag: int) -> TorchWork:
        tensor = _one(tensors)
        try:
            call = getattr(self.comms.of(tensor), method)
        except Exception as exc:
            if not self._kept(exc):
                raise
            return TorchWork((), [tensor])
        return self._start([tensor], call, tensor, peer, tag, collective=False)

    # -- coalescing ---------------------------------------------------------------------------------------------------

    def start_coalescing(self) -> None:
        """Defer this thread's operations until ``end_coalescing``."""
        thread = threading.get_ident()
        left = self._scopes.pop(thread, None)
        with detached():
            if left is not None:  # by an exception, which torch does not report
                error = RuntimeError("it was left by an exception")
                left.scope.__exit__(RuntimeError, error, None)
            scope = coalesce(*self.comms.all()) if self.comms.all() else coalesce(self.comms.any())
            scope.__enter__()
        self._scopes[thread] = _TorchScope(scope)

    def end_coalescing(self) -> TorchWork:
        """Submit the deferred operations as one Work.

        Raises: RuntimeError without ``start_coalescing`` before; the error of the first call that was refused
            meanwhile, and then no operation is sent.
        """
        if threading.get_ident() not in self._scopes:
            raise RuntimeError(f"_end_coalescing() of a group of backend {NAME} without _start_coalescing() before it")
        ours = self._scopes.pop(threading.get_ident())
        works, error = ours.works, ours.error
        with detached():
            ours.scope.__exit__(None if error is None else type(error), error, None)
        if error is not None:
            try:
                raise error
            finally:
                del error, ours  # the traceback has this frame
        return self._handed(TorchWork.joined(works))

    # -- the group ----------------------------------------------------------------------------------------------------

    def getBackendName(self) -> str:
        return NAME

    def name(self) -> str:
        return NAME

    def _get_sequence_number_for_group(self) -> int:
        """The number of collectives so far."""
        return self._called

    def _set_sequence_number_for_group(self) -> None:
        """Do nothing: numbers start at 0 on all ranks."""

    def _set_default_timeout(self, timeout: timedelta) -> None:
        self.comms.set_timeout(timeout)

    def set_timeout(self, timeout: timedelta) -> None:
        self.comms.set_timeout(timeout)

    def _add_ephemeral_timeout(self, timeout: timedelta) -> None:
        self.comms.extend_timeout(timeout)

    def _enable_collectives_timing(self) -> None:
        """Do nothing: Works always measure their duration."""

    def eager_connect_single_device(self, device: torch.device | None = None) -> None:
        if device is not None:
            self.comms.connect(device)

    def perform_nocolor_split(self, device: torch.device) -> None:
        """Do nothing: ranks outside a new group take no part in its creation."""

    def abort(self) -> None:
        self.comms.abort("abort() was called on the torch group")

    def shutdown(self) -> None:
        """Wait for operations in flight, and close the comms."""
        with detached():
            self.comms.close()

    # -- submission ---------------------------------------------------------------------------------------------------

    def _start(
        self,
        result: list[Any],
        call: Callable[..., Work[Any]],
        *arguments: Any,
        collective: bool = True,
        **options: Any,
    ) -> TorchWork:
        if is_profiling():
            call = recorded(f"{NAME}:{call.__name__}", arguments, call)
        try:
            if asyncio._get_running_loop() is None:
                part = call(*arguments, **options)
            else:
                with detached():
                    part = call(*arguments, **options)
        except Exception as exc:
            if names := _TORCHS.get(call.__name__):
                names.rename(exc)
            if not self._kept(exc):
                raise
            return TorchWork((), result)
        self._called += collective
        return self._handed(TorchWork((part,), result))

    def _start_several(
        self,
        name: str,
        result: list[Any],
        start: Callable[[], Sequence[Work[Any]]],
        finish: Callable[[], object] | None = None,
    ) -> TorchWork:
        if is_profiling():
            start = recorded(f"{NAME}:{name}", result, start)
        try:
            with detached():
                parts = start()
        except Exception as exc:
            if not self._kept(exc):
                raise
            return TorchWork((), result)
        self._called += 1
        return self._handed(TorchWork(parts, result, finish))

    def _handed(self, work: TorchWork) -> TorchWork:
        self._last.work = weakref.ref(work)
        if self._scopes and (scope := self._scopes.get(threading.get_ident())) is not None:
            scope.works.append(work)
        return work

    def _kept(self, error: Exception) -> bool:
        """Whether this thread coalesces: then ``end_coalescing`` raises the error.

        An error in the middle would leave torch coalescing for ever: it records some later collectives then, and runs
        none of them.
        """
        scope = self._scopes.get(threading.get_ident())
        if scope is None:
            return False
        scope.error = scope.error or error.with_traceback(None)
        return True

    def refuse_lazy(self, output: str) -> TorchWork:
        """Raise ValueError for a lazily conjugated or negated tensor; if this thread coalesces, keep the error."""
        try:
            raise ValueError(
                f"{output} must not be lazily conjugated or negated, as torch's dispatcher would give the backend a "
                "copy and drop the result: see resolve_conj() and resolve_neg()"
            )
        except ValueError as exc:
            if not self._kept(exc):
                raise
        return TorchWork((), [])

    def _sparse(self, tensors: list[Tensor], op: Any, timeout: timedelta | None) -> TorchWork:
        """All-reduce sparse tensors: gather all ranks' entries, which differ in number, and add them on each rank.

        The Work raises ValueError on all ranks if their tensors have different shapes.
        """
        tensor = _one(tensors)
        if op.type.name not in ("SUM", "AVG"):
            raise ValueError(f"op must be SUM or AVG for sparse tensors, got {op}")
        own = tensor.detach().coalesce()
        indices, values = own.indices().t(), own.values()  # views of the tensor, which other operations may be writing
        comm = self.comms.of(values)
        shape = torch.tensor([tensor.sparse_dim(), *tensor.shape], device=values.device)
        works: list[Work[Any]] = []

        def start() -> list[Work[Any]]:
            with comm.coalesce():
                works.append(comm.all_gather_v(None, shape, timeout=timeout))
                works.append(comm.all_gather_v(None, indices, timeout=timeout))
                works.append(comm.all_gather_v(None, values, timeout=timeout))
            return works

        def add_up() -> None:
            shapes, entries, summands = (work.result() for work in works)
            if not torch.equal(shapes, shape.repeat(comm.size)):
                raise ValueError(
                    f"tensor must have the same shape and the same number of sparse dimensions on all ranks; rank "
                    f"{comm.rank} of {self.comms.name!r} has {tuple(tensor.shape)} and {tensor.sparse_dim()}"
                )
            found = torch.sparse_coo_tensor(entries.t(), summands, tensor.shape, check_invariants=True).coalesce()
            if op.type.name == "AVG":
                found = found / comm.size
            with torch.no_grad():
                tensor.copy_(found)

        return self._start_several("all_reduce", tensors, start, add_up)


def _several(tensors: Any) -> list[Tensor]:
    return [tensors] if isinstance(tensors, Tensor) else list(tensors)


def _one(tensors: Any) -> Any:
    if isinstance(tensors, Tensor):
        return tensors
    if len(tensors) != 1:
        raise ValueError(f"a list of exactly one is expected, for one device of this process; got {len(tensors)}")
    return tensors[0]


def _op(opts: Any, op: Any = None) -> Any:
    """The reduction, given in ``opts``, in place of ``opts``, or as ``op``."""
    if op is None:
        op = getattr(opts, "reduceOp", opts)
    return ReduceOp.SUM if op is None else ReduceOp.of(op)


def _limit(opts: Any, timeout: Any = None) -> timedelta | None:
    return time_limit(opts) if timeout is None else checked_limit(timeout)
