"""A mode of torch in which tensors are created in shared memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, final

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from asynccomm.batching.queue import current_owner
from asynccomm.core.handles import Handle

_CREATED: Final = ("empty", "zeros", "ones", "full", "rand", "randn", "randint")
# operators that create tensors, by their names in torch.ops.aten; those of torch's composite functions call these
EMPTY: Final = frozenset({"empty", "empty_strided", "empty_like", "empty_permuted", "new_empty", "new_empty_strided"})
CREATING: Final = EMPTY.union(
    _CREATED,
    [f"{name}_like" for name in _CREATED],
    [f"new_{name}" for name in ("zeros", "ones", "full")],
    ("randperm", "arange", "linspace", "logspace", "eye", "scalar_tensor", "normal", "tril_indices", "triu_indices"),
    ("lift_fresh", "clone", "_to_copy"),  # torch.tensor; clone; to
)


@final
class SharedMemoryMode(Handle, TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Creates tensors by ``allocate(shape, stride, dtype)`` in the task, or thread, that makes the mode."""

    _instead = "call comm.memory() there"

    def __init__(self, allocate: Callable[[Sequence[int], Sequence[int], torch.dtype], Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._allocate = allocate
        self._owner = current_owner()

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name not in CREATING or not _is_plain(made) or current_owner() != self._owner:
            return made
        moved = self._allocate(made.shape, made.stride(), made.dtype)
        if name not in EMPTY:
            moved.copy_(made)
        return moved


def _is_plain(made: object) -> bool:
    """Whether a tensor is one of numbers in memory of its own, which another tensor of its strides may replace."""
    return bool(
        type(made) is Tensor
        and made.device.type == "cpu"
        and made.layout is torch.strided
        and not made.is_quantized
        and made.numel() > 0
        and not (made.is_conj() or made.is_neg())
        and made.storage_offset() == 0
        and made.untyped_storage().nbytes() == made.nbytes
    )
