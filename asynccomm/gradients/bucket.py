"""The memory of a bucket: gradients side by side, and behind them a flag for each.

Each ``parameter.grad`` is a view of the bucket after the step, so no result is copied. A gradient that autograd has
computed into memory of its own (after ``zero_grad(set_to_none=True)``) is copied into the bucket once, which costs less
than clearing the bucket and adding to it. Where the view is still the parameter's gradient, autograd adds to it in
place.

The flag of a gradient is 1 on a rank with that gradient, and 0 on a rank without it. The flags are reduced with the
gradients. So a rank without the gradient knows, without another message, whether any rank has one.

Two tensors share the memory. The parameters' gradients are views of the first one, all operations and ``compress``
functions use the second one, and each has a version counter of its own. So the counter of the first one tells whether
the program has changed a gradient on its way.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Sequence
from typing import Any, final

import torch
from torch import Tensor, nn

from asynccomm.comm.comm import Comm
from asynccomm.core.handles import Handle
from asynccomm.core.work import Work
from asynccomm.gradients.planning import GradientLayout
from asynccomm.ops.reduce_op import ReduceOp


@final
class GradientBucket(Handle):
    """Gradients that are sent together. A ``compress=`` function gets it; the reducer makes it.

    Attributes:
        index: place among the buckets, from 0, in the order in which all ranks send them. The buckets change once, at
            the end of the first step.
        comm: the comm of the reducer.
        parameters: the parameters, in the order of their gradients.
        gradients: the gradient of each parameter, as views of ``tensor``, in the shapes of the parameters. A function
            that changes gradients changes these, and not ``parameter.grad``.
        tensor: shape ``(n,)``: all gradients, with padding of zeros between them.
    """

    _instead = "send its tensor"
    __slots__ = (
        "_absent",
        "_flags",
        "_memory",
        "_shown",
        "_version",
        "_views",
        "_wire",
        "comm",
        "flags_work",
        "gradients",
        "index",
        "names",
        "parameters",
        "pending",
        "tensor",
        "there",
    )

    def __init__(
        self,
        index: int,
        comm: Comm,
        parameters: Sequence[nn.Parameter],
        names: Sequence[str],
        layouts: Sequence[GradientLayout],
    ) -> None:
        self.index = index
        self.comm = comm
        self.parameters = tuple(parameters)
        self.names = tuple(names)
        length = sum(layout.room for layout in layouts)
        with torch.inference_mode(False):  # every backward pass writes it
            self._shown = torch.zeros(length + len(layouts), dtype=layouts[0].dtype, device=comm.device)
        self._memory = self._shown.data  # not detach(), which shares the version counter
        self.tensor = self._memory[:length]
        self._flags = self._memory[length:]
        self.gradients: list[Tensor] = []
        self._views: list[Tensor] = []  # the gradients that the parameters have
        offset = 0
        for layout in layouts:
            for views, memory in ((self.gradients, self._memory), (self._views, self._shown)):
                views.append(memory.as_strided(layout.shape, layout.strides, offset))
            offset += layout.room
        self.there: set[int] = set()  #: slots with their gradient of the step's last backward
        self.pending: Awaitable[Any] | None = None  #: gives the reduced gradients; None before the bucket is sent
        self.flags_work: Work[Tensor] | None = None  #: of the flags, where they travel alone
        self._wire: Tensor | None = None
        self._absent: list[int] = []
        self._version = 0  # of the parameters' gradients, which the program may not change in place

    def put(self, slot: int) -> None:
        """Have the gradient of parameter ``slot`` in the bucket. Raises: RuntimeError if it does not fit."""
        parameter, view = self.parameters[slot], self._views[slot]
        gradient = parameter.grad
        if gradient is view:
            return
        name = self.names[slot]
        if gradient is None:
            raise RuntimeError(
                f"the gradient of parameter {name!r} was removed as soon as it was computed, by another hook of "
                f"register_post_accumulate_grad_hook() for example; only after finish() may the program remove it"
            )
        if gradient.layout is not torch.strided:
            raise RuntimeError(f"the gradient of parameter {name!r} is sparse ({gradient.layout}); it must be dense")
        if gradient.requires_grad:
            raise RuntimeError(
                f"the gradient of parameter {name!r} has a graph of its own, by backward(create_graph=True), which a "
                f"reduction over ranks would lose: compute higher derivatives by torch.autograd.grad()"
            )
        if gradient.shape != view.shape or gradient.dtype != view.dtype or gradient.device != view.device:
            raise RuntimeError(
                f"parameter {name!r} has changed: its gradient was {_text(view)} when the reducer was made, and is "
                f"{_text(gradient)} now; close the reducer and make another one"
            )
        view.copy_(gradient)
        parameter.grad = view

    @property
    def full(self) -> bool:
        """Whether the gradients of all parameters have arrived."""
        return len(self.there) == len(self.parameters)

    def arrive(self, slot: int) -> None:
        """Have the complete gradient of parameter ``slot`` in the bucket. Raises: as ``put``."""
        self.put(slot)
        self.watch()
        self.there.add(slot)

    def seal(self) -> None:
        """Complete the contribution: zeros for parameters without a gradient, and the flags.

        Raises: RuntimeError if the program has changed or removed a gradient since backward.
        """
        if self.there:
            self._check_unchanged()
        self._flags.fill_(1)
        self._absent = []
        if self.full:
            return
        for slot, parameter in enumerate(self.parameters):
            if parameter.grad is not None:
                self.put(slot)
                continue
            if slot in self.there:
                raise self._replaced(slot)
            self.gradients[slot].zero_()
            self._flags[slot] = 0
            self._absent.append(slot)

    def watch(self) -> None:
        """Note the state of the gradients, which backward alone may change from now until ``settle``."""
        self._version = self._shown._version

    def _check_unchanged(self) -> None:
        if self._shown._version != self._version:
            raise RuntimeError(
                f"gradients were changed in place between backward and the end of finish(), by clipping for example, "
                f"in the bucket of parameters {self.names[0]!r} to {self.names[-1]!r}; change them after finish()"
            )

    def _replaced(self, slot: int) -> RuntimeError:
        return RuntimeError(
            f"the gradient of parameter {self.names[slot]!r} was replaced between backward and the end of "
            f"finish(), by zero_grad() for example; it is the ranks' result only after finish()"
        )

    def send(self, op: ReduceOp, dtype: torch.dtype | None) -> None:
        """Reduce gradients and flags in one operation; ``dtype``: of the elements on their way, None: their own."""
        memory = self._memory
        if dtype is not None and memory.dtype.is_floating_point and memory.dtype.itemsize > dtype.itemsize:
            if self._wire is None:
                with torch.inference_mode(False):  # every step writes it
                    self._wire = torch.empty_like(memory, dtype=dtype)
            memory = self._wire.copy_(memory)
        self.pending = self.comm.all_reduce(memory, op)

    def send_flags(self, op: ReduceOp) -> None:
        """Reduce the flags alone."""
        self.flags_work = self.comm.all_reduce(self._flags, op)

    async def receive(self) -> None:
        """Wait until ``tensor`` holds the reduced gradients. May be called again after it was cancelled."""
        if self.flags_work is not None:
            await self.flags_work
        pending = self.pending
        assert pending is not None
        if isinstance(pending, Work):
            result = await pending
        else:
            # a cancelled wait must leave the function's operations running, as it does with a Work
            self.pending = future = asyncio.ensure_future(pending)
            result = await asyncio.shield(future)
        if result is None or result is self.tensor or result is self._memory:
            return
        if self._wire is not None and result is self._wire:
            self._memory.copy_(result)
            return
        if not isinstance(result, Tensor) or result.numel() != self.tensor.numel():
            got = _text(result) if isinstance(result, Tensor) else repr(result)
            raise ValueError(f"compress must give None or a tensor of {self.tensor.numel()} elements, got {got}")
        self.tensor.copy_(result.detach().reshape(-1))

    def settle(self) -> None:
        """Give their gradient to parameters for which only other ranks had one, and be ready for the next step.

        Raises: RuntimeError if the program has replaced or changed a gradient while it was on its way.
        """
        absent = set(self._absent)
        for slot, parameter in enumerate(self.parameters):
            if slot not in absent and parameter.grad is not self._views[slot]:
                raise self._replaced(slot)
        self._check_unchanged()
        if absent:
            flags = self._flags.cpu()
            for slot in self._absent:
                if flags[slot] != 0:
                    self.parameters[slot].grad = self._views[slot]
        self.there.clear()
        self.pending = self.flags_work = None

    def discard(self) -> None:
        """Give up the step: end a function that has not run to its end."""
        pending, self.pending = self.pending, None
        if inspect.iscoroutine(pending):
            pending.close()
        elif isinstance(pending, asyncio.Future):
            pending.cancel()


@final
class GradientBuckets:
    """All buckets of a model, in new memory.

    Args:
        comm: carries the gradients.
        parameters, names, layouts: of each parameter.
        plan: the numbers of the parameters of each bucket.
    """

    def __init__(
        self,
        comm: Comm,
        parameters: Sequence[nn.Parameter],
        names: Sequence[str],
        layouts: Sequence[GradientLayout],
        plan: Sequence[Sequence[int]],
    ) -> None:
        self.all: list[GradientBucket] = []
        places: dict[int, tuple[GradientBucket, int]] = {}
        for index, numbers in enumerate(plan):
            bucket = GradientBucket(
                index,
                comm,
                [parameters[number] for number in numbers],
                [names[number] for number in numbers],
                [layouts[number] for number in numbers],
            )
            self.all.append(bucket)
            places.update({number: (bucket, slot) for slot, number in enumerate(numbers)})
        self.places = [places[number] for number in range(len(places))]  #: bucket and slot of each parameter

    def take_gradients(self) -> None:
        """Move the parameters' gradients into these buckets."""
        for bucket in self.all:
            for slot, parameter in enumerate(bucket.parameters):
                if parameter.grad is not None:
                    bucket.put(slot)


def _text(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)} on {tensor.device}"
