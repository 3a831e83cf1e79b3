"""examples/parameter_server.py, started as its first lines say."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.examples.alone import start_alone

ROOT = Path(__file__).parents[2]


def launch(ranks: int, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "asynccomm.cli.main", "run", "-n", str(ranks), "examples/parameter_server.py"]
    return subprocess.run([*command, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=100)


@pytest.mark.parametrize("backend", ["shm", pytest.param("gloo", marks=pytest.mark.exhaustive)])
def test_the_loss_falls_and_all_steps_are_counted(backend: str) -> None:
    done = launch(3, "--backend", backend)
    assert done.returncode == 0, done.stderr
    found = re.findall(r"^\[0\] +(\d+) of 200 steps: loss ([\d.]+)", done.stdout, re.M)
    assert len(found) == 5
    assert int(found[-1][0]) == 200
    assert float(found[-1][1]) < 0.01


def test_one_rank_is_told_to_bring_more() -> None:
    done = start_alone("parameter_server.py")
    assert done.returncode != 0
    assert "start at least two" in done.stderr + done.stdout


def test_the_number_of_steps_must_be_positive() -> None:
    done = start_alone("parameter_server.py", "--steps", 0)
    assert done.returncode == 2
    assert "error: argument --steps: must be at least 1\n" in done.stderr
