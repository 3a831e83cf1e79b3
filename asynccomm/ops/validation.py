"""The facts that argument checks need about a comm, and the checks that all collectives share.

Each check raises ``TypeError`` or ``ValueError`` naming the argument and the value.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor
from torch.autograd import forward_ad

from asynccomm.ops.dtypes import COMPLEX, REAL, UNCOPIED, in_reals
from asynccomm.ops.reduce_op import ReduceOp

MAX_LABEL = 1024  # bytes of a collective's tag, which may have to be sent with every operation
MAX_TAG = 2**27 - 2  # gloo has 31 bits: gloo uses one, three select the MessageSpace, and one tag ends a group


@final
@dataclass(frozen=True, slots=True)
class CommInfo:
    """The ranks of a comm, seen from one rank: all that argument checks need."""

    name: str
    rank: int
    size: int
    device: torch.device
    kind: str = "comm"  #: in errors, before the name


def check_is_tensor(name: str, tensor: object) -> None:
    """Raise TypeError unless ``tensor`` is a tensor."""
    if not isinstance(tensor, Tensor):
        raise _no_tensor(name, tensor)


def _no_tensor(name: str, given: object) -> TypeError:
    return TypeError(f"{name} must be a torch.Tensor, got {given!r} ({type(given).__name__})")


def check_tensor(
    group: CommInfo, name: str, tensor: object, *, written: bool = False, key: int | str | None = None
) -> None:
    """Check one tensor: ``name``, or with ``key`` the tensor that ``name`` has under ``key``."""
    if not isinstance(tensor, Tensor):
        raise _no_tensor(_named(name, key), tensor)
    device = tensor.device
    if device != group.device and (device.type != group.device.type or group.device.index is not None):
        raise ValueError(f"{_named(name, key)} is on {device}, but {group.kind} {group.name!r} is on {group.device}")
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested:
        kind = "quantized" if tensor.is_quantized else "nested" if tensor.is_nested else str(tensor.layout)
        raise ValueError(f"{_named(name, key)} must be a dense tensor, got {kind}")
    if tensor.dtype in UNCOPIED:
        raise ValueError(
            f"{_named(name, key)} has dtype {tensor.dtype}, which torch cannot copy; pass tensor.view(torch.uint8)"
        )
    check_memory(name, tensor, key)
    if written and not tensor.is_contiguous() and overlaps_itself(tensor):
        raise ValueError(
            f"{_named(name, key)} overlaps itself (shape {tuple(tensor.shape)}, strides {tensor.stride()}) and cannot "
            f"be written; pass a clone"
        )


def check_no_tangent(name: str, tensor: object) -> None:
    """Raise NotImplementedError for a tensor with a tangent, which an operation would drop, or one of torch.func."""
    if not isinstance(tensor, Tensor):
        return
    if torch.compiler.is_compiling() and forward_ad._current_level < 0:
        return  # the lines below would split a compiled graph
    tangent = forward_ad.unpack_dual(tensor).tangent  # type: ignore[no-untyped-call]
    # within one torch.func.jvp, the tensors of another one around it hide their tangents
    if tangent is not None or torch._C._functorch.is_gradtrackingtensor(tensor):
        raise NotImplementedError(
            f"{name} must not be differentiated in forward mode or by torch.func: the operation has derivatives in "
            "backward passes alone"
        )


def check_memory(name: str, tensor: Tensor, key: int | str | None = None) -> None:
    """Check that a tensor has memory, and its storage reaches to its last element; it may have been resized."""
    try:
        there, needed = tensor.untyped_storage().nbytes(), extent_of(tensor)
    except (RuntimeError, ValueError) as exc:  # of torch.func and vmap, and of lazy parameters
        raise ValueError(f"{_named(name, key)} has no memory ({type(tensor).__name__}): {exc}") from exc
    if there < needed:
        raise ValueError(
            f"{_named(name, key)} needs {needed} bytes of memory (shape {tuple(tensor.shape)}, {tensor.dtype}), but "
            f"its storage was resized to {there}"
        )
    if needed and not _has_memory(tensor):
        raise ValueError(f"{_named(name, key)} has no memory ({type(tensor).__name__} of shape {tuple(tensor.shape)})")


def check_unfreed(storage: torch.UntypedStorage, end: int, shape: Sequence[int], dtype: torch.dtype) -> None:
    """Check that the memory of a tensor of a call that waited is there still.

    Args:
        storage: of the tensor at the call.
        end: of the tensor's last element, in bytes from the start of the storage.
    """
    if storage.nbytes() < end:
        raise ValueError(
            f"the memory of a tensor (shape {tuple(shape)}, {dtype}) was freed between its call and the end of its "
            f"operation"
        )


def _has_memory(tensor: Tensor) -> bool:
    """Whether a tensor has values: those of tracers have none, and torch makes up some zeros."""
    if tensor.is_meta or tensor.untyped_storage().device.type == "meta":
        return tensor.is_meta  # else a tracer's, which says that it lies elsewhere
    try:
        return tensor.data_ptr() != 0
    except RuntimeError:
        return False


def _named(name: str, key: int | str | None) -> str:
    return name if key is None else f"{name}[{key!r}]"


def extent_of(tensor: Tensor) -> int:
    """Bytes from the start of the storage to the end of the last element."""
    n = tensor.numel()
    if not n:
        return 0
    if not tensor.is_contiguous():
        n = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return int(tensor.storage_offset() + n) * tensor.itemsize


def overlaps_itself(tensor: Tensor) -> bool:
    """Whether two indices share memory, as far as strides alone determine it (as_strided tricks included)."""
    extent = 1  # one more than the largest offset reached by the dimensions seen so far
    for stride, size in sorted((s, n) for n, s in zip(tensor.shape, tensor.stride(), strict=True) if n > 1):
        if stride < extent:
            return True
        extent += stride * (size - 1)
    return False


def as_list(name: str, tensors: object) -> Sequence[Any]:
    if isinstance(tensors, Tensor) or not isinstance(tensors, Sequence):
        raise TypeError(f"{name} must be a list or tuple of tensors, got {type(tensors).__name__}")
    return tensors


def check_off_root(group: CommInfo, root: int, name: str, tensors: object) -> None:
    """Check that there are no tensors: this rank is not the root."""
    if tensors is not None and (count := len(as_list(name, tensors))):
        raise ValueError(
            f"{name} must be None or empty off the root: this is rank {group.rank}, the root is {root}, "
            f"got {count} tensors"
        )


def check_length(name: str, items: Sequence[Any], size: int, what: str = "tensor") -> None:
    if len(items) != size:
        raise ValueError(f"{name} must have one {what} for each of the {size} ranks, got {len(items)}")


def check_several(
    group: CommInfo, name: str, tensors: object, *, length: int | None = None, written: bool = False
) -> Sequence[Tensor]:
    """Check tensors of any dtypes, at least one; ``length``: one for each rank."""
    items = as_list(name, tensors)
    if length is not None:
        check_length(name, items, length)
    elif not items:
        raise ValueError(f"{name} must have at least one tensor, got none")
    for i, tensor in enumerate(items):
        check_tensor(group, name, tensor, written=written, key=i)
    return items


def check_list(
    group: CommInfo, name: str, tensors: object, like: Tensor, like_name: str, *, written: bool = False
) -> tuple[Sequence[Tensor], Tensor, list[int]]:
    """One tensor for each rank and ``like``, all as one dtype; and the number of elements of each rank's tensor."""
    items = check_several(group, name, tensors, length=group.size, written=written)
    dtype = like.dtype
    for tensor in items:
        if tensor.dtype != dtype:
            like, *items = one_dtype([like_name, *(f"{name}[{i}]" for i in range(group.size))], [like, *items])
            break
    return items, like, [tensor.numel() for tensor in items]


