"""bench/soak.py finds nothing in a few seconds, and says so when there is something."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.sampling import amount

ROOT = Path(__file__).parents[2]


def soak(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "soak.py", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT / "bench", capture_output=True, text=True, timeout=170, check=False)


def rows(path: Path) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """The summary, recoveries by fault, growth by what."""
    summary, *rest = json.loads(path.read_text())
    return (
        summary,
        {row["fault"]: row for row in rest if "fault" in row},
        {row["what"]: row for row in rest if "what" in row},
    )


@pytest.mark.timeout(200)
def test_killed_ranks_are_replaced(tmp_path: Path) -> None:
    out = tmp_path / "rows.json"
    done = soak("--minutes", amount(9, 4) / 60, "--ranks", 3, "--faults", "kill,killtwo", "--json", out)
    assert done.returncode == 0, done.stdout + done.stderr
    summary, recoveries, growth = rows(out)
    killed = recoveries["kill"]["faults"] + recoveries["killtwo"]["faults"]
    assert killed > 0
    assert summary["processes"] >= 3 + killed
    assert recoveries["kill"]["recoveries"] + recoveries["killtwo"]["recoveries"] >= killed
    assert (summary["failures"], summary["surprises"]) == ([], [])
    assert sum(summary["operations"].values()) > 0
    assert {"private_mb", "shared_mb", "fds", "threads", "/dev/shm", "unix names", "store keys"} <= growth.keys()


def descendants(pid: int) -> list[int]:
    try:
        children = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:  # it has ended meanwhile
        return []
    return [*children, *(pid for child in children for pid in descendants(child))]


@pytest.mark.timeout(200)
def test_what_was_found_outlives_an_interruption(tmp_path: Path) -> None:
    out = tmp_path / "rows.json"
    command = [sys.executable, "soak.py", "--minutes", "5", "--ranks", "3", "--json", str(out)]
    with subprocess.Popen(command, cwd=ROOT / "bench", stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as running:
        try:
            while len(descendants(running.pid)) < 5:  # two helpers, and the ranks
                assert running.poll() is None
                time.sleep(0.01)
            running.send_signal(signal.SIGTERM)
            _, said = running.communicate()
        finally:
            running.kill()  # it has ended, unless this test took too long
        assert running.returncode != 0, said
    summary, recoveries, _ = rows(out)
    assert summary["failures"] == ["it was ended by KeyboardInterrupt()"]
    assert recoveries["kill"]["faults"] >= 0


def test_bad_arguments_are_named() -> None:
    done = soak("--faults", "kill,rain")
    assert done.returncode == 2
    assert "argument --faults: 'rain' is not one of" in done.stderr
    assert "--ranks: at least 2" in soak("--ranks", 1).stderr
