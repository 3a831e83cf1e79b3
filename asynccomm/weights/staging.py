"""The second copy of a server's weights, where a version arrives, and the step that puts it in the place of the first.

A tensor of a module changes places with its copy: the module gets the new memory, and the old memory receives the next
version. That takes no time, but needs a tensor that no other object holds a view of. All other tensors (values of a
mapping, views and their bases, DTensors) are copied into.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import final

import torch
from torch import Tensor

from asynccomm.backends.arithmetic import write
from asynccomm.weights.layout import Weights, is_dtensor

__all__ = ["Staging"]


@final
class Staging:
    """The memory for the version that arrives.

    Args:
        read: reads the server's weights anew.
        swaps: whether tensors may change places with their copies, because they belong to a module.
        in_place: there is no second copy; versions arrive in the weights themselves.
    """

    def __init__(self, read: Callable[[], Weights], *, swaps: bool, in_place: bool) -> None:
        self._read, self._swaps, self._in_place = read, swaps, in_place
        weights = read()
        self.layout = weights.layout
        self._copies = (
            {}
            if in_place
            else {name: _like(tensor) for name, tensor in weights.tensors.items() if not weights.layout[name].tied}
        )

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The tensors to receive into."""
        return self._checked().tensors if self._in_place else self._copies

    def apply(self) -> None:
        """Put the copy in the place of the weights. Raises: ValueError if the state has other tensors by now."""
        weights = self._checked()
        swapped = set()
        alone = _alone(weights) if self._swaps else set()
        with torch.no_grad():
            for name, copy in self._copies.items():
                owner = weights.owners[name]
                if name in alone:
                    self._copies[name], owner.data = owner.data, copy
                    swapped.add(name)
                else:
                    write(weights.tensors[name], copy)
            for name, part in weights.layout.items():
                if part.tied in swapped:
                    weights.owners[name].data = weights.owners[part.tied].data

    def _checked(self) -> Weights:
        weights = self._read()
        if weights.layout != self.layout:
            names = [*weights.layout, *self.layout]
            other = sorted({name for name in names if weights.layout.get(name) != self.layout.get(name)})
            raise ValueError(f"state must have the tensors of its server's making, but these are others: {other}")
        return weights


def _like(tensor: Tensor) -> Tensor:
    """New memory, which may change places with ``tensor``: an inference tensor if ``tensor`` is one."""
    with torch.inference_mode(tensor.is_inference()):
        return torch.empty_like(tensor)


def _alone(weights: Weights) -> set[str]:
    """The names of the tensors that fill their storage, and have it for themselves."""
    owners = {name: owner for name, owner in weights.owners.items() if not weights.layout[name].tied}
    plain = {name: owner.untyped_storage() for name, owner in owners.items() if not is_dtensor(owner)}
    users = Counter(storage.data_ptr() for storage in plain.values())
    return {
        name
        for name, storage in plain.items()
        if storage.nbytes() == owners[name].nbytes and users[storage.data_ptr()] == 1
    }
