"""The operations of a TorchComm: torchcomms' names, arguments and their order, over the methods of a comm."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, Final

from torch import Tensor

from asynccomm.comm.comm import Comm
from asynccomm.compat.either import EitherComm
from asynccomm.compat.torchcomms.batch import BatchSendRecv
from asynccomm.compat.torchcomms.errors import refusing
from asynccomm.compat.torchcomms.registration import Hooks, OpArguments
from asynccomm.compat.torchcomms.work import TorchWork
from asynccomm.core.handles import Handle
from asynccomm.ops.reduce_op import ReduceOpLike
from asynccomm.options import check_bool

Hints = Mapping[str, str] | None
Limit = timedelta | None

# the arguments' names, by the names in the comm's errors, where they differ
_NAMES: Final[Mapping[str, Mapping[str, str]]] = {
    "all_to_all": {"output_list": "output_tensor_list", "input_list": "input_tensor_list"},
    "scatter": {"output": "output_tensor", "input_list": "input_tensor_list"},
    "gather": {"output_list": "output_tensor_list", "input": "input_tensor"},
    "put": {"rank": "dst_rank", "offset": "target_disp"},
    "signal": {"rank": "dst_rank", "slot": "signal_disp", "value": "signal_val"},
    "wait_signal": {"slot": "signal_disp", "value": "signal_val", "cmp": "cmp_op"},
}


class TorchCollectiveMethods(Handle):
    """Common to all operations: each returns a TorchWork, to be waited for or awaited.

    With ``async_op=False`` the call itself blocks until the output is there, on a thread without a loop; on a GPU the
    current stream waits instead. In a coroutine a call never blocks, so its TorchWork is awaited for both.

    ``hints`` and ``timeout``: None for those of the comm. Raises, before anything is sent: TypeError; RuntimeError for
    wrong values, and on a finalized comm.
    """

    _hooks: Hooks
    _hints: dict[str, str] | None

    def _here(self) -> EitherComm:
        raise NotImplementedError

    @property
    def _comm(self) -> Comm:
        return self._here().comm

    def all_reduce(
        self, tensor: Tensor, op: ReduceOpLike, async_op: bool, hints: Hints = None, timeout: Limit = None
    ) -> TorchWork:
        """Combine all ranks' ``tensor`` on all ranks, in place."""
        return self._run("all_reduce", async_op, hints, timeout, self._comm.all_reduce, tensor, op)

    def reduce(
        self, tensor: Tensor, root: int, op: ReduceOpLike, async_op: bool, hints: Hints = None, timeout: Limit = None
    ) -> TorchWork:
        """Combine all ranks' ``tensor`` in place on rank ``root``; the other ranks' tensors are not changed."""
        return self._run("reduce", async_op, hints, timeout, self._comm.reduce, tensor, root, op)

    def broadcast(
        self, tensor: Tensor, root: int, async_op: bool, hints: Hints = None, timeout: Limit = None
    ) -> TorchWork:
        """Copy ``tensor`` of rank ``root`` into that of all ranks."""
        return self._run("broadcast", async_op, hints, timeout, self._comm.broadcast, tensor, root)

    def all_gather(
        self,
        tensor_list: Sequence[Tensor],
        tensor: Tensor,
        async_op: bool,
        hints: Hints = None,
        timeout: Limit = None,
    ) -> TorchWork:
        """Collect every rank's ``tensor`` in ``tensor_list`` on all ranks; sizes may differ between ranks."""
        _check_given("tensor_list", tensor_list)
        return self._run("all_gather", async_op, hints, timeout, self._comm.all_gather, tensor_list, tensor)

    all_gather_v = all_gather

    def all_gather_single(
        self, output: Tensor, input: Tensor, async_op: bool, hints: Hints = None, timeout: Limit = None
    ) -> TorchWork:
        """Collect every rank's ``input`` in ``output``, of ``size`` times as many elements."""
        _check_given("output", output)
        return self._run("all_gather_single", async_op, hints, timeout, self._comm.all_gather_single, output, input)

    def reduce_scatter(
        self,
        output: Tensor,
        input_list: Sequence[Tensor],
        op: ReduceOpLike,
        async_op: bool,
        hints: Hints = None,
        timeout: Limit = None,
    ) -> TorchWork:
        """Combine the ranks' ``input_list[r]`` for each r, and give rank r that result; sizes may differ."""
        _check_given("output", output)
        return self._run("reduce_scatter", async_op, hints, timeout, self._comm.reduce_scatter, output, input_list, op)

    reduce_scatter_v = reduce_scatter

    def reduce_scatter_single(
        self,
        output: Tensor,
        input: Tensor,
        op: ReduceOpLike,
        async_op: bool,
        hints: Hints = None,
        timeout: Limit = None,
    ) -> TorchWork:
        """Combine the ranks' ``input``, and give rank r chunk r of the result."""
        _check_given("output", output)
        method = self._comm.reduce_scatter_single
        return self._run("reduce_scatter_single", async_op, hints, timeout, method, output, input, op)

    def all_to_all(
        self,
        output_tensor_list: Sequence[Tensor],
        input_tensor_list: Sequence[Tensor],
        async_op: bool,
        hints: Hints = None,
        timeout: Limit = None,
    ) -> TorchWork:
        """Send ``input_tensor_list[r]`` to each rank r; sizes may differ."""
        _check_given("output_tensor_list", output_tensor_list)
        method = self._comm.all_to_all
        return self._run("all_to_all", async_op, hints, timeout, method, output_tensor_list, input_tensor_list)

    def all_to_all_single(
        self, output: Tensor, input: Tensor, async_op: bool, hints: Hints = None, timeout: Limit = None
    ) -> TorchWork:
        """Send chunk r of ``input`` to each rank r; chunk s of ``output`` comes from rank s."""
        _check_given("output", output)
        return self._run("all_to_all_single", async_op, hints, timeout, self._comm.all_to_all_single, output, input)

    def all_to_all_v_single(
        self,
        output: Tensor,
        input: Tensor,
        output_split_sizes: Sequence[int],
        input_split_sizes: Sequence[int],
        async_op: bool,
        hints: Hints = None,
        timeout: Limit = None,
    ) -> TorchWork:
        """Send ``input_split_sizes[r]`` rows to each rank r, and receive ``output_split_sizes[s]`` from rank s."""
        _check_given("output", output)
        method, splits = self._comm.all_to_all_v_single, (output_split_sizes, input_split_sizes)
        return self._run("all_to_all_v_single", async_op, hints, timeout, method, output, input, *splits)

    def scatter(
        self,
        output_tensor: Tensor,
        input_tensor_list: Sequence[Tensor],
        root: int,
        async_op: bool,
        hints: Hints = None,
        timeout: Limit = None,
    ) -> TorchWork:
        """Give each rank r the root's ``input_tensor_list[r]``; the list of other ranks is ignored."""
        parts = input_tensor_list if self._comm.rank == root else None
        return self._run("scatter", async_op, hints, timeout, self._comm.scatter, output_tensor, parts, root)

    def gather(
        self,
        output_tensor_list: Sequence[Tensor],
        input_tensor: Tensor,
        root: int,
        async_op: bool,
        hints: Hints = None,
        timeout: Limit = None,
    ) -> TorchWork:
        """Collect every rank's ``input_tensor`` on the root; the list of other ranks is ignored, and may be empty."""
        if self._comm.rank == root:
            _check_given("output_tensor_list", output_tensor_list)
        outputs = output_tensor_list if self._comm.rank == root else None
        return self._run("gather", async_op, hints, timeout, self._comm.gather, outputs, input_tensor, root)

    def gather_single(
        self, output: Tensor, input: Tensor, root: int, async_op: bool, hints: Hints = None, timeout: Limit = None
    ) -> TorchWork:
        """Collect every rank's ``input`` in the root's ``output``; that of other ranks is ignored."""
        if self._comm.rank == root:
            _check_given("output", output)
        mine = output if self._comm.rank == root else None
        return self._run("gather_single", async_op, hints, timeout, self._comm.gather_single, mine, input, root)

    def barrier(self, async_op: bool, hints: Hints = None, timeout: Limit = None) -> TorchWork:
        """Wait until every rank has called it."""
        return self._run("barrier", async_op, hints, timeout, self._comm.barrier)

    def send(self, tensor: Tensor, dst: int, async_op: bool, hints: Hints = None, timeout: Limit = None) -> TorchWork:
        """Send ``tensor`` to rank ``dst``."""
        return self._run("send", async_op, hints, timeout, self._comm.send, tensor, dst)

    def recv(self, tensor: Tensor, src: int, async_op: bool, hints: Hints = None, timeout: Limit = None) -> TorchWork:
        """Receive a tensor from rank ``src`` into ``tensor``."""
        return self._run("recv", async_op, hints, timeout, self._comm.recv, tensor, src)

    def batch_op_create(self) -> BatchSendRecv:
        """Make a batch of sends and receives that start together."""
        return BatchSendRecv(self._comm.batch_op_create(), self._run)

    # -- for operators ------------------------------------------------------------------------------------------------

    def _operate(self, name: str, *arguments: Any, out: Tensor | None = None, **options: Any) -> Any:
        method = getattr(self._comm, name)
        if out is not None and (self._hooks.before or self._hooks.after):
            arguments = (out.copy_(arguments[0]), *arguments[1:])  # hooks find inputs and outputs in the arguments
        elif out is not None:
            method = partial(method, out=out)
        return self._run(name, False, None, None, method, *arguments, **options)._work.wait()

    def _run(
        self, name: str, async_op: bool, hints: Hints, timeout: Limit, method: Callable[..., Any], *args: Any
    ) -> TorchWork:
        check_bool("async_op", async_op)
        given = self._hints if hints is None else hints
        here = self._here()

        def call() -> TorchWork:
            with refusing(_NAMES.get(name)):
                return TorchWork(here.call(method, *args, hints=given, timeout=timeout))

        hooks = self._hooks
        if hooks.before or hooks.after:
            work = hooks.around(name, OpArguments(args, async_op, given, timeout), call)
        else:
            work = call()
        if not async_op and (here.comm.device.type != "cpu" or asyncio._get_running_loop() is None):
            work.wait()
        return work


def _check_given(name: str, output: object) -> None:
    # a comm makes new tensors where it gets None, and a TorchWork does not give them
    if output is None:
        raise TypeError(f"{name} must be given, got None")
