"""The choice between the groups for small and for large transfers."""

from typing import Any

import pytest

from asynccomm.backends.gloo.groups import LARGE, TransferGroups


@pytest.mark.parametrize(
    ("nbytes", "group"), [(0, "small"), (LARGE - 1, "small"), (LARGE, "large"), (1 << 40, "large")]
)
def test_the_size_of_a_transfer_decides(nbytes: int, group: str) -> None:
    groups: Any = TransferGroups("small", "large")  # type: ignore[arg-type]
    assert groups.by_size(nbytes) == group
