"""examples/inference_engine.py, started as its first lines say."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.examples.alone import start_alone
from tests.sampling import some

ROOT = Path(__file__).parents[2]


def launch(ranks: int, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "asynccomm.cli.main", "run", "-n", str(ranks), "examples/inference_engine.py"]
    return subprocess.run(
        [*command, *map(str, arguments)], cwd=ROOT, capture_output=True, text=True, timeout=100, check=False
    )


@pytest.mark.parametrize("ranks", some([3, 2, 4], 1))
def test_every_request_is_answered_and_latencies_are_printed(ranks: int) -> None:
    done = launch(ranks, "--users", 8, "--requests", 10)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    found = re.search(
        r"80 requests of 8 users, \d+ per second: latency ([\d.]+) ms \(median\), ([\d.]+) ms \(90 %\), ([\d.]+) ms",
        done.stdout,
    )
    assert found, done.stdout
    p50, p90, p99 = map(float, found.groups())
    assert 0 < p50 <= p90 <= p99


def test_a_front_end_needs_workers() -> None:
    done = start_alone("inference_engine.py")
    assert done.returncode != 0
    assert "the engine needs a front end and at least one worker" in done.stderr + done.stdout


@pytest.mark.parametrize("argument", some(["--users", "--requests"], 1))
def test_counts_must_be_positive(argument: str) -> None:
    done = start_alone("inference_engine.py", argument, 0)
    assert done.returncode == 2
    assert "error: arguments --users and --requests: must be at least 1\n" in done.stderr
