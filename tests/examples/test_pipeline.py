"""examples/pipeline.py, started as its first lines say."""

import re
import subprocess
import sys
from pathlib import Path

from tests.examples.alone import start_alone
from tests.sampling import amount

ROOT = Path(__file__).parents[2]


def launch(ranks: int, *arguments: str) -> str:
    command = [sys.executable, "-m", "asynccomm.cli.main", "run", "-n", str(ranks), "examples/pipeline.py"]
    done = subprocess.run([*command, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    return done.stdout


def losses(output: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"epoch \d+: loss ([\d.]+)", output)]


def test_stages_learn_what_one_rank_learns() -> None:
    epochs = amount(3, 2)
    together, one = launch(3, "--epochs", str(epochs)), start_alone("pipeline.py", "--epochs", epochs)
    assert one.returncode == 0, one.stderr
    alone = one.stdout
    assert "3 stages of 7 layers in all, shm" in together
    assert len(losses(alone)) == epochs
    for a, b in zip(losses(together), losses(alone), strict=True):
        assert abs(a - b) < 0.02
    (accuracy,) = re.findall(r"test accuracy: ([\d.]+)", together)
    assert float(accuracy) > 0.7


def test_counts_must_be_positive() -> None:
    done = start_alone("pipeline.py", "--microbatches", "0")
    assert done.returncode == 2
    assert "error: arguments --epochs, --batch-size and --microbatches: must be at least 1\n" in done.stderr
