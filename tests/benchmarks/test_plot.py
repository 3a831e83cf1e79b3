"""The picture of measurements."""

from pathlib import Path

import pytest

from asynccomm.benchmarks.plot import plot
from asynccomm.benchmarks.rows import Measurement

pytest.importorskip("matplotlib", reason="the extra 'plot' is not installed")


def test_a_column_for_each_operation_and_a_line_for_each_contender(tmp_path: Path) -> None:
    rows = [
        Measurement(op=op, contender=name, backend="shm", ranks=2, bytes=size, us=1.0)
        for op, sizes in {"all_reduce": (8, 64), "barrier": (0,)}.items()
        for name in ("asynccomm", "gloo")
        for size in sizes
    ]
    plot(rows, tmp_path / "out.png")
    plot([], tmp_path / "empty.png")
    for name in ("out.png", "empty.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
    width = int.from_bytes((tmp_path / "out.png").read_bytes()[16:20], "big")
    plot(
        [*rows, *[Measurement(op="reduce", contender="gloo", backend="shm", ranks=2, bytes=8, us=1.0)]],
        tmp_path / "two.png",
    )
    assert int.from_bytes((tmp_path / "two.png").read_bytes()[16:20], "big") == pytest.approx(2 * width, abs=2)
