"""examples/train_digits.py, started as its user would, and the parts that make N ranks equal to one."""

import asyncio
import importlib.util
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest
import torch

from tests.examples.alone import start_alone
from tests.observe.test_chrome import check_format
from tests.sampling import amount

ROOT = Path(__file__).parents[2]
SCRIPT = "examples/train_digits.py"


def launch(ranks: int, *arguments: str, options: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "asynccomm.cli.main", "run", "-n", str(ranks), *options, SCRIPT, *arguments]
    # bytes, decoded here: text mode would turn the carriage returns of the progress bar into line feeds
    done = subprocess.run(command, cwd=ROOT, capture_output=True, timeout=100)
    return subprocess.CompletedProcess(command, done.returncode, done.stdout.decode(), done.stderr.decode())


@dataclass
class FinishedWork:
    started: float
    finished: float


@pytest.fixture(scope="module")
def example() -> Iterator[ModuleType]:
    spec = importlib.util.spec_from_file_location("train_digits", ROOT / SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def test_two_ranks_learn_the_digits(tmp_path: Path) -> None:
    epochs = amount(15, 7)  # 15 are the example's own number
    done = launch(2, "--epochs", str(epochs), options=("--trace", str(tmp_path / "out.json")))
    assert done.returncode == 0, done.stderr

    trace = json.loads((tmp_path / "out.json").read_text())
    check_format(trace)
    steps = [event["pid"] for event in trace["traceEvents"] if event.get("cat") == "collective"]
    assert steps.count(0) == steps.count(1) >= 29 * epochs

    (accuracy,) = re.findall(r"test accuracy: ([\d.]+)", done.stdout)
    assert float(accuracy) > 0.95
    (speed,) = re.findall(r"speed: (\d+) samples/s \(ranks: 2, backend: \w+\)", done.stdout)
    assert int(speed) > 0
    ((communication, total, hidden),) = re.findall(
        r"communication: ([\d.]+) s of ([\d.]+) s, (-?\d+)% of it hidden", done.stdout
    )
    assert 0 < float(communication) < float(total)
    assert int(hidden) <= 100  # how much it is depends on the machine; see tests/gradients/test_reducer.py
    assert all(line.startswith("[0]") for line in done.stdout.splitlines())

    bars = [line for line in re.split(r"[\r\n]+", done.stderr) if "training:" in line]
    assert any(f"{29 * epochs}/{29 * epochs}" in line for line in bars)
    assert [line for line in bars if not line.startswith("[0]")] == []


def test_two_ranks_train_the_same_weights_as_one(tmp_path: Path) -> None:
    weights = {}
    for ranks in (1, 2):
        saved = tmp_path / f"{ranks}.pt"
        # larger batches than usual, and so fewer steps
        arguments = "--epochs", str(amount(2, 1)), "--batch-size", "96", "--lr", "0.003", "--save", str(saved)
        done = launch(ranks, *arguments) if ranks > 1 else start_alone("train_digits.py", *arguments)
        assert done.returncode == 0, done.stderr
        weights[ranks] = torch.load(saved, weights_only=True)
    # The gradients are the same sums, added in another order: float32 rounds them differently by some 1e-7 of their
    # value, so weights (below 1 here) end up a few units in the last place apart, 6e-8 each. The small learning rate
    # keeps training from amplifying that (on some CPUs, 0.01 does not). A gradient that is missing, doubled or of other
    # samples makes 1e-4 and more.
    torch.testing.assert_close(weights[2], weights[1], rtol=0, atol=1e-5)


def test_wrong_arguments_are_named() -> None:
    done = start_alone("train_digits.py", "--epochs", "0")
    assert done.returncode == 2
    assert "error: arguments --epochs and --batch-size: must be at least 1\n" in done.stderr

    done = launch(2, "--batch-size", "7")
    assert done.returncode == 1
    for rank in range(2):
        assert f"[{rank}] --batch-size 7 does not divide evenly among 2 ranks\n" in done.stderr
    assert "Traceback" not in done.stderr

    done = start_alone("train_digits.py", "--batch-size", "1438")
    assert done.returncode == 1
    assert "--batch-size is 1438, but there are 1437 samples\n" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_device_that_is_not_there() -> None:
    done = start_alone("train_digits.py", "--device", "cuda")
    assert done.returncode == 2
    assert "error: argument --device: torch finds no GPU here\n" in done.stderr


def test_time_under_way_counts_once(example: ModuleType) -> None:
    class Gradients:
        works = (FinishedWork(1.0, 3.0), FinishedWork(2.0, 4.0), FinishedWork(2.5, 3.5), FinishedWork(6.0, 7.0))

        async def finish(self) -> None:
            self.works = ()  # as after a step

    overlap = example.Overlap()
    asyncio.run(overlap.finish(Gradients()))
    assert overlap.total == 4.0
    assert 0 <= overlap.exposed < overlap.total
    assert overlap.hidden == 1 - overlap.exposed / 4.0


def test_the_slices_of_all_ranks_are_the_global_batches(example: ModuleType) -> None:
    train, _ = example.load()
    whole = list(example.batches(train, epochs=2, batch_size=48, seed=3, rank=0, size=1))
    slices = [list(example.batches(train, epochs=2, batch_size=48, seed=3, rank=rank, size=3)) for rank in range(3)]
    assert len(whole) == 2 * (len(train.labels) // 48)
    for batch, *parts in zip(whole, *slices, strict=True):
        assert [len(part.labels) for part in parts] == [16, 16, 16]
        assert torch.equal(batch.images, torch.cat([part.images for part in parts]))
        assert torch.equal(batch.labels, torch.cat([part.labels for part in parts]))
    assert not torch.equal(whole[0].labels, whole[len(whole) // 2].labels), "each epoch has an order of its own"


def test_training_and_test_set_are_disjoint_and_complete(example: ModuleType) -> None:
    train, test = example.load()
    assert (len(train.labels), len(test.labels)) == (1437, 360)
    everything = torch.cat([train.images, test.images]).flatten(1)
    assert len(everything.unique(dim=0)) == 1797  # no two of the digits are the same image


def test_images_are_shifted_by_a_pixel(example: ModuleType) -> None:
    images = torch.randn(3, 1, 8, 8)
    moved = example.shifted(images, torch.tensor([[1, 1], [0, 1], [1, 2]]))
    assert torch.equal(moved[0], images[0])
    assert torch.equal(moved[1, 0, 1:], images[1, 0, :-1])
    assert torch.equal(moved[2, 0, :, :-1], images[2, 0, :, 1:])
    assert bool((moved[1, 0, 0] == -0.5).all())
    assert bool((moved[2, 0, :, 7] == -0.5).all())
