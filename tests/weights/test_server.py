"""A server's settings."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from asynccomm.weights import Server, Shard

from .scenes import state


def test_labels_tell_servers_apart() -> None:
    first, second = Server(state()), Server(state())
    assert first.label != second.label
    assert str(os.getpid()) in first.label
    assert Server(state(), label="seven").label == "seven"
    assert first.version == 0


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
    with pytest.raises(ValueError, match="overlaps itself"):
        Server({"a": torch.ones(1).expand(2)})
