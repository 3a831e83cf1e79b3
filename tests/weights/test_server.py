"""A server's settings."""

from __future__ import annotations

import os
from itertools import count
from typing import Any

import pytest
import torch
from torch import nn

from asynccomm.weights import Server, Shard

from .scenes import state


def test_labels_tell_servers_apart() -> None:
    first, second = Server(state()), Server(state())
    assert first.label != second.label
    assert str(os.getpid()) in first.label
    assert Server(state(), label="seven").label == "seven"
    assert first.version == 0


def test_a_state_of_copies_is_refused() -> None:
    model = nn.Linear(2, 2)
    model._register_state_dict_hook(lambda module, found, *_: {**found, "weight": found["weight"].clone()})
    for in_place in (False, True):
        with pytest.raises(ValueError, match=r"state must give its tensors .* copies of these: \['weight'\]"):
            Server(model, in_place=in_place)
    Server(model, rename=lambda name: None if name == "weight" else name)


def test_other_names_at_each_call_are_refused() -> None:
    numbers = count()
    with pytest.raises(ValueError, match=r"must give the same names each time, got \['0', '1'\], then"):
        Server(nn.Linear(2, 2), rename=lambda name: str(next(numbers)))


def test_a_state_beside_parameters_and_buffers() -> None:
    """Tensors that are a module's own in another way, and stay where they are."""

    class Scaled(nn.Linear):
        scale = torch.ones(2)

        def get_extra_state(self) -> torch.Tensor:
            return self.scale

    Server(Scaled(2, 2))
    Server({"empty": torch.empty(0)})


def test_bad_arguments() -> None:
    with pytest.raises(ValueError, match="label must be a non-empty str, got ''"):
        Server(state(), label="")
    with pytest.raises(ValueError, match="timeout must be positive"):
        Server(state(), timeout=-1)
    with pytest.raises(ValueError, match=r"shards must have names of tensors in state, got \['x'\]"):
        Server(state(), shards={"x": Shard(0, 0, 1)})
    wrong: dict[str, Any] = {"strict": "no", "in_place": "no", "shards": {"a": 3}, "store": 3, "hints": 3}
    for name, value in wrong.items():
        with pytest.raises(TypeError, match=rf"{name}\S* must be .*, got (3|'no')"):
            Server({"a": torch.ones(1)}, **{name: value})
    with pytest.raises(TypeError, match="automatic must be True or False, got 1"):
        Server(state()).updates(automatic=1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"state\['t0'\] is on cpu, but server 'seven' is on meta"):
        Server(state(), label="seven", device="meta")
    with pytest.raises(ValueError, match="overlaps itself"):
        Server({"a": torch.ones(1).expand(2)})
