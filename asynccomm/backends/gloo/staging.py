"""Staging memory that gloo can use, in place of memory that it cannot.

gloo moves plain memory of some dtypes. Tensors travel as bytes if necessary; strided tensors, and tensors that travel
together, are copied into plain memory before the transfer (``pack``) or out of it afterwards (``unpack``). Tensors that
adjoin in memory (``adjoining``) are used directly.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

import torch
from torch import Tensor

from asynccomm.backends import arithmetic
from asynccomm.backends.regions import adjoining, bytes_of
from asynccomm.ops.dtypes import in_reals

Finish = Callable[[], object]

# dtypes that gloo supports
AS_IT_IS: Final = frozenset({torch.float32, torch.float64, torch.int8, torch.uint8, torch.int32, torch.int64})


def movable(tensor: Tensor) -> Tensor:
    """The elements of ``tensor`` as a flat tensor of a dtype that gloo can move."""
    values = in_reals(arithmetic.resolved(tensor)).view(-1)
    return values if values.dtype in AS_IT_IS else values.view(torch.uint8)


def place(output: Tensor) -> tuple[Tensor, Finish | None]:
    """The memory in which gloo may receive ``output``, and a function that then copies it to ``output``, if needed."""
    if output.is_inference():  # torch's own thread writes some outputs, and must not write these
        memory = room(output.nbytes).view(output.dtype).view(output.shape)
        return movable(memory), partial(arithmetic.write, output, memory)
    memory, copy_back = arithmetic.landing(output)
    return movable(memory), copy_back


def room(nbytes: int) -> Tensor:
    """New memory, which gloo's threads may write even if the caller is in inference mode."""
    with torch.inference_mode(False):
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu")


def pack(memory: Tensor, tensors: Sequence[Tensor]) -> None:
    """Copy the bytes of ``tensors`` into ``memory``, one after the other."""
    torch.cat([bytes_of(tensor) for tensor in tensors], out=memory)


def unpack(memory: Tensor, tensors: Sequence[Tensor]) -> None:
    """Copy ``memory`` into ``tensors``, one after the other, whatever their strides."""
    parts = memory.split_with_sizes([tensor.nbytes for tensor in tensors])
    targets, sources = [], []
    for tensor, part in zip(tensors, parts, strict=True):
        if arithmetic.is_plain(tensor):
            targets.append(bytes_of(tensor))
            sources.append(part)
        else:  # a copy, because a part may begin at any byte, and a dtype requires alignment
            arithmetic.write(tensor, part.clone().view(tensor.dtype).view(tensor.shape))
    if targets:
        with torch.inference_mode(any(target.is_inference() for target in targets)):
            torch._foreach_copy_(targets, sources)


def collected(tensors: Sequence[Tensor]) -> Tensor:
    """The bytes of ``tensors``, one after the other; their own memory if possible."""
    found = adjoining(tensors)
    return found if found is not None else torch.cat([bytes_of(tensor) for tensor in tensors])


def spread(tensors: Sequence[Tensor]) -> tuple[Tensor, Finish | None]:
    """Memory in which gloo may receive the bytes of ``tensors``, and a function that then copies them, if needed."""
    found = adjoining(tensors)
    if found is not None:
        return found, None
    memory = room(sum([tensor.nbytes for tensor in tensors]))
    return memory, partial(unpack, memory, tensors)
