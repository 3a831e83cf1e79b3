"""The order of test files on xdist's workers: the longest first, so that none keeps one worker busy at the end.

xdist itself puts those with the most tests first, and so at the end those that have one long test.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Final

import pytest

ROOT: Final = Path(__file__).parent
# By their time. Those with a hundred tests are among the first as it is.
LONGEST: Final = (
    "backends/nccl/test_backend.py",
    "backends/shm/test_backend.py",
    "cli/test_launch.py",
    "backends/gloo/test_backend.py",
    "bench/test_benches.py",
    "many_hosts/test_starting.py",
    "backends/test_loopback.py",
    "examples/test_train_digits.py",
    "backends/gloo/test_payloads.py",
    "backends/shm/test_batches_on_boards.py",
    "testing/test_isolation.py",
    "security/test_gloo_headers.py",
    "cli/test_diagnose.py",
    "backends/hierarchical/test_backend.py",
    "compat/test_hosts.py",
    "examples/test_elastic.py",
    "backends/gloo/test_hosts.py",
    "examples/test_pipeline.py",
    "interop/test_torch_suite.py",
)


def keep_order(config: pytest.Config) -> None:
    """In pytest's main process: xdist hands out the files in the order of their collection."""
    if hasattr(config.option, "loadscopereorder"):
        config.option.loadscopereorder = False


def sort(items: list[pytest.Item]) -> None:
    """Put the longest files first, and then those with the most tests."""
    places = {ROOT / name: place for place, name in enumerate(LONGEST)}
    counts = Counter(item.path for item in items)
    items.sort(key=lambda item: (places.get(item.path, len(places)), -counts[item.path], item.path))
