"""The inputs of probes."""

from __future__ import annotations

from pathlib import Path

from asynccomm.cli.probing import SystemInfo, size_text


def test_versions_of_packages() -> None:
    assert SystemInfo().version("pytest")
    assert SystemInfo().version("no-such-package") is None


def test_files_are_read_below_the_root(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc" / "version").write_text("Linux\n")
    system = SystemInfo(root=tmp_path)
    assert system.read("proc/version") == "Linux\n"
    assert system.read("proc/none") is None


def test_sizes() -> None:
    assert size_text(64 << 20) == "64.0 MiB"
    assert size_text(3 << 29) == "1.5 GiB"
