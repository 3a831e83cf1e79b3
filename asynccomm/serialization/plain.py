"""Plain data as pickles that name no class or function except complex.

Plain data: None, bools, numbers, strings, bytes, lists, tuples, dicts and sets, of exactly these types, and dense
tensors, which travel outside of the pickle.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor

DTYPES: Final = (  # a dtype's code is its index: append only
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex32,
    torch.complex64,
    torch.complex128,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu,
)
CODES: Final = {dtype: code for code, dtype in enumerate(DTYPES)}


class NotPlainError(TypeError):
    """An object cannot be written in the form PLAIN."""


class _FoundTensor(Exception):
    """The object contains tensors: the slower pickler has to write it."""


class _Pickler(pickle.Pickler):
    """Pickles objects without classes and functions; runs in C except for unsupported types."""

    def reducer_override(self, obj: object) -> Any:
        if type(obj) is complex or obj is complex:
            return NotImplemented  # default pickling: a call of the one class that the reader accepts
        raise _FoundTensor if is_plain(obj) else NotPlainError(type(obj).__name__)


class _TensorPickler(pickle.Pickler):
    """Like `_Pickler`, with tensors as numbers. Slow: a Python call for each object."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, 5)
        self.tensors: list[Tensor] = []
        self._numbers: dict[int, int] = {}

    def persistent_id(self, obj: object) -> int | None:
        if type(obj) is not Tensor:
            return None
        number = self._numbers.get(id(obj))
        if number is None:
            if not is_plain(obj):
                raise NotPlainError("Tensor")
            number = self._numbers[id(obj)] = len(self.tensors)
            self.tensors.append(obj)
        return number

    def reducer_override(self, obj: object) -> Any:
        if type(obj) is complex or obj is complex:
            return NotImplemented
        raise NotPlainError(type(obj).__name__)


def is_plain(obj: object) -> bool:
    """Whether ``obj`` is a tensor that can travel outside of a pickle."""
    return (
        type(obj) is Tensor
        and not obj.requires_grad
        and obj.layout is torch.strided
        and obj.dtype in CODES  # quantized dtypes have no code
        and not obj.is_nested
        and obj.device.type != "meta"
    )


class _Unpickler(pickle.Unpickler):
    """Reads the output of `_Pickler`, and refuses all classes and functions except complex."""

    def __init__(self, data: bytes | bytearray, tensors: Sequence[Tensor]) -> None:
        super().__init__(io.BytesIO(data))
        self._tensors = tensors

    def find_class(self, module: str, name: str) -> type[complex]:
        if (module, name) == ("builtins", "complex"):
            return complex
        raise pickle.UnpicklingError(f"it names {module}.{name}")

    def persistent_load(self, number: object) -> Tensor:
        if type(number) is not int or not 0 <= number < len(self._tensors):
            raise pickle.UnpicklingError(f"it has no tensor {number!r}")
        return self._tensors[number]


def pickled(obj: object) -> tuple[io.BytesIO, list[Tensor]]:
    """The pickle of plain data, and its tensors. Raises: NotPlainError, RecursionError."""
    buffer = io.BytesIO()
    try:
        _Pickler(buffer, 5).dump(obj)
    except _FoundTensor:
        buffer = io.BytesIO()
        pickler = _TensorPickler(buffer)
        pickler.dump(obj)
        return buffer, pickler.tensors
    return buffer, []


def dump_plain(obj: object) -> bytes:
    """A plain pickle of an object without tensors. Raises: NotPlainError."""
    buffer = io.BytesIO()
    try:
        _Pickler(buffer, 5).dump(obj)
    except _FoundTensor:
        raise NotPlainError("Tensor") from None
    return buffer.getvalue()


def load_plain(data: bytes | bytearray, tensors: Sequence[Tensor] = ()) -> Any:
    """The object of a plain pickle. Raises any exception: see ``objects.reading``."""
    return _Unpickler(data, tensors).load()
