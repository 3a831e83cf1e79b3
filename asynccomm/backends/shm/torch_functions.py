"""Functions of torch's C++ library by which the fast path knows of a tensor more than DLPack tells.

They give its offset in its storage, the bytes of the storage, which may have been resized or freed, and whether the
tensor is lazily negated. The methods in Python take ten times as many instructions. Two functions belong to torch's
stable interface in C (``torch/csrc/inductor/aoti_torch/c/shim.h``), the third one is C++. They take an ``at::Tensor``,
which is part of the tensor's Python object (``THPVariable`` of ``torch/csrc/autograd/python_variable.h``).
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from typing import Any, Final, NamedTuple, final

import torch
from torch import Tensor
from torch.nn import Parameter

_NAMES: Final = (
    "_ZN2at6native6is_negERKNS_6TensorE",  # bool at::native::is_neg(const at::Tensor &)
    "aoti_torch_get_storage_offset",  # int32_t (at::Tensor *, int64_t *), which returns 0
    "aoti_torch_get_storage_size",  # the same; bytes
)


@final
class TorchFunctions(NamedTuple):
    """The functions by their addresses."""

    place: int  #: bytes from the start of a tensor's Python object to its ``at::Tensor``
    is_negated: int
    storage_offset: int  #: in elements
    storage_bytes: int


def torch_functions(names: Sequence[str] = _NAMES) -> TorchFunctions | None:
    """The functions; None if this torch has none, or if they do not answer as the methods in Python do."""
    if not hasattr(Tensor, "__dlpack_c_exchange_api__"):
        return None
    try:
        library = ctypes.CDLL("libtorch_cpu.so", mode=os.RTLD_NOW | os.RTLD_NOLOAD)
        functions: list[Any] = [getattr(library, name) for name in names]
    except (OSError, AttributeError):
        return None
    functions[0].restype = ctypes.c_bool
    place = object.__basicsize__
    numbers = torch.arange(6.0, dtype=torch.float32, device="cpu")
    tensors = (numbers[2:], numbers[1:]._neg_view(), Parameter(numbers[3:].clone()))
    if not all(_is_answered(functions, tensor, place) for tensor in tensors):
        return None
    return TorchFunctions(place, *[ctypes.cast(function, ctypes.c_void_p).value or 0 for function in functions])


def _is_answered(functions: Sequence[Any], tensor: Tensor, place: int) -> bool:
    """Whether the functions answer for a tensor as its methods do; they are called only if it is at ``place``."""
    address = id(tensor) + place
    handle = ctypes.c_void_p(address)
    if ctypes.c_void_p.from_address(address).value != tensor._cdata:  # the one pointer that an at::Tensor is
        return False
    offset, nbytes = ctypes.c_int64(), ctypes.c_int64()
    is_negated, storage_offset, storage_bytes = functions
    if storage_offset(handle, ctypes.byref(offset)) or storage_bytes(handle, ctypes.byref(nbytes)):
        return False
    found = (is_negated(handle), offset.value, nbytes.value)
    return found == (tensor.is_neg(), tensor.storage_offset(), tensor.untyped_storage().nbytes())
