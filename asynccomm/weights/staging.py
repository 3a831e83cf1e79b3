"""The second copy of a server's weights, where a version arrives, and the step that puts it in the place of the first.

A parameter or buffer of a module changes places with its copy: the module gets the new memory, and the old memory
receives the next version. That takes no time, but needs a tensor that no other object holds a view of. All others
(values of a mapping, views and their bases, DTensors, tensors that ``state_dict`` makes) are copied into.
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
        in_place: there is no second copy; versions arrive in the weights themselves.
    """

    def __init__(self, read: Callable[[], Weights], *, in_place: bool) -> None:
        self._read, self._in_place = read, in_place
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
        alone = _alone(weights)
        with torch.no_grad():
            for name, copy in self._copies.items():
                if name in alone:
                    owner = weights.owners[name]
                    self._copies[name], owner.data = owner.data, copy
                else:
                    write(weights.tensors[name], copy)
            for name, part in weights.layout.items():
                if part.tied in alone:
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
    """The names of the parameters and buffers that fill their storage, and have it for themselves."""
    tied = {name for name in weights.owners if weights.layout[name].tied}  # these follow the first one
    storages = {name: tensor.untyped_storage() for name, tensor in weights.tensors.items() if name not in tied}
    users = Counter(storage.data_ptr() for storage in storages.values())
    return {
        name
        for name, storage in storages.items()
        if name in weights.owners
        and not is_dtensor(weights.owners[name])
        and storage.nbytes() == weights.tensors[name].nbytes
        and users[storage.data_ptr()] == 1
    }
