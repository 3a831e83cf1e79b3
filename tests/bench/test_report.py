"""Rows of results."""

import dataclasses
import importlib.util
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

REPORT = Path(__file__).parents[2] / "bench" / "report.py"


@pytest.fixture(scope="module")
def report() -> Iterator[ModuleType]:
    spec = importlib.util.spec_from_file_location("bench_report", REPORT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, spec.name, module)  # dataclasses look their module up
        spec.loader.exec_module(module)
        yield module


def row(report: ModuleType, asynccomm_us: float, peer_us: float):
    return report.Row(
        op="broadcast", bytes=8, ranks=2, backend="shm", asynccomm_us=asynccomm_us, peer="mpi", peer_us=peer_us
    )


def test_ratio_says_how_many_times_as_fast_we_are(report: ModuleType) -> None:
    assert row(report, 10.0, 300.0).ratio == 30.0


def test_rows_as_json(report: ModuleType, tmp_path: Path) -> None:
    rows = [row(report, 10.0, 300.0), row(report, 10.0, 5.0)]
    report.write_rows(tmp_path / "rows.json", rows)
    assert json.loads((tmp_path / "rows.json").read_text()) == [dataclasses.asdict(r) for r in rows]


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, SystemExit])
def test_results_outlive_an_interruption(report: ModuleType, tmp_path: Path, error: type[BaseException]) -> None:
    out, shown = tmp_path / "rows.json", []
    with pytest.raises(error), report.Results(lambda rows: shown.append(list(rows)), out) as rows:
        rows.add(row(report, 10.0, 300.0))
        assert len(json.loads(out.read_text())) == 1
        rows.add(row(report, 10.0, 5.0), row(report, 10.0, 20.0))
        raise error
    assert [found["ratio"] for found in json.loads(out.read_text())] == [30.0, 0.5, 2.0]
    assert shown == [rows]
    assert [path.name for path in tmp_path.iterdir()] == ["rows.json"]


def test_rank_0_reports_and_no_other(
    report: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for rank in ("1", "0"):
        monkeypatch.setenv("RANK", rank)
        with report.Results(report.print_rows, tmp_path / rank) as rows:
            rows.add(row(report, 10.0, 300.0))
        assert (tmp_path / rank).exists() == (rank == "0")
        assert ("30.00x" in capsys.readouterr().out) == (rank == "0")


def test_without_rows_there_is_nothing_to_show(report: ModuleType) -> None:
    with report.Results(pytest.fail, None):
        pass


def test_rows_as_a_table(report: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    report.print_rows([row(report, 10.0, 300.0), row(report, 10.0, 0.02)], "a title")
    printed = capsys.readouterr().out
    assert "a title" in printed
    assert "30.00x" in printed
    assert "0.002x" in printed  # not rounded to nothing
