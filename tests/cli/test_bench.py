"""``asynccomm bench``."""

import json
import os
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path

import pytest

from asynccomm.benchmarks.rows import Measurement
from asynccomm.benchmarks.session_options import SessionOptions
from asynccomm.cli import bench
from asynccomm.cli.main import main
from tests.sampling import exhaustive


def test_a_row_for_each_operation_size_and_contender(launcher, tmp_path: Path) -> None:
    plot = ["--plot", "out.png"] if exhaustive() and find_spec("matplotlib") else []  # which takes 2 s to import
    code, out, err = launcher.run(
        *("bench", "--ops", "all_gather_single,barrier", "--sizes", "8,1K", "--rounds", "1"),
        *("--backend", "shm", "--peers", "torch", "--json", "rows.json", *plot),
    )
    assert code == 0, err
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert [(row["op"], row["bytes"], row["contender"]) for row in rows] == [
        (op, size, contender)
        for op, size in (("all_gather_single", 8), ("all_gather_single", 1024), ("barrier", 0))
        for contender in ("asynccomm", "gloo")
    ]
    for row in rows:
        assert (row["ranks"], row["backend"]) == (2, "shm")
        assert row["algbw"] == pytest.approx(row["bytes"] / row["us"] / 1e3)
        assert row["busbw"] == pytest.approx(row["algbw"] / (1 if row["op"] == "barrier" else 2))
    assert len(out.splitlines()) == 1 + len(rows)
    assert "busbw GB/s" in out
    if plot:
        assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--ranks 0", "argument --ranks: must be a whole number, at least 1, got '0'"),
        ("--ops all_reduce,juggle", "argument --ops: 'juggle' is not one of all_reduce, broadcast,"),
        ("--ranks 1 --ops send_recv", "argument --ops: 'send_recv' needs at least 2 ranks, got --ranks 1"),
        ("--sizes 8,many", "argument --sizes: must be a number of bytes, as 8, 64K or 4M, got 'many'"),
        ("--max 0", "argument --max: must be a number of bytes, as 8, 64K or 4M, got '0'"),
        ("--sizes 8 --max 64", "argument --max: cannot be given with --sizes, got 64"),
        ("--min 64 --max 8", "argument --min: must be at most the largest size, 8, got 64"),
        ("--factor 1", "argument --factor: must be at least 2, got 1"),
        ("--backend loopback", "argument --backend: 'loopback' is not one of auto, gloo, hierarchical, nccl, shm"),
        ("--rounds -3", "argument --rounds: must be a whole number, at least 1, got '-3'"),
        ("--peers gloo", "argument --peers: 'gloo' is not one of torch, mpi, none"),
        ("--json none/x.json", "argument --json: the folder 'none' does not exist"),
        ("--plot none/x.png", "argument --plot: the folder 'none' does not exist"),
        ("--json .", "argument --json: must be a file, and '.' is a folder"),
        ("--plot .", "argument --plot: must be a file, and '.' is a folder"),
        ("--json pipe", "argument --json: must be a file, and 'pipe' is a device, a pipe or an open file"),
    ],
)
def test_wrong_arguments(
    arguments: str, message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe")
    with pytest.raises(SystemExit) as ended:
        main(["bench", *arguments.split()])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_missing_packages(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "find_spec", lambda name: None)
    with pytest.raises(SystemExit):
        main(["bench", "--plot", "out.png"])
    assert "argument --plot: 'out.png' needs matplotlib: pip install 'asynccomm[plot]'" in capsys.readouterr().err
    monkeypatch.setattr(bench, "why_not", lambda: "peer 'mpi' needs mpiexec")
    with pytest.raises(SystemExit):
        main(["bench", "--peers", "mpi"])
    assert "argument --peers: peer 'mpi' needs mpiexec" in capsys.readouterr().err


def test_what_was_measured_is_drawn(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    row = Measurement(op="barrier", contender="gloo", backend="shm", ranks=2, bytes=0, us=1.0)
    drawn: list[object] = []

    def measure(ranks: int, session: SessionOptions) -> int:
        Path(session.out).write_text(json.dumps([asdict(row)]))
        return 0

    monkeypatch.setattr(bench, "find_spec", lambda name: object())
    monkeypatch.setattr(bench, "_launch", measure)
    monkeypatch.setattr(bench, "plot", lambda rows, path: drawn.append((list(rows), path)))
    assert main(["bench", "--ops", "barrier", "--plot", str(tmp_path / "out.png")]) == 0
    assert drawn == [([row], tmp_path / "out.png")]
    monkeypatch.setattr(bench, "_launch", lambda ranks, session: 3)
    assert main(["bench", "--ops", "barrier", "--plot", str(tmp_path / "out.png")]) == 3
    assert len(drawn) == 1, "nothing was measured"


def test_sizes_grow_by_the_factor(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(bench, "_launch", lambda ranks, session: seen.append((ranks, session)) or 0)
    monkeypatch.setattr(bench, "why_not", lambda: None)
    assert main(["bench", "--ranks", "4", "--min", "8", "--max", "1K", "--factor", "4"]) == 0
    assert main(["bench", "--sizes", "1M", "--peers", "none", "--ranks", "1"]) == 0
    (ranks, grown), (_, given) = seen
    assert (ranks, grown.sizes, grown.peers) == (4, [8, 32, 128, 512], ["torch", "mpi"])
    assert (given.sizes, given.peers) == ([1 << 20], [])
    assert "send_recv" not in given.ops
