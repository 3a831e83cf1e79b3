"""Tensors within a GroupCoordinator's group: results are new tensors, and ranks are ranks in the group."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch import Size, Tensor

from asynccomm.compat.either import EitherComm, at_once, outcome, same
from asynccomm.core.handles import Handle
from asynccomm.core.work import Work
from asynccomm.ops.renamed import Renamed
from asynccomm.ops.validation import as_index, check_dim, check_is_tensor, check_no_tangent

_NAMES: Final = dict.fromkeys(("tensor", "input", "inputs"), "input_")
INPUT: Final = Renamed(_NAMES)
INPUT_FROM: Final = Renamed({**_NAMES, "root": "src"})
INPUT_TO: Final = Renamed({**_NAMES, "root": "dst"})


class GroupCollectives(Handle):
    """Common to all methods: on a thread without a loop they block, in a coroutine they give an awaitable."""

    world_size: int
    rank_in_group: int
    unique_name: str

    def _on_device(self) -> EitherComm:
        """The comm of the tensors."""
        raise NotImplementedError

    def _on_cpu(self) -> EitherComm:
        """The comm of the objects."""
        raise NotImplementedError

    def _start(self, names: Renamed, method: Callable[..., Work[Any]], *args: Any, **options: Any) -> Any:
        with names:
            work = self._on_device().call(method, *args, **options)
        return outcome(work, same)

    def _is_traced(self, input_: Tensor) -> bool:
        """Whether the call is to be an operator: in a compiled function, or if autograd records calls that block.

        Raises: NotImplementedError for a tensor with a forward-mode derivative, unless it is the result.
        """
        if self.world_size > 1:
            check_no_tangent("input_", input_)
        if torch.compiler.is_compiling():
            return True
        check_is_tensor("input_", input_)
        return input_.requires_grad and torch.is_grad_enabled() and asyncio._get_running_loop() is None

    def all_reduce(self, input_: Tensor) -> Any:
        """The sum of all ranks' ``input_``, in a new tensor; in a group of one rank ``input_`` itself.

        In a compiled function, and where ``input_`` needs a gradient, this is the operator
        ``torch.ops.asynccomm.all_reduce``, by the group's name. Awaited, it has no gradient.
        """
        if self._is_traced(input_):
            return input_ if self.world_size == 1 else torch.ops.asynccomm.all_reduce(input_, self.unique_name)
        return at_once(input_) if self.world_size == 1 else self._all_reduce_out_place(input_)

    def _all_reduce_out_place(self, input_: Tensor) -> Any:
        out = torch.empty_like(input_, memory_format=torch.contiguous_format)
        return self._start(INPUT, self._on_device().comm.all_reduce, input_, out=out)

    def all_gather(self, input_: Tensor, dim: int = -1) -> Any:
        """All ranks' ``input_``, concatenated along ``dim``; in a group of one rank ``input_`` itself."""
        if self._is_traced(input_):
            if self.world_size == 1:
                return input_
            return torch.ops.asynccomm.all_gather(input_, dim, self.world_size, self.unique_name)
        return at_once(input_) if self.world_size == 1 else self._all_gather_out_place(input_, dim)

    def _all_gather_out_place(self, input_: Tensor, dim: int) -> Any:
        return self._start(INPUT, self._on_device().comm.all_gather_single, None, input_, dim)

    def all_gatherv(self, input_: Tensor | list[Tensor], dim: int = 0, sizes: Sequence[int] | None = None) -> Any:
        """As :meth:`all_gather`, with an extent along ``dim`` for each rank; of a list, a list, in one operation.

        Args:
            sizes: every rank's extent; None: equal ones.
        """
        comm = self._on_device().comm
        if not isinstance(input_, Tensor) and not (isinstance(input_, Sequence) and input_):
            raise ValueError(f"input_ must be a tensor or a list of at least one, got {input_!r}")
        name, first = ("input_", input_) if isinstance(input_, Tensor) else ("input_[0]", input_[0])
        given = self._extents(name, first, dim) if sizes is None else sizes
        if isinstance(input_, Tensor):
            return self._start(INPUT, comm.all_gather_v, None, input_, given, dim)
        return self._start(INPUT, comm.all_gather_v_coalesced, None, input_, given, dim)

    def _extents(self, name: str, tensor: Tensor, dim: int) -> list[int]:
        check_is_tensor(name, tensor)
        return [tensor.shape[check_dim(dim, tensor, name)]] * self.world_size

    def reduce_scatter(self, input_: Tensor, dim: int = -1) -> Any:
        """This rank's chunk along ``dim`` of the sum; in a group of one rank ``input_`` itself."""
        if self._is_traced(input_):
            if self.world_size == 1:
                return input_
            return torch.ops.asynccomm.reduce_scatter(input_, dim, self.world_size, self.unique_name)
        return at_once(input_) if self.world_size == 1 else self._reduce_scatter_out_place(input_, dim)

    def _reduce_scatter_out_place(self, input_: Tensor, dim: int) -> Any:
        return self._start(INPUT, self._on_device().comm.reduce_scatter_single, None, input_, dim=dim)

    def _operate(self, name: str, *arguments: Any, **options: Any) -> Any:
        here = self._on_device()
        return outcome(here.call(getattr(here.comm, name), *arguments, **options), same)

    def reduce_scatterv(self, input_: Tensor, dim: int = -1, sizes: Sequence[int] | None = None) -> Any:
        """The next ``sizes[rank_in_group]`` indices along ``dim`` of the sum; None: equal sizes."""
        return self._start(INPUT, self._on_device().comm.reduce_scatter_v, None, input_, sizes, dim=dim)

    def gather(self, input_: Tensor, dst: int = 0, dim: int = -1) -> Any:
        """All ranks' ``input_`` along ``dim`` on rank ``dst``, None elsewhere; of a group of one, ``input_``."""
        if self.world_size == 1:
            return at_once(input_)
        return self._start(INPUT_TO, self._on_device().comm.gather_single, None, input_, dst, dim)

    def broadcast(self, input_: Tensor, src: int = 0) -> Any:
        """Copy ``input_`` of rank ``src`` into that of all ranks, and give it."""
        return self._start(INPUT_FROM, self._on_device().comm.broadcast, input_, src)

    def send(self, tensor: Tensor, dst: int | None = None) -> Any:
        """Send ``tensor`` to rank ``dst``, which is another rank; None: the next rank."""
        peer = (self.rank_in_group + 1) % self.world_size if dst is None else dst
        self._check_other("dst", peer)
        return outcome(self._on_device().call(self._on_device().comm.send, tensor, peer), _nothing)

    def recv(self, size: Size | Sequence[int], dtype: torch.dtype, src: int | None = None) -> Any:
        """A new tensor on the group's device, received from rank ``src``, another rank; None: the previous rank."""
        peer = (self.rank_in_group - 1) % self.world_size if src is None else src
        self._check_other("src", peer)
        if not isinstance(size, Sequence):
            raise TypeError(f"size must be a shape, got {size!r}")
        here = self._on_device()
        received = torch.empty(tuple(size), dtype=dtype, device=here.comm.device)
        return outcome(here.call(here.comm.recv, received, peer), same)

    def _check_other(self, name: str, rank: int) -> None:
        """Raise TypeError if ``rank`` is none, and ValueError if it is this one: nothing could come from there."""
        if as_index(rank) is None:
            raise TypeError(f"{name} must be a rank (an integer), got {rank!r}")
        if rank == self.rank_in_group:
            raise ValueError(f"{name} must be another rank than this one, {rank}")


def _nothing(_: object) -> None:
    """The result of a send."""
