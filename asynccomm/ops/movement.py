"""The operations that move tensors between all ranks: broadcast, gather, scatter, all_gather, all_to_all, barrier."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import SupportsIndex, final

import torch
from torch import Tensor

from asynccomm.ops.base import Call, Op, TensorOp, layout_of, layout_of_shares, moved, moved_together
from asynccomm.ops.validation import (
    CommInfo,
    check_list,
    check_numel,
    check_off_root,
    check_pair,
    check_rank,
    check_several,
    check_tensor,
    counts_of,
    empty_like,
    one_dtype,
    times,
)


@final
@dataclass(frozen=True, slots=True)
class Broadcast(TensorOp):
    """Read on the root, written on the other ranks. Several tensors of different dtypes count as their bytes."""

    kind = "broadcast"
    replicates = True
    root: int = field()

    @classmethod
    def of(cls, group: CommInfo, tensor: Tensor, root: SupportsIndex) -> Call:
        rank = check_rank(group, "root", root)
        mine = rank == group.rank
        check_tensor(group, "tensor", tensor, written=not mine)
        op = cls(*moved(tensor.dtype, tensor.numel()), rank)
        return Call(op, (tensor,) if mine else (), () if mine else (tensor,), tensor)

    @classmethod
    def of_several(cls, group: CommInfo, tensors: Sequence[Tensor], root: SupportsIndex) -> Call:
        """Broadcast all ``tensors`` in one operation."""
        rank = check_rank(group, "root", root)
        mine = rank == group.rank
        items = tuple(check_several(group, "tensors", tensors, written=not mine))
        dtype, codes = moved_together(items)
        sizes = [tensor.nbytes for tensor in items]
        op = cls(dtype, sum(sizes) // dtype.itemsize, rank, layout=layout_of([*sizes, *codes]))
        return Call(op, items if mine else (), () if mine else items, tensors)


@final
@dataclass(frozen=True, slots=True)
class AllGather(TensorOp):
    """The outputs of rank r become rank r's inputs.

    There are k inputs and ``size * k`` outputs; those of rank r start at ``r * k``. ``counts`` holds the number of
    elements of each rank's inputs, and is empty if all are equal; ``numel`` is the largest of them. Several inputs of
    different dtypes count as their bytes.
    """

    kind = "all_gather"
    counts: tuple[int, ...] = field(default=(), kw_only=True)

    @property
    def one_sided(self) -> bool:  # type: ignore[override]  # a class attribute of all other operations
        return bool(self.counts)

    @classmethod
    def of(cls, group: CommInfo, tensor_list: Sequence[Tensor] | None, tensor: Tensor) -> Call:
        check_tensor(group, "tensor", tensor)
        if tensor_list is None:
            outputs: Sequence[Tensor] = [empty_like(tensor) for _ in range(group.size)]
            return Call(cls(*moved(tensor.dtype, tensor.numel())), (tensor,), tuple(outputs), outputs)
        outputs, source, numels = check_list(group, "tensor_list", tensor_list, tensor, "tensor", written=True)
        mine = numels[group.rank]
        if mine != source.numel():
            check_numel("tensor", source, mine, f"as many as tensor_list[{group.rank}]")
        return Call(cls.of_counts(source.dtype, numels), (source,), tuple(outputs), tensor_list)

    @classmethod
    def of_counts(cls, dtype: torch.dtype, numels: Sequence[int], dim: int = 0, shape: Sequence[int] = ()) -> AllGather:
        """``numels[r]`` elements from each rank r, gathered along ``dim``; ``shape``: of a share, for the layout."""
        real, each = moved(dtype, 1)
        numel, counts = counts_of([each * n for n in numels])
        return cls(real, numel, layout=layout_of_shares(counts, dim, shape), counts=counts)

    @classmethod
    def of_several(cls, group: CommInfo, output_lists: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor]) -> Call:
        """Gather rank r's inputs into ``output_lists[r]``, each list as long as ``inputs``, in one operation."""
        dtype, codes = moved_together(inputs)
        sizes = [tensor.nbytes for tensor in inputs]
        op = cls(dtype, sum(sizes) // dtype.itemsize, layout=layout_of([*sizes, *codes]))
        outputs = tuple([tensor for share in output_lists for tensor in share])
        return Call(op, tuple(inputs), outputs, output_lists)


@final
@dataclass(frozen=True, slots=True)
class AllGatherSingle(TensorOp):
    """All ranks' tensors, in rank order, in one output of ``size`` times as many elements."""

    kind = "all_gather_single"

    @classmethod
    def of(cls, group: CommInfo, output: Tensor | None, input: Tensor) -> Call:
        check_tensor(group, "input", input)
        source = input
        if output is None:
            output = target = input.new_empty(times(input.shape, group.size), requires_grad=False)
        else:
            target, source = check_pair(group, output, input)
            numel = group.size * source.numel()
            if target.numel() != numel:
                check_numel("output", target, numel, f"{group.size} (ranks) x {source.numel()} (input)")
        return Call(cls(*moved(source.dtype, source.numel())), (source,), (target,), output)


@final
@dataclass(frozen=True, slots=True)
class Scatter(TensorOp):
    """``output`` becomes the root's ``input_list[rank]``."""

    kind = "scatter"
    split = one_sided = True
    root: int = field()

    @classmethod
    def of(cls, group: CommInfo, output: Tensor, input_list: Sequence[Tensor] | None, root: SupportsIndex) -> Call:
        rank = check_rank(group, "root", root)
        if output is None:
            raise TypeError("output must be a torch.Tensor, got None: only scatter_v allocates the output")
        check_tensor(group, "output", output, written=True)
        inputs: Sequence[Tensor] = ()
        target = output
        if rank == group.rank:
            if input_list is None:
                raise ValueError(f"input_list must be given on the root (rank {rank}), got None")
            inputs, target, numels = check_list(group, "input_list", input_list, output, "output")
            _check_even("input_list", inputs, numels, target.numel(), "output")
        else:
            check_off_root(group, rank, "input_list", input_list)
        return Call(cls(*moved(target.dtype, target.numel()), rank), tuple(inputs), (target,), output)


@final
@dataclass(frozen=True, slots=True)
class Gather(TensorOp):
    """On the root ``outputs[r]`` becomes rank r's tensor."""

    kind = "gather"
    one_sided = True
    root: int = field()

    @classmethod
    def of(cls, group: CommInfo, output_list: Sequence[Tensor] | None, input: Tensor, root: SupportsIndex) -> Call:
        rank = check_rank(group, "root", root)
        check_tensor(group, "input", input)
        result: Sequence[Tensor] | None = None
        outputs: Sequence[Tensor] = ()
        source = input
        if rank == group.rank:
            if output_list is None:
                result = outputs = [empty_like(input) for _ in range(group.size)]
            else:
                outputs, source, numels = check_list(group, "output_list", output_list, input, "input", written=True)
                _check_even("output_list", outputs, numels, source.numel(), "input")
                result = output_list
        else:
            check_off_root(group, rank, "output_list", output_list)
        return Call(cls(*moved(source.dtype, source.numel()), rank), (source,), tuple(outputs), result)


@final
@dataclass(frozen=True, slots=True)
class AllToAllSingle(TensorOp):
    """Chunk ``r`` of the input goes to rank r; chunk ``s`` of the output came from rank s; all chunks are equal."""

    kind = "all_to_all_single"
    split = True

    @classmethod
    def of(cls, group: CommInfo, output: Tensor | None, input: Tensor) -> Call:
        check_tensor(group, "input", input)
        source = input
        if output is None:
            output = target = empty_like(input)
        else:
            target, source = check_pair(group, output, input)
            if target.numel() != source.numel():
                check_numel("output", target, source.numel(), "as many as input")
        if input.numel() % group.size:
            raise ValueError(
                f"input must divide evenly among {group.size} ranks, got {input.numel()} elements "
                f"(shape {tuple(input.shape)})"
            )
        return Call(cls(*moved(source.dtype, source.numel())), (source,), (target,), output)

    def part_nbytes(self, size: int) -> int:
        return self.nbytes // size


@final
@dataclass(frozen=True, slots=True)
class AllToAll(Op):
    """``inputs[r]`` goes to rank r; ``outputs[s]`` came from rank s. ``sends`` and ``receives`` are the rank's own.

    A rank must send as many elements to another rank as that rank receives from it. A backend that detects a difference
    raises CollectiveMismatchError.
    """

    kind = "all_to_all"
    sizes_known = False
    split = one_sided = True
    dtype: torch.dtype
    sends: tuple[int, ...]  #: elements for each rank
    receives: tuple[int, ...]  #: elements from each rank

    @classmethod
    def of(cls, group: CommInfo, output_list: Sequence[Tensor], input_list: Sequence[Tensor]) -> Call:
        inputs = check_several(group, "input_list", input_list, length=group.size)
        outputs = check_several(group, "output_list", output_list, length=group.size, written=True)
        everything = [*outputs, *inputs]
        dtype = everything[0].dtype
        if any(tensor.dtype != dtype for tensor in everything):
            names = [f"{name}[{i}]" for name in ("output_list", "input_list") for i in range(group.size)]
            everything = one_dtype(names, everything)
            outputs, inputs = everything[: group.size], everything[group.size :]
        sends, receives = [t.numel() for t in inputs], [t.numel() for t in outputs]
        if sends[group.rank] != receives[group.rank]:
            own = f"output_list[{group.rank}]"
            check_numel(own, outputs[group.rank], sends[group.rank], f"as many as input_list[{group.rank}]")
        op = cls.of_counts(everything[0].dtype, sends, receives)
        return Call(op, tuple(inputs), tuple(outputs), output_list)

    @classmethod
    def of_counts(cls, dtype: torch.dtype, sends: Sequence[int], receives: Sequence[int]) -> AllToAll:
        """The operation for ``sends[r]`` elements of ``dtype`` to each rank r, and ``receives[r]`` from it."""
        real, each = moved(dtype, 1)
        return cls(real, tuple([each * n for n in sends]), tuple([each * n for n in receives]))

    def of_sender(self, nbytes: int, rank: int) -> str:
        """The operation of a rank that has ``nbytes`` for ``rank``, for errors."""
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.name}({dtype}, sends {nbytes // self.dtype.itemsize} elements to rank {rank})"

    def fits(self, other: Op) -> bool:
        if type(other) is not AllToAll:
            return False
        return (self.dtype, self.label, self.method) == (other.dtype, other.label, other.method)

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return self.shown(self.name, dtype, f"sends {list(self.sends)}", f"receives {list(self.receives)}")


@final
@dataclass(frozen=True, slots=True)
class Barrier(Op):
    """Done when every rank has called it."""

    kind = "barrier"
    needs_every_rank = True

    @classmethod
    def of(cls, group: CommInfo) -> Call:
        return Call(cls(), (), (), None)


def _check_even(name: str, tensors: Sequence[Tensor], numels: Sequence[int], numel: int, like: str) -> None:
    for i, found in enumerate(numels):
        if found != numel:
            check_numel(f"{name}[{i}]", tensors[i], numel, f"as many as {like}")