def counts_of(numels: Sequence[int]) -> tuple[int, tuple[int, ...]]:
    """The largest of the ranks' numbers of elements, and all of these numbers unless they are equal."""
    most = max(numels)
    return most, () if min(numels) == most else tuple(numels)


def check_dtype(name: str, tensor: Tensor, like_name: str, like: Tensor) -> None:
    if tensor.dtype != like.dtype:
        raise ValueError(f"{name} has dtype {tensor.dtype}, but {like_name} has {like.dtype}")


def one_dtype(names: Sequence[str], tensors: Sequence[Tensor]) -> list[Tensor]:
    """Complex ``tensors`` as pairs of reals, which share their memory; real ``tensors`` unchanged."""
    like = tensors[0]
    for name, tensor in zip(names[1:], tensors[1:], strict=True):
        if REAL.get(tensor.dtype, tensor.dtype) != REAL.get(like.dtype, like.dtype):
            check_dtype(name, tensor, names[0], like)
    reals = []
    for name, tensor in zip(names, tensors, strict=True):
        if tensor.is_conj():
            raise ValueError(f"{name} is lazily conjugated, and cannot go with a real one: pass resolve_conj()")
        reals.append(in_reals(tensor))
    return reals


def check_pair(group: CommInfo, output: Tensor, input: Tensor) -> tuple[Tensor, Tensor]:
    """The caller's output and its input, both as one dtype."""
    check_tensor(group, "output", output, written=True)
    if output.dtype == input.dtype:
        return output, input
    output, input = one_dtype(["output", "input"], [output, input])
    return output, input


def check_numel(name: str, tensor: Tensor, expected: int, why: str) -> None:
    if tensor.numel() != expected:
        raise ValueError(
            f"{name} must have {expected} elements ({why}), got {tensor.numel()} (shape {tuple(tensor.shape)})"
        )


