"""Two hosts on one machine: each has a network and a name of its own, and a virtual cable joins them.

A host is a process that holds a network namespace and a UTS namespace; it ends with the ``with`` block, and the
namespaces end with the last process in them. That takes root, and a system that allows namespaces: ``why_not`` says
whether it does.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

__all__ = ["INTERFACE", "Host", "sent_bytes", "two_hosts", "why_not"]

INTERFACE: Final = "eth0"  #: the end of the cable, on either host
_READY: Final = "ready"


@dataclass(frozen=True, slots=True)
class Host:
    """One of the hosts."""

    name: str
    address: str
    pid: int  #: of the process that holds the namespaces

    def command(self, *command: str) -> list[str]:
        """``command``, to be run on this host."""
        return ["nsenter", "--target", str(self.pid), "--net", "--uts", "--", *command]

    def start(self, command: Sequence[str], env: Mapping[str, str], **options: Any) -> subprocess.Popen[Any]:
        """Start ``command`` with these variables beside those of this process."""
        return subprocess.Popen(self.command(*command), env={**os.environ, **env}, **options)


def why_not() -> str | None:
    """The reason why no hosts can be made here; None if they can."""
    for tool in ("ip", "nsenter", "unshare"):
        if subprocess.run(["which", tool], capture_output=True, check=False).returncode:
            return f"{tool} is not installed"
    tried = subprocess.run(["unshare", "--net", "--uts", "true"], capture_output=True, text=True, check=False)
    return None if tried.returncode == 0 else f"namespaces are not allowed: {tried.stderr.strip()}"


@contextmanager
def two_hosts(shape: str = "") -> Iterator[tuple[Host, Host]]:
    """Two hosts with a cable between them.

    Args:
        shape: a queueing discipline of ``tc`` for both ends, such as ``"netem delay 1ms rate 1gbit"``; empty: none.

    Raises: RuntimeError with the output of the command that failed, as where the kernel lacks the discipline.
    """
    with ExitStack() as stack:
        names, addresses = ("host-a", "host-b"), ("10.77.0.1", "10.77.0.2")
        pids = [stack.enter_context(_holder(name)) for name in names]
        ends = [f"{INTERFACE} netns {pid}" for pid in pids]
        _run("ip", "link", "add", *ends[0].split(), "type", "veth", "peer", "name", *ends[1].split())
        hosts = [Host(*each) for each in zip(names, addresses, pids, strict=True)]
        for host in hosts:
            _run(*host.command("ip", "address", "add", f"{host.address}/24", "dev", INTERFACE))
            _run(*host.command("ip", "link", "set", INTERFACE, "up"))
            if shape:
                _run(*host.command("tc", "qdisc", "add", "dev", INTERFACE, "root", *shape.split()))
        yield hosts[0], hosts[1]


@contextmanager
def _holder(name: str) -> Iterator[int]:
    """A process in namespaces of its own, which are ready; its number."""
    script = f"hostname {name} && ip link set lo up && echo {_READY} && exec cat"
    command = ["unshare", "--net", "--uts", "sh", "-c", script]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with subprocess.Popen(command, text=True, **pipes) as process:  # it ends with its standard input
        assert process.stdout is not None
        if (said := process.stdout.readline().strip()) != _READY:
            raise RuntimeError(f"cannot make host {name}: {said}")
        yield process.pid


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {(done.stderr or done.stdout).strip()}")


def sent_bytes() -> int:
    """Bytes that this process's host has sent over the cable so far."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():  # unlike /sys, this follows the namespace
        name, _, numbers = line.partition(":")
        if name.strip() == INTERFACE:
            return int(numbers.split()[8])
    raise RuntimeError(f"this host has no interface {INTERFACE}")
