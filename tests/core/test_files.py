"""Files that are written whole or not at all."""

import errno
import os
import stat
import threading
from pathlib import Path

import pytest

from asynccomm.core.files import is_replaced, write_whole


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_file_is_replaced_and_keeps_its_mode(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_whole(path, b"one")
    (tmp_path / "plain").touch()
    assert mode_of(path) == mode_of(tmp_path / "plain"), "the umask gives the mode of a new file"
    path.chmod(0o640)
    with path.open("rb") as former:
        write_whole(str(path), b"two")
        assert former.read() == b"one", "readers of the former file keep it"
    assert (path.read_bytes(), mode_of(path)) == (b"two", 0o640)


def test_other_files_beside_it_stay(tmp_path: Path) -> None:
    other = tmp_path / "file.new"
    other.write_text("of the user")
    write_whole(tmp_path / "file", b"data")
    assert other.read_text() == "of the user"
    assert sorted(each.name for each in tmp_path.iterdir()) == ["file", "file.new"]


@pytest.mark.parametrize("existing", [True, False])
def test_a_link_stays_a_link(tmp_path: Path, existing: bool) -> None:
    target, link = tmp_path / "there" / "target", tmp_path / "link"
    target.parent.mkdir()
    if existing:
        target.write_bytes(b"former")
    link.symlink_to(Path("there", "target"))
    write_whole(link, b"data")
    assert link.is_symlink()
    assert target.read_bytes() == b"data"


def test_a_pipe_gets_the_bytes(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        write_whole(path, b"data")
        assert os.read(reader, 10) == b"data"
    finally:
        os.close(reader)
    assert path.is_fifo()


def test_a_device_stays_a_device(tmp_path: Path) -> None:
    terminal, device = os.openpty()
    try:
        link = tmp_path / "link"
        link.symlink_to(os.ttyname(device))
        write_whole(link, b"data")
        assert os.read(terminal, 10) == b"data"
        assert os.isatty(device)
        assert link.is_char_device()
    finally:
        os.close(terminal)
        os.close(device)


def test_an_open_file_gets_the_bytes_behind_its_own(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with log.open("wb", buffering=0) as file:
        file.write(b"earlier ")
        place = Path(f"/dev/fd/{file.fileno()}")
        link = tmp_path / "link"
        link.symlink_to(place)
        for path in (place, link):
            assert not is_replaced(path)
            write_whole(path, b"data ")
        assert is_replaced(log)
    assert log.read_bytes() == b"earlier data data "


def test_an_anonymous_pipe_has_a_name_that_leads_nowhere(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    try:
        write_whole(f"/dev/fd/{writer}", b"data")  # as a shell's >(command) is named
        assert os.read(reader, 10) == b"data"
    finally:
        os.close(reader)
        os.close(writer)


def test_a_failure_leaves_the_former_file_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"former")

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="No space left") as caught:
        write_whole(path, b"data")
    assert caught.value.filename == str(path)
    assert path.read_bytes() == b"former"
    assert list(tmp_path.iterdir()) == [path]


def test_the_temporary_file_may_be_in_another_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    moved: list[Path] = []
    replace = os.replace
    monkeypatch.setattr(os, "replace", lambda old, new: (moved.append(Path(old)), replace(old, new)))
    (tmp_path / "folder").mkdir()
    write_whole(tmp_path / "file", b"data", tmp_path / "folder")
    assert moved[0].parent == tmp_path / "folder"
    assert (tmp_path / "file").read_bytes() == b"data"


def test_threads_that_write_one_file_do_not_mix(tmp_path: Path) -> None:
    contents = [bytes([number]) * 100_000 for number in range(4)]
    threads = [threading.Thread(target=write_whole, args=(tmp_path / "file", each)) for each in contents]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (tmp_path / "file").read_bytes() in contents
