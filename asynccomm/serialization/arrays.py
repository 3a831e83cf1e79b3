"""numpy's arrays and scalars as plain data, and back.

An array is sent as a dtype, a shape, an order and a tensor of its bytes, which shares the memory of a contiguous
array. Only dtypes without references to Python objects are sent or received.

The dtype is written as in the files of ``numpy.save``: https://numpy.org/doc/stable/reference/generated/numpy.lib.format.html
"""

from __future__ import annotations

import math
import sys
from importlib import import_module
from typing import Any, Final

import torch
from torch import Tensor

_KINDS: Final = frozenset("biufcmMSUV")  # of dtypes with all elements in the array itself


def flat_array(obj: object) -> tuple[Any, ...] | None:
    """The node of an array or a scalar of numpy; None for another object.

    Raises: ValueError for a dtype that cannot be sent.
    """
    numpy: Any = sys.modules.get("numpy")
    if numpy is None:
        return None
    if type(obj) is numpy.ndarray:
        array: Any = obj
        order = "F" if array.flags.f_contiguous and not array.flags.c_contiguous else "C"
        return "array", _described(numpy, array.dtype), array.shape, order, _memory(numpy, array, order)
    if isinstance(obj, numpy.generic):
        scalar: Any = obj
        if type(scalar) is numpy.str_:  # an array of it would lose zeros at its end
            return "scalar", "U", scalar[:]
        if type(scalar) is numpy.bytes_:
            return "scalar", "S", bytes(scalar)
        if type(scalar) is scalar.dtype.type:
            array = numpy.asarray(scalar)
            return "scalar", _described(numpy, array.dtype), array.tobytes()
    return None


def _memory(numpy: Any, array: Any, order: str) -> Tensor:
    if not array.size:
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    flat = numpy.ascontiguousarray(array.reshape(-1, order=order))
    if not flat.flags.writeable:  # torch has no tensors that are read-only
        flat = flat.copy()
    return torch.frombuffer(flat.view(numpy.uint8), dtype=torch.uint8)


def _described(numpy: Any, dtype: Any) -> Any:
    """The description of a dtype, from which a receiver can make an equal one."""
    reason = "with references to Python objects" if dtype.hasobject else "without a portable description"
    if not dtype.hasobject and dtype.kind in _KINDS and dtype.itemsize:
        try:
            description = dtype.str if dtype.names is None else numpy.lib.format.dtype_to_descr(dtype)
            made = _dtype(numpy, description)
        except ValueError as exc:
            reason = f"that numpy cannot describe ({exc})"
        else:
            if made == dtype and (made.type is dtype.type or dtype.kind != "V"):
                return description
    raise ValueError(f"it has a numpy array of dtype {dtype}, a dtype {reason}")


def _dtype(numpy: Any, description: object) -> Any:
    if type(description) not in (str, list):
        raise ValueError("it has an array without a dtype")
    dtype = numpy.lib.format.descr_to_dtype(description)
    if dtype.hasobject or dtype.kind not in _KINDS or not dtype.itemsize:
        raise ValueError(f"it has an array of dtype {dtype}, which is refused")
    return dtype


def _numpy() -> Any:
    try:
        return import_module("numpy")
    except ImportError as exc:
        raise ValueError("it has a numpy array, but numpy is not installed here") from exc


def array_of(description: object, shape: Any, order: Any, memory: Any) -> Any:
    """The array of a node, in the memory of its tensor. Raises any exception if the node is malformed."""
    numpy = _numpy()
    dtype = _dtype(numpy, description)
    if type(memory) is not Tensor or memory.dtype is not torch.uint8 or memory.dim() != 1:
        raise ValueError("it has an array without memory")
    if math.prod(shape) * dtype.itemsize != memory.numel():
        raise ValueError("it has an array that does not fit its memory")
    if not memory.numel():
        return numpy.empty(shape, dtype, order)
    return numpy.ndarray(shape, dtype, memory.numpy(), order=order)


def scalar_of(description: object, data: Any) -> Any:
    """The scalar of a node. Raises any exception if the node is malformed."""
    numpy = _numpy()
    if description == "U" and type(data) is str:
        return numpy.str_(data)
    if type(data) is not bytes:
        raise ValueError("it has a scalar without a value")
    if description == "S":
        return numpy.bytes_(data)
    dtype = _dtype(numpy, description)
    if dtype.itemsize != len(data):
        raise ValueError("it has a scalar that does not fit its dtype")
    return numpy.ndarray((), dtype, bytearray(data))[()]
