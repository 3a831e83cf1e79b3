"""All forms of moving and reducing a tensor, for checks that vary the properties of the tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from asynccomm.comm.comm import Comm
from asynccomm.core.work import Work
from asynccomm.ops.reduce_op import ReduceOpLike
from asynccomm.testing.conformance.data import everyones, expect_equal, reduced, sample, sentinel

__all__ = ["Forms", "Lay", "StartedOp", "every_move", "every_reduction", "expect_finished"]

Lay = Callable[[Tensor], Tensor]  # makes a tensor of the same values in another memory layout


class StartedOp(NamedTuple):
    """An operation in flight."""

    name: str
    work: Work[Any]
    expected: list[Tensor]  #: expected result tensors in order, in any shapes; empty: None


async def every_move(comm: Comm, shape: Sequence[int], dtype: torch.dtype, lay: Lay, what: str) -> None:
    """Move tensors of this shape and dtype, laid out by ``lay``, by every operation, all at once."""
    forms = Forms(comm, shape, dtype, lay)
    await expect_finished([*forms.lists(), *forms.copies(), *forms.singles(), *forms.messages()], what)
    forms.expect_inputs_untouched(what)


async def every_reduction(
    comm: Comm, shape: Sequence[int], dtype: torch.dtype, op: ReduceOpLike, lay: Lay, what: str
) -> None:
    """Reduce tensors of this shape and dtype, laid out by ``lay``, by every reduction, all at once."""
    forms = Forms(comm, shape, dtype, lay)
    await expect_finished([*forms.reductions(op), *forms.scattered_reductions(op)], f"{op} {what}")
    forms.expect_inputs_untouched(f"{op} {what}")


async def expect_finished(started: Sequence[StartedOp], what: str) -> None:
    """Await operations in this order, and check their results."""
    for name, work, expected in started:
        got = _flattened(await work)
        assert len(got) == len(expected), f"{name} {what}: got {len(got)} tensors, expected {len(expected)}"
        for tensor, correct in zip(got, expected, strict=True):
            assert tensor.numel() == correct.numel(), f"{name} {what}: got {list(tensor.shape)}"
            expect_equal(tensor.reshape(correct.shape), correct, f"{name} {what}")


def _flattened(result: Any) -> list[Tensor]:
    if result is None:
        return []
    return [result] if isinstance(result, Tensor) else [tensor for item in result for tensor in _flattened(item)]


@final
class Forms:
    """Operations on ``sample(rank, shape, dtype, salt)``; with several destinations, each has its own salt."""

    def __init__(self, comm: Comm, shape: Sequence[int], dtype: torch.dtype, lay: Lay) -> None:
        self._comm, self._shape, self._dtype, self._lay = comm, shape, dtype, lay
        self._size, self._rank = comm.size, comm.rank
        self._root = comm.size - 1
        self._at_root = comm.rank == self._root
        self._everyone = everyones(comm.size, shape, dtype)
        self._numel = self._everyone[0].numel()
        self._inputs: list[tuple[Tensor, Tensor]] = []  # with their expected, unchanged values
        self._mine = self._input(self._everyone[comm.rank])

    def _input(self, values: Tensor) -> Tensor:
        tensor = self._lay(values)
        self._inputs.append((tensor, values))
        return tensor

    def _blank(self, *shape: int) -> Tensor:
        return self._lay(sentinel(shape or self._shape, self._dtype))

    def _blanks(self) -> list[Tensor]:
        return [self._blank() for _ in range(self._size)]

    def _sample(self, rank: int, salt: int) -> Tensor:
        return sample(rank, self._shape, self._dtype, salt)

    def _for_all(self, source: int) -> list[Tensor]:
        return [self._sample(source, salt=r) for r in range(self._size)]

    def _flat(self, tensors: Sequence[Tensor]) -> Tensor:
        parts = [tensor.reshape(-1).view(torch.uint8) for tensor in tensors]  # torch cannot join every dtype
        return torch.cat(parts).view(self._dtype)

    def expect_inputs_untouched(self, what: str) -> None:
        for tensor, values in self._inputs:
            expect_equal(tensor, values, f"{what}: an input")

    def lists(self) -> Iterator[StartedOp]:
        comm, root, mine, everyone = self._comm, self._root, self._mine, self._everyone
        at_root = everyone if self._at_root else []
        yield StartedOp("all_gather", comm.all_gather(self._blanks(), mine), everyone)
        yield StartedOp("all_gather, allocated", comm.all_gather(None, mine), everyone)
        yield StartedOp("gather", comm.gather(self._blanks() if at_root else None, mine, root), at_root)
        yield StartedOp("gather, allocated", comm.gather(None, mine, root), at_root)
        yield StartedOp("gather_v", comm.gather_v(self._blanks() if at_root else None, mine, root), at_root)
        yield StartedOp("gather_v, allocated", comm.gather_v(None, mine, root), at_root)
        blanks = [[self._blank()] for _ in range(self._size)]
        yield StartedOp("all_gather_coalesced", comm.all_gather_coalesced(blanks, [mine]), everyone)
        inputs = [self._input(tensor) for tensor in self._for_all(self._rank)]
        came = [self._sample(r, salt=self._rank) for r in range(self._size)]
        yield StartedOp("all_to_all", comm.all_to_all(self._blanks(), inputs), came)
        yield StartedOp("all_to_all, allocated", comm.all_to_all(None, inputs), came)

    def copies(self) -> Iterator[StartedOp]:
        comm, root = self._comm, self._root
        values = self._sample(root, salt=1)
        tensors = [self._input(values) if self._at_root else self._blank() for _ in range(2)]
        yield StartedOp("broadcast", comm.broadcast(tensors[0], root), [values])
        yield StartedOp("broadcast_coalesced", comm.broadcast_coalesced(tensors[1:], root), [values])
        inputs = [self._input(tensor) for tensor in self._for_all(root)] if self._at_root else None
        came = [self._sample(root, salt=self._rank)]
        yield StartedOp("scatter", comm.scatter(self._blank(), inputs, root), came)
        yield StartedOp("scatter_v", comm.scatter_v(self._blank(), inputs, root), came)
        yield StartedOp("scatter_v, allocated", comm.scatter_v(None, inputs, root), came)
        whole = self._input(self._flat(self._for_all(root))) if self._at_root else None
        yield StartedOp("scatter_single", comm.scatter_single(self._blank(self._numel), whole, root), came)

    def singles(self) -> Iterator[StartedOp]:
        comm, size, numel = self._comm, self._size, self._numel
        together = [self._flat(self._everyone)]
        row = self._input(self._flat([self._everyone[self._rank]]))
        blank = self._blank(size, numel)
        yield StartedOp("all_gather_single", comm.all_gather_single(blank, self._mine), together)
        yield StartedOp("all_gather_single, allocated", comm.all_gather_single(None, self._mine), together)
        yield StartedOp(
            "all_gather_single along -1", comm.all_gather_single(self._blank(size * numel), row, -1), together
        )
        yield StartedOp("all_gather_v", comm.all_gather_v(None, row, [numel] * size), together)
        yield StartedOp("all_gather_v, exchanged", comm.all_gather_v(self._blank(size * numel), row), together)
        gathered = comm.gather_single(None, self._mine, self._root)
        yield StartedOp("gather_single", gathered, together if self._at_root else [])
        source = self._input(self._flat(self._for_all(self._rank)))
        came = [self._flat([self._sample(r, salt=self._rank) for r in range(size)])]
        yield StartedOp("all_to_all_single", comm.all_to_all_single(self._blank(size, numel), source), came)
        splits = [numel] * size
        yield StartedOp("all_to_all_v_single", comm.all_to_all_v_single(None, source, splits, splits), came)
        exchanged = comm.all_to_all_v_single(self._blank(size * numel), source)
        yield StartedOp("all_to_all_v_single, exchanged", exchanged, came)

    def messages(self) -> Iterator[StartedOp]:
        comm, following, previous = self._comm, (self._rank + 1) % self._size, (self._rank - 1) % self._size
        yield StartedOp("recv", comm.recv(self._blank(), previous, 3), [self._everyone[previous]])
        yield StartedOp("send", comm.send(self._mine, following, 3), [self._everyone[self._rank]])
        batch = comm.batch_op_create()
        batch.recv(self._blank(), following, 3)
        batch.send(self._mine, previous, 3)
        yield StartedOp("batch", batch.issue(), [self._everyone[following], self._everyone[self._rank]])

    def reductions(self, op: ReduceOpLike) -> Iterator[StartedOp]:
        comm, root, values = self._comm, self._root, self._everyone[self._rank]
        total = reduced(self._everyone, op)
        yield StartedOp("all_reduce", comm.all_reduce(self._lay(values), op), [total])
        yield StartedOp("all_reduce into out", comm.all_reduce(self._mine, op, out=self._blank()), [total])
        pair = [self._lay(values), self._lay(values)]
        yield StartedOp("all_reduce_coalesced", comm.all_reduce_coalesced(pair, op), [total, total])
        at_root = [total] if self._at_root else []
        yield StartedOp("reduce", comm.reduce(self._lay(values), root, op), at_root)
        yield StartedOp("reduce into out", comm.reduce(self._mine, root, op, out=self._blank()), at_root)

    def scattered_reductions(self, op: ReduceOpLike) -> Iterator[StartedOp]:
        comm, size, rank, numel = self._comm, self._size, self._rank, self._numel
        total = reduced([self._sample(r, salt=rank) for r in range(size)], op)
        inputs = [self._input(tensor) for tensor in self._for_all(rank)]
        whole = self._input(self._flat(self._for_all(rank)))
        square = self._input(whole.resolve_conj().resolve_neg().view(size, numel))
        yield StartedOp("reduce_scatter", comm.reduce_scatter(self._blank(), inputs, op), [total])
        yield StartedOp("reduce_scatter_single", comm.reduce_scatter_single(self._blank(), whole, op), [total])
        along = comm.reduce_scatter_single(self._blank(numel), whole, op, -1)
        yield StartedOp("reduce_scatter_single along -1", along, [total])
        sizes = [numel] * size
        yield StartedOp("reduce_scatter_v", comm.reduce_scatter_v(None, whole, sizes, op), [total])
        several = comm.reduce_scatter_coalesced([self._blank(), self._blank(numel)], [square, whole], op)
        yield StartedOp("reduce_scatter_coalesced", several, [total, total])
