from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.many_hosts import jobs


@pytest.fixture
def job(tmp_path: Path) -> Iterator[jobs.Job]:
    yield from jobs.jobs(tmp_path)
