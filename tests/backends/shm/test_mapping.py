"""Mappings by themselves; test_arena.py and test_peer_memory.py use them."""

import os

import pytest
import torch

from asynccomm.backends.shm.mapping import Mapping, memory_at
from asynccomm.backends.shm.segment import create


def maps(address: int) -> str:
    """The access to the mapping at an address; empty without a mapping."""
    with open("/proc/self/maps") as lines:
        return next((line.split()[1] for line in lines if line.startswith(f"{address:x}-")), "")


def test_a_mapping_needs_no_descriptor_and_ends_with_its_object() -> None:
    fd = create(1 << 20)
    writing, reading = Mapping(fd, 4096, 8192, writable=True), Mapping(fd, 4096, 8192, writable=False)
    os.close(fd)
    assert (maps(writing.address), maps(reading.address)) == ("rw-s", "r--s")
    writing.buffer()[100:104] = b"\x00\x00\x80\x3f"
    assert memory_at(reading.address + 100, 4, torch.float32).tolist() == [1.0]
    writing.free()
    assert not memory_at(reading.address, 8192, torch.uint8).any()
    address = reading.address
    del reading
    assert maps(address) != "r--s"


def test_a_file_that_cannot_be_mapped_is_an_os_error() -> None:
    with pytest.raises(OSError, match="Bad file descriptor"):
        Mapping(-1, 0, 4096, writable=False)
    fd = create(4096)
    with pytest.raises(OSError, match="Invalid argument"):
        Mapping(fd, 1, 4096, writable=False)
    os.close(fd)