def check_rank(group: CommInfo, name: str, rank: object) -> int:
    if type(rank) is int and 0 <= rank < group.size:
        return rank
    value = as_index(rank)
    if value is None:
        raise TypeError(f"{name} must be a rank (an integer), got {rank!r}")
    if not 0 <= value < group.size:
        raise ValueError(f"{name} must be in [0, {group.size}), got {value}")
    return value


def as_index(value: Any) -> int | None:
    if isinstance(value, bool) or (isinstance(value, Tensor) and value.dtype == torch.bool):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None


def check_dim(dim: object, tensor: Tensor, name: str) -> int:
    """The dimension, counted from 0."""
    value = as_index(dim)
    if value is None:
        raise TypeError(f"dim must be an integer, got {dim!r}")
    if not tensor.dim():
        raise ValueError(f"{name} must have a dim {value}, got a scalar")
    if not -tensor.dim() <= value < tensor.dim():
        raise ValueError(
            f"dim must be in [{-tensor.dim()}, {tensor.dim()}) for {name} of shape {tuple(tensor.shape)}, got {value}"
        )
    return value % tensor.dim()


def check_sizes(name: str, sizes: object, size: int) -> list[int]:
    """Check for one number for each rank, none negative."""
    if not isinstance(sizes, Sequence) or isinstance(sizes, (str, bytes)):
        raise TypeError(f"{name} must be a list or tuple of integers, got {sizes!r}")
    checked = []
    for value in sizes:
        number = value if type(value) is int else as_index(value)
        if number is None:
            raise TypeError(f"{name} must be integers, got {sizes!r}")
        checked.append(number)
    if len(checked) != size:
        raise ValueError(f"{name} must have one number for each of the {size} ranks, got {len(checked)}")
    if checked and min(checked) < 0:
        raise ValueError(f"{name} must not be negative, got {checked}")
    if sum(checked) > sys.maxsize:
        raise ValueError(f"{name} must add up to a size that a tensor can have, got {checked}")
    return checked


def check_all_rows(name: str, sizes: object, tensor_name: str, tensor: Tensor, size: int) -> list[int]:
    """Check for the number of rows (of dim 0) of each rank, all rows of ``tensor`` together."""
    checked = check_sizes(name, sizes, size)
    if tensor.dim() and sum(checked) != tensor.shape[0]:
        raise ValueError(f"{name} must add up to the {tensor.shape[0]} rows of {tensor_name}, got {checked}")
    return checked


def check_tag(tag: object) -> int:
    if type(tag) is int and 0 <= tag <= MAX_TAG:
        return tag
    value = as_index(tag)
    if value is None:
        raise TypeError(f"tag must be an integer, got {tag!r}")
    if not 0 <= value <= MAX_TAG:
        raise ValueError(f"tag must be in [0, {MAX_TAG}], got {value}")
    return value


def check_label(tag: object) -> str:
    """The tag of a collective: a plain str that can be sent as UTF-8."""
    if not isinstance(tag, str):
        raise TypeError(f"tag must be a str, got {tag!r} ({type(tag).__name__})")
    if type(tag) is not str:
        tag = str.__str__(tag)  # a subclass must not change how ranks compare and hash the tag
    try:
        length = len(tag.encode())
    except UnicodeEncodeError:
        raise ValueError(f"tag must be text that can be encoded in UTF-8, got {tag[:MAX_LABEL]!r}") from None
    if not 1 <= length <= MAX_LABEL:
        shown = repr(tag) if length <= MAX_LABEL else f"{tag[:20]!r}..."
        raise ValueError(f"tag must have 1 to {MAX_LABEL} bytes in UTF-8, got {length} ({shown})")
    return tag


def check_reduction(op: object, dtype: torch.dtype, *, paired: bool = False) -> ReduceOp:
    """The reduction, checked for ``dtype``; ``paired``: checked for the corresponding complex dtype, too."""
    reduction = ReduceOp.of(op)
    reduction.check(dtype)
    if paired:
        reduction.check(COMPLEX[dtype])
    return reduction.snapshot()


def empty_like(tensor: Tensor) -> Tensor:
    return empty(tensor, tensor.shape)


def empty(like: Tensor, shape: Sequence[int]) -> Tensor:
    return torch.empty(shape, dtype=like.dtype, device=like.device)


def times(shape: Sequence[int], size: int) -> list[int]:
    """The concatenated shape: dim 0 times ``size``; a scalar becomes a vector."""
    return [shape[0] * size, *shape[1:]] if shape else [size]


def divided(name: str, tensor: Tensor, size: int) -> list[int]:
    if not tensor.shape or tensor.shape[0] % size:
        raise ValueError(
            f"{name} must divide evenly among {size} ranks along dim 0 for a new output, "
            f"got shape {tuple(tensor.shape)}"
        )
    return [tensor.shape[0] // size, *tensor.shape[1:]]
