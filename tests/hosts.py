"""Hosts on one machine: namespaces of network, host name and mounts, joined by a bridge.

A namespace has no name and lives as long as a process in it. Each is held by a process that ends with its standard
input, and so with pytest, in whatever way that ends: nothing is left behind.

A test without the right to make namespaces, or without the commands ``ip``, ``tc`` and ``unshare``, is skipped.
``bench/hosts.py`` uses this module, too.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO

import pytest

NAMESPACES = 0x40000000 | 0x04000000 | 0x00020000  # CLONE_NEWNET, CLONE_NEWUTS, CLONE_NEWNS
TOOLS = ("ip", "tc", "unshare", "nsenter", "hostname", "mount")
NOWHERE = "02:00:00:00:00:ff"  # a hardware address that no interface has
ROOT = Path(__file__).parent.parent


@functools.cache
def missing() -> str:
    """Why no hosts can be made here; empty: they can."""
    if sys.platform != "linux":
        return "namespaces are Linux's"
    if absent := [tool for tool in TOOLS if shutil.which(tool) is None]:
        return f"the commands {', '.join(absent)} are not installed (Debian: iproute2, util-linux, hostname)"
    tried = subprocess.run(["unshare", "-n", "-u", "-m", "true"], capture_output=True, text=True)
    return f"namespaces are not allowed here: {tried.stderr.strip()}" if tried.returncode else ""


@functools.cache
def has_netem() -> bool:
    """Whether the kernel can delay packets."""
    command = "ip link add tried type dummy && tc qdisc add dev tried root netem delay 1ms"
    return subprocess.run(["unshare", "-n", "sh", "-c", command], capture_output=True).returncode == 0


class _Holder:
    """A process that holds namespaces, until its standard input ends."""

    def __init__(self, unshare: Sequence[str], prepare: str = "true") -> None:
        self.process = subprocess.Popen(
            ["unshare", *unshare, "sh", "-c", f"{prepare} && echo ready && exec cat"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.pid = self.process.pid

    def wait(self) -> None:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line == "ready\n", f"a namespace could not be made: {line!r}"

    def ip(self, *lines: str) -> None:
        """Commands of ``ip``, run there."""
        command = ["nsenter", "-t", str(self.pid), "-n", "ip", "-batch", "-"]
        subprocess.run(command, input="\n".join(lines) + "\n", text=True, check=True, capture_output=True)

    def close(self) -> None:
        for stream in (self.process.stdin, self.process.stdout):
            assert stream is not None
            stream.close()
        self.process.wait()


class Host:
    """One host: ``eth0`` leads to the others.

    Attributes:
        address: of eth0; IPv6 where the hosts have no IPv4.
    """

    def __init__(self, number: int, address: str, hosts_file: Path) -> None:
        self.name = f"node{number}"
        self.address = address
        self._hardware = f"02:00:00:00:00:{number + 1:02x}"
        prepare = f"hostname {self.name} && mount --bind {hosts_file} /etc/hosts"
        self._holder = _Holder(["-n", "-u", "-m"], prepare)

    def start(
        self,
        *arguments: str,
        environment: Mapping[str, str] | None = None,
        output: int | IO[bytes] | None = subprocess.PIPE,
        directory: Path = ROOT,
    ) -> subprocess.Popen[bytes]:
        """Python with these arguments, on this host."""
        launcher = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "GLOO_SOCKET_IFNAME")
        clean = {name: value for name, value in os.environ.items() if name not in launcher}
        return subprocess.Popen(
            [sys.executable, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**clean, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **(environment or {})},
            cwd=directory,
            start_new_session=True,
            preexec_fn=entering(self._holder.pid),
        )

    def run(self, *command: str) -> None:
        """A command, on this host."""
        prefix = ["nsenter", "-t", str(self._holder.pid), "-n", "-u", "-m", "--"]
        subprocess.run([*prefix, *command], check=True, capture_output=True)

    def down(self) -> None:
        """Take the link down."""
        self._holder.ip("link set eth0 down")

    def lose_towards(self, other: Host) -> None:
        """Lose all packets to ``other``; those from it arrive."""
        self._holder.ip(f"neigh replace {other.address} lladdr {NOWHERE} dev eth0 nud permanent")

    def shape(self, *discipline: str) -> None:
        """Delay or limit the packets that leave this host, by a queueing discipline of ``tc``."""
        self.run("tc", "qdisc", "replace", "dev", "eth0", "root", *discipline)

    def _connect(self, switch: _Holder, number: int, addresses: Sequence[str]) -> None:
        switch.ip(
            f"link add v{number} type veth peer name eth0 netns {self._holder.pid}",
            f"link set v{number} master switch",
            f"link set v{number} up",
        )
        self._holder.ip(
            f"link set eth0 address {self._hardware}",
            "link set lo up",
            *(f"address add {address} dev eth0 {'nodad' if ':' in address else ''}" for address in addresses),
            "link set eth0 up",
        )


@contextlib.contextmanager
def hosts(count: int, folder: Path, *, ipv4: bool = True, names: str = "") -> Iterator[list[Host]]:
    """``count`` hosts on one network, 10.0.0.1 and up, fd00::1 and up.

    Args:
        folder: for /etc/hosts.
        ipv4: False: they have IPv6 only.
        names: lines of /etc/hosts; the hosts' own names do not resolve otherwise.
    """
    if reason := missing():
        pytest.skip(reason)
    (folder / "hosts").write_text(f"127.0.0.1 localhost\n::1 localhost\n{names}\n")
    with contextlib.ExitStack() as stack:
        switch = _Holder(["-n"], "ip link add switch type bridge && ip link set switch up")
        stack.callback(switch.close)
        made = []
        for number in range(count):
            four, six = f"10.0.0.{number + 1}", f"fd00::{number + 1}"
            host = Host(number, four if ipv4 else six, folder / "hosts")
            stack.callback(host._holder.close)
            made.append(host)
        switch.wait()
        for number, host in enumerate(made):
            host._holder.wait()
            four, six = f"10.0.0.{number + 1}/24", f"fd00::{number + 1}/64"
            host._connect(switch, number, [four, six] if ipv4 else [six])
        yield made


def entering(pid: int) -> Callable[[], None]:
    """A function that moves the process that calls it to the host of process ``pid``."""
    kinds = NAMESPACES

    def enter() -> None:  # it is also called by its code alone, in another process: see warm_python
        import ctypes
        import os

        libc = ctypes.CDLL(None, use_errno=True)
        directory = os.getcwd()
        host = os.pidfd_open(pid)
        if libc.setns(host, kinds):
            raise OSError(ctypes.get_errno(), "setns")
        os.close(host)
        os.chdir(directory)  # the other mounts have begun at their root

    return enter
