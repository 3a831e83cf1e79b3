"""examples/many_tasks.py, started as its first lines say."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.examples.alone import start_alone
from tests.sampling import some

ROOT = Path(__file__).parents[2]


def launch(ranks: int, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "asynccomm.cli.main", "run", "-n", str(ranks), "examples/many_tasks.py"]
    done = subprocess.run(
        [*command, *map(str, arguments)], cwd=ROOT, capture_output=True, text=True, timeout=100, check=False
    )
    assert "Traceback" not in done.stderr, done.stderr
    return done


@pytest.mark.parametrize("ranks", some([3, 1, 2], 1))
def test_tasks_in_any_order_all_find_their_minimum(ranks: int) -> None:
    done = launch(ranks)
    assert done.returncode == 0, done.stderr
    found = re.search(
        r"20 tasks on (\d) ranks found their minimum: (\d+) averages, (\d+) to (\d+) per task, (\d+) batches",
        done.stdout,
    )
    assert found, done.stdout
    size, averages, fewest, most, batches = map(int, found.groups())
    assert size == ranks
    assert 20 * fewest <= averages <= 20 * most
    assert 0 < batches < averages


@pytest.mark.parametrize("ranks", some([2, 3], 1))
def test_in_program_order_the_ranks_are_told_what_does_not_fit(ranks: int) -> None:
    done = launch(ranks, "--ordering", "program")
    assert done.returncode != 0
    said = re.findall(r"the tasks took turns in different orders: (.*)", done.stdout + done.stderr)
    assert said, done.stderr
    for line in said:
        line = re.sub(r" at \S+:\d+ in \w+", "", line)  # where each of them called
        both = re.fullmatch(r"operation #\d+ differs: rank (\d) has (.*), rank (\d) has (.*)", line)
        assert both, line
        assert both[1] != both[3]
        assert both[2] != both[4]
        assert re.fullmatch(r"all_reduce\(float32\[32\], AVG, tag='task \d+'\)", both[2])
        # a tag that the rank has not used yet it cannot tell from its hash
        assert re.fullmatch(r"all_reduce\(float32\[32\], AVG, (tag='task \d+'|tag unknown here)\)", both[4])


def test_one_task_needs_no_agreement() -> None:
    assert launch(2, "--tasks", 1, "--ordering", "program").returncode == 0


def test_the_number_of_tasks_must_be_positive() -> None:
    done = start_alone("many_tasks.py", "--tasks", 0)
    assert done.returncode == 2
    assert "error: argument --tasks: must be at least 1\n" in done.stderr
