"""examples/elastic.py, started as its user would: nothing of the training is lost with a rank."""

import os
import random
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.sampling import some

ROOT = Path(__file__).parents[2]


RANDOM = random.Random(19)
KILLS = [("shm", 0, 40), ("gloo", 2, 40), *(("shm", RANDOM.randrange(3), RANDOM.randrange(109)) for _ in range(50))]


@pytest.mark.timeout(200)
@pytest.mark.parametrize(("backend", "victim", "at"), some(KILLS, 1))
def test_training_goes_on_without_a_rank_and_with_a_new_one(backend: str, victim: int, at: int) -> None:
    command = [sys.executable, "examples/elastic.py", "--backend", backend, "--kill", str(victim), "--at", str(at)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stdout + done.stderr
    # the script has compared steps, losses and weights, and would have failed; here is that it had reason to
    losses = [float(loss) for loss in re.findall(r"^step +\d+ +loss ([\d.]+)", done.stdout, re.M)]
    assert len(losses) == 15
    assert losses[-1] < 0.1 * losses[0]
    assert f"kill -9 of rank {victim}" in done.stdout
    for rank in {0, 1, 2} - {victim}:
        (lost, smaller, larger) = re.findall(rf"^step +\d+ +rank {rank}: (.*)", done.stdout, re.M)
        assert re.match(r"\w+Error: ", lost)
        assert (smaller, larger) == ("2 ranks now", "3 ranks now")
    assert "150 steps, none lost, none repeated" in done.stdout
    assert f"the same weights, bit by bit; rank {victim} was killed, one came in" in done.stdout
    (error,) = re.findall(r"has the same losses, within ([\d.e-]+) of their value", done.stdout)
    assert float(error) < 1e-4


def test_control_c_ends_it_without_a_traceback() -> None:
    command = [sys.executable, "examples/elastic.py"]
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline().startswith("step   0")  # the ranks are training
            os.killpg(process.pid, signal.SIGINT)  # as a terminal does
            _, errors = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 130
    assert "Traceback" not in errors
