"""examples/weight_sync.py, started as its first lines say."""

import re
import subprocess
import sys
from pathlib import Path

from tests.examples.alone import start_alone

ROOT = Path(__file__).parents[2]


def launch(ranks: int, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "asynccomm.cli.main", "run", "-n", str(ranks), "examples/weight_sync.py"]
    return subprocess.run([*command, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=100)


def test_servers_answer_while_weights_arrive() -> None:
    done = launch(3, "--versions", "6", "--width", "256", "--pause", "0")
    assert done.returncode == 0, done.stderr
    pushed = [int(number) for number in re.findall(r"^\[0\] version (\d+): loss [\d.]+, pushed in", done.stdout, re.M)]
    assert pushed == [1, 2, 3, 4, 5, 6]
    for rank in (1, 2):
        said = "".join(line for line in done.stdout.splitlines(keepends=True) if line.startswith(f"[{rank}]"))
        assert re.search(r"served versions [0-5] to 6", said)  # the first request may come late
        # under load, all requests may come while weights arrive, or none
        for when in ("while weights were arriving", "else"):
            assert re.search(rf"{when}: (\d+ requests, median [\d.]+ ms|no requests)", said)
        assert sum(map(int, re.findall(r": (\d+) requests, median", said))) > 0


def test_one_rank_is_told_to_bring_more() -> None:
    done = start_alone("weight_sync.py")
    assert done.returncode != 0
    assert "start at least two" in done.stderr + done.stdout


def test_counts_must_be_positive() -> None:
    done = start_alone("weight_sync.py", "--versions", 0)
    assert done.returncode == 2
    assert "error: arguments --versions, --steps and --width: must be at least 1\n" in done.stderr
