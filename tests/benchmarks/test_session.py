"""One rank of ``asynccomm bench``. ``tests/cli/test_bench.py`` runs it on two ranks."""

import pytest
import torch

from asynccomm.benchmarks.session import _device
from asynccomm.benchmarks.session_options import SessionOptions


@pytest.mark.parametrize(
    ("backend", "gpus", "expected"),
    [("auto", 0, "cpu"), ("auto", 1, "cpu"), ("auto", 2, "cuda:1"), ("shm", 2, "cpu"), ("nccl", 2, "cuda:1")],
)
def test_a_gpu_is_used_where_each_rank_has_one(
    backend: str, gpus: int, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert device(backend, gpus, monkeypatch) == torch.device(expected)


@pytest.mark.parametrize("gpus", [0, 1])
def test_nccl_needs_a_gpu_for_each_rank(gpus: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SystemExit, match=f"'nccl' needs a GPU for each of 2 ranks, and torch finds {gpus}"):
        device("nccl", gpus, monkeypatch)


def device(backend: str, gpus: int, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """The device of the second of two ranks."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    return _device(SessionOptions(ops=[], sizes=[], backend=backend, peers=[], rounds=1, out=""))
