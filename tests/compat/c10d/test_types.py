"""Types and constants, and what becomes of torch's reductions."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import distributed as torch_dist
from torch._C._distributed_c10d import _make_nccl_premul_sum

import asynccomm
import asynccomm.compat.c10d as dist
from asynccomm.compat.c10d import types

OPTIONS = {
    "AllreduceOptions": ["asyncOp", "reduceOp"],
    "AllreduceCoalescedOptions": ["asyncOp", "reduceOp"],
    "AllgatherOptions": ["asyncOp"],
    "AllToAllOptions": ["asyncOp"],
    "BarrierOptions": ["asyncOp", "device", "device_ids"],
    "BroadcastOptions": ["asyncOp", "rootRank", "rootTensor"],
    "GatherOptions": ["asyncOp", "rootRank"],
    "ReduceOptions": ["asyncOp", "reduceOp", "rootRank"],
    "ReduceScatterOptions": ["asyncOp", "reduceOp"],
    "ScatterOptions": ["asyncOp", "rootRank"],
}
KINDS = ["SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR"]


@pytest.mark.parametrize("name", OPTIONS)
def test_option_structs(name: str) -> None:
    options = getattr(dist, name)()
    for field in OPTIONS[name]:
        assert hasattr(options, field)


def test_torch_s_own_types() -> None:
    assert dist.ReduceOp is torch_dist.ReduceOp
    assert dist.Store is torch_dist.Store
    assert dist.PrefixStore is torch_dist.PrefixStore
    assert dist.DistStoreError is torch_dist.DistStoreError
    assert dist.get_debug_level() in (dist.DebugLevel.OFF, dist.DebugLevel.INFO, dist.DebugLevel.DETAIL)
    assert dist.GroupName("0") == "0"
    assert dist.Store.__module__ == dist.ReduceOp.__module__ == "torch.distributed.distributed_c10d"


def test_constants() -> None:
    assert dist.PG_WRAPPER_STORE_PREFIX == "pg_wrapper"
    assert dist.STORE_BASED_BARRIER_PREFIX == "store_based_barrier_key"
    assert (dist.SHRINK_DEFAULT, dist.SHRINK_ABORT) == (0, 1)
    assert dist.GroupMember.NON_GROUP_MEMBER == -100


def test_timeouts() -> None:
    assert dist.default_pg_timeout == timedelta(minutes=30)
    assert dist.default_pg_nccl_timeout in (timedelta(minutes=10), None)


@pytest.mark.parametrize("backend", ["gloo", "cpu:gloo,cuda:nccl", "undefined", "auto"])
def test_default_timeout_of_all_but_nccl(backend: str) -> None:
    assert types.default_timeout(backend) == timedelta(minutes=30)


def test_default_timeout_of_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(types, "default_pg_nccl_timeout", timedelta(minutes=10))
    assert types.default_timeout("nccl") == timedelta(minutes=10)
    monkeypatch.setattr(types, "default_pg_nccl_timeout", None)
    with pytest.warns(UserWarning, match="without NCCL"):
        assert types.default_timeout("nccl") == timedelta(minutes=30)


@pytest.mark.parametrize("timeout", [None, 3, 2.5, "1"])
def test_timeouts_are_timedeltas(timeout: Any) -> None:
    with pytest.raises(TypeError, match=r"timeout must be a datetime.timedelta"):
        dist._check_valid_timeout(timeout)


def test_reduce_op_warns_at_every_access() -> None:
    for _ in range(2):
        with pytest.warns(FutureWarning, match="deprecated"):
            assert dist.reduce_op.SUM == dist.ReduceOp.SUM
    with pytest.warns(FutureWarning):
        assert dist.reduce_op.__members__ == dist.ReduceOp.RedOpType.__members__


@pytest.mark.parametrize("kind", KINDS)
def test_reductions_of_torch_are_known(kind: str) -> None:
    member = getattr(dist.ReduceOp, kind)
    expected = getattr(asynccomm.ReduceOp, kind)
    assert types.reduction(member) == expected
    assert types.reduction(dist.ReduceOp(member)) == expected
    assert types.reduction(expected) is expected


def test_factors_are_kept() -> None:
    assert types.reduction(_make_nccl_premul_sum(2.0)) == asynccomm.ReduceOp.PREMUL_SUM(2.0)
    factor = torch.tensor([3.0])
    assert types.reduction(_make_nccl_premul_sum(factor)).factor == factor


def test_what_is_no_reduction_is_refused() -> None:
    with pytest.raises(TypeError, match="op must be one of"):
        types.reduction("SUM")


@pytest.mark.parametrize("kind", KINDS)
def test_supports_complex(kind: str) -> None:
    expected = kind in ("SUM", "AVG")
    member = getattr(dist.ReduceOp, kind)
    assert dist.supports_complex(member) == expected
    assert dist.supports_complex(dist.ReduceOp(member)) == expected
    assert dist.supports_complex(getattr(asynccomm.ReduceOp, kind)) == expected


def test_stores_and_errors_of_torch_distributed() -> None:
    for name in ("TCPStore", "FileStore", "HashStore", "DistError", "DistBackendError", "DistNetworkError"):
        assert getattr(dist, name) is getattr(torch.distributed, name)
        assert name not in dist.__all__
    assert dist.is_available()
