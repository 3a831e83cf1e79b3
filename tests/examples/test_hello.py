"""examples/hello.py, started as its first line says."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_every_rank_prints_the_sum() -> None:
    command = [sys.executable, "-m", "asynccomm.cli.main", "run", "-n", "3", "examples/hello.py"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [
        f"[{rank}] rank {rank} of 3: the numbers 1 to 3 sum up to 6" for rank in range(3)
    ]
