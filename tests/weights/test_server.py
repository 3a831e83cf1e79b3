"""A server's settings."""

from __future__ import annotations

import os

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
    with pytest.raises(ValueError, match="overlaps itself"):
        Server({"a": torch.ones(1).expand(2)})
