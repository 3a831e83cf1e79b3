import pytest

from asynccomm.benchmarks import mpi_launcher


def test_missing_parts_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mpi_launcher, "mpi_launcher", lambda: None)
    monkeypatch.setattr(mpi_launcher, "find_spec", lambda name: None)
    reason = mpi_launcher.why_not()
    assert reason is not None
    assert reason.startswith("peer 'mpi' needs mpi4py and numpy and mpiexec: pip install 'asynccomm[bench]'")
    monkeypatch.setattr(mpi_launcher, "mpi_launcher", lambda: "/bin/mpiexec")
    monkeypatch.setattr(mpi_launcher, "find_spec", lambda name: name)
    assert mpi_launcher.why_not() is None
