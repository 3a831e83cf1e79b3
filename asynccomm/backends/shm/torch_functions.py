"""Functions of torch's C++ library by which the fast path knows the kind and the memory of a tensor.

The methods in Python take ten times as many instructions. All but one of the functions belong to torch's stable
interface in C (``torch/csrc/inductor/aoti_torch/c/shim.h``), the other one is C++. They take an ``at::Tensor``, which
is part of the tensor's Python object (``THPVariable`` of ``torch/csrc/autograd/python_variable.h``).
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping
from functools import cache
from types import MappingProxyType
from typing import Any, Final, NamedTuple, final

import torch
from torch import Tensor
from torch.nn import Parameter

from asynccomm.ops.dtypes import CODES

# by the fields of TorchFunctions; int32_t (at::Tensor *, T *), which returns 0, unless said otherwise
NAMES: Final = MappingProxyType(
    {
        "is_negated": "_ZN2at6native6is_negERKNS_6TensorE",  # bool at::native::is_neg(const at::Tensor &)
        "device_type": "aoti_torch_get_device_type",
        "layout": "aoti_torch_get_layout",
        "dtype": "aoti_torch_get_dtype",
        "ndim": "aoti_torch_get_dim",
        "shape": "aoti_torch_get_sizes",
        "strides": "aoti_torch_get_strides",
        "storage_offset": "aoti_torch_get_storage_offset",
        "storage_bytes": "aoti_torch_get_storage_size",
        "data": "aoti_torch_get_data_ptr",
    }
)
_CONSTANTS: Final = ("aoti_torch_device_type_cpu", "aoti_torch_layout_strided")  # int32_t ()
_INT32: Final = ("device_type", "layout", "dtype")  # the others give 64 bits
_DTYPES: Final = 64  # dtypes beyond are not for the fast path


@final
class TorchFunctions(NamedTuple):
    """The functions by their addresses, and the meaning of their answers."""

    place: int  #: bytes from the start of a tensor's Python object to its ``at::Tensor``
    cpu: int  #: the device type of tensors on the CPU
    strided: int  #: the layout of tensors that are not sparse
    item_bytes: tuple[int, ...]  #: of one element, by the number of the dtype; 0: a dtype that is not for the fast path
    is_negated: int
    device_type: int
    layout: int
    dtype: int
    ndim: int
    shape: int  #: the address of the numbers, as of ``strides``
    strides: int
    storage_offset: int  #: in elements
    storage_bytes: int
    data: int  #: the address of the first element


@cache
def torch_functions() -> TorchFunctions | None:
    """The functions; None if this torch has none, or if they do not answer as the methods in Python do."""
    return found(NAMES)


def found(names: Mapping[str, str]) -> TorchFunctions | None:
    """As ``torch_functions``, for functions of other names."""
    try:
        library = ctypes.CDLL("libtorch_cpu.so", mode=os.RTLD_NOW | os.RTLD_NOLOAD)
        functions: dict[str, Any] = {field: getattr(library, name) for field, name in names.items()}
        cpu, strided = [getattr(library, name)() for name in _CONSTANTS]
    except (OSError, AttributeError):
        return None
    functions["is_negated"].restype = ctypes.c_bool
    place = object.__basicsize__
    numbers = torch.arange(24.0, dtype=torch.float32, device="cpu")
    tensors = (numbers[2:], numbers[1:]._neg_view(), Parameter(numbers[3:9].clone().view(2, 3)), numbers.view(4, 6).T)
    if not all(_is_answered(functions, tensor, place, cpu, strided) for tensor in tensors):
        return None
    item_bytes = [0] * _DTYPES
    for dtype in CODES:
        if not dtype.is_complex and not str(dtype).startswith("torch.q"):  # conjugated lazily, or quantized
            number = _asked(functions, "dtype", torch.empty(0, dtype=dtype, device="cpu"), place)
            if 0 <= number < _DTYPES:
                item_bytes[number] = dtype.itemsize
    addresses = {field: ctypes.cast(function, ctypes.c_void_p).value or 0 for field, function in functions.items()}
    return TorchFunctions(place, cpu, strided, tuple(item_bytes), **addresses)


def _asked(functions: Mapping[str, Any], field: str, tensor: Tensor, place: int) -> int:
    """The answer of a function for a tensor; -1: it has failed."""
    value = ctypes.c_int32() if field in _INT32 else ctypes.c_int64()
    failed = functions[field](ctypes.c_void_p(id(tensor) + place), ctypes.byref(value))
    return -1 if failed else value.value


def _is_answered(functions: Mapping[str, Any], tensor: Tensor, place: int, cpu: int, strided: int) -> bool:
    """Whether the functions answer for a tensor as its methods do; they are called only if it is at ``place``."""
    handle = ctypes.c_void_p.from_address(id(tensor) + place)
    if handle.value != tensor._cdata:  # the one pointer that an at::Tensor is
        return False
    expected = {
        "device_type": cpu,
        "layout": strided,
        "ndim": tensor.ndim,
        "storage_offset": tensor.storage_offset(),
        "storage_bytes": tensor.untyped_storage().nbytes(),
        "data": tensor.data_ptr(),
    }
    if any(_asked(functions, field, tensor, place) != value for field, value in expected.items()):
        return False
    for field, numbers in {"shape": tensor.shape, "strides": tensor.stride()}.items():
        address = _asked(functions, field, tensor, place)
        if address <= 0 or tuple((ctypes.c_int64 * tensor.ndim).from_address(address)) != tuple(numbers):
            return False
    return bool(functions["is_negated"](ctypes.c_void_p(id(tensor) + place)) == tensor.is_neg())
