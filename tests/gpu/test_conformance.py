"""The conformance suite on real GPUs."""

from __future__ import annotations

import pytest

from asynccomm.testing import check_backend
from asynccomm.testing.conformance.suite import CHECKS
from tests.gpu.opening import needs_gpu, open_comm
from tests.sampling import some

pytestmark = needs_gpu


@pytest.mark.ranks([1, 2, 4], timeout=600)
@pytest.mark.timeout(700)
async def test_all() -> None:
    await check_backend(open_comm)


@pytest.mark.ranks(2, timeout=30)
@pytest.mark.parametrize("check", some(list(CHECKS), 8))  # test_all runs all of them in one comm
async def test_each(check: str) -> None:
    await check_backend(open_comm, only=[check])
