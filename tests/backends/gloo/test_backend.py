"""gloo on real processes: the conformance suite, and what is gloo's own."""

import pytest

from asynccomm import new_comm
from asynccomm.testing import check_backend


@pytest.mark.ranks([1, 2, 3, 4, 5], backend="gloo", timeout=240)
async def test_conformance() -> None:
    await check_backend(lambda name: new_comm("gloo", name=name, timeout=50))
