"""``asynccomm trace``; the findings are tested in tests/observe, and on a real job in test_diagnose.py."""

import asyncio
import json
import pickle
from pathlib import Path

import pytest

from asynccomm.cli.main import main
from asynccomm.testing.local import loopback_world


def write(directory: Path, *counts: int) -> None:
    """A dump for each rank, of so many barriers."""
    for rank, count in enumerate(counts):
        entries = [
            {
                "process_group": ("main", "main"),
                "collective_seq_id": seq,
                "is_p2p": False,
                "profiling_name": "shm:barrier",
                "state": "completed",
                "time_created_ns": seq,
            }
            for seq in range(count)
        ]
        config = {"main": {"name": "main", "desc": "main", "ranks": str(list(range(len(counts))))}}
        (directory / f"rank_{rank}").write_bytes(pickle.dumps({"pg_config": config, "entries": entries}))


def test_the_exit_code_tells_whether_all_match(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, 2, 2)
    assert main(["trace", "analyze", str(tmp_path)]) == 0
    assert "all collectives match" in capsys.readouterr().out
    write(tmp_path, 2, 1)
    assert main(["trace", "analyze", str(tmp_path), "--json"]) == 1
    (found,) = json.loads(capsys.readouterr().out)
    assert found["suspect"] == {
        "seq": 1,
        "problem": "missing",
        "ranks": [1],
        "calls": {"0": "shm:barrier, completed"},
    }


def test_a_folder_without_dumps_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exited:
        main(["trace", "analyze", str(tmp_path)])
    assert exited.value.code == 2
    assert "there is no dump of a rank" in capsys.readouterr().err


def test_a_file_that_is_given_twice_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async def traced() -> None:
        async with loopback_world(1) as (comm,):
            with comm.trace(tmp_path / "out.json"):
                await comm.barrier()

    asyncio.run(traced())
    path, out = str(tmp_path / "out.rank0.json"), tmp_path / "merged.json"
    with pytest.raises(SystemExit) as exited:
        main(["trace", "merge", path, path, "--out", str(out)])
    assert exited.value.code == 2
    assert f"{path} and {path} hold the same operations of rank 0" in capsys.readouterr().err
    assert not out.exists()


def test_a_damaged_file_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, 1)
    (tmp_path / "rank_1").write_bytes(pickle.dumps({"pg_config": {"main": {}}, "entries": []}))
    (tmp_path / "part.json").write_text('{"asynccommPart": {"rank": 0}}')
    for arguments, error in [
        (["analyze", str(tmp_path)], "rank_1 is no dump of a flight recorder: "),
        (["merge", str(tmp_path / "part.json"), "--out", "x.json"], "part.json is no trace of a single rank: "),
    ]:
        with pytest.raises(SystemExit) as exited:
            main(["trace", *arguments])
        assert exited.value.code == 2
        assert error in capsys.readouterr().err.splitlines()[-1]
