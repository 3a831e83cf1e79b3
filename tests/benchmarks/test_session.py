"""One rank of ``asynccomm bench``. ``tests/cli/test_bench.py`` runs it on two ranks."""

import pytest
import torch

from asynccomm.benchmarks.session import _device
from asynccomm.benchmarks.session_options import SessionOptions


@pytest.mark.parametrize(
    ("backend", "gpus", "expected"),
    [("auto", 0, "cpu"), ("auto", 1, "cpu"), ("auto", 2, "cuda:1"), ("shm", 2, "cpu"), ("nccl", 0, "cuda:1")],
)
def test_a_gpu_is_used_where_each_rank_has_one(
    backend: str, gpus: int, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    options = SessionOptions(ops=[], sizes=[], backend=backend, peers=[], rounds=1, out="")
    assert _device(options) == torch.device(expected)
