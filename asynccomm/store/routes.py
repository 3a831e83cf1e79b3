"""The network interfaces of this host, and the address at which the way to another host begins."""

from __future__ import annotations

import ctypes
import functools
import ipaddress
import os
import socket
from pathlib import Path
from typing import Final, NamedTuple

_IFF_UP: Final = 1
_ADDRESS_AT: Final = {socket.AF_INET: (4, 4), socket.AF_INET6: (8, 16)}  # offset and bytes in the sockaddr


class InterfaceAddress(NamedTuple):
    """One address of this host."""

    interface: str
    address: str

    def __str__(self) -> str:
        return f"{self.interface} ({self.address})"


class _IfAddrs(ctypes.Structure):
    pass


_IfAddrs._fields_ = [
    ("next", ctypes.POINTER(_IfAddrs)),
    ("name", ctypes.c_char_p),
    ("flags", ctypes.c_uint),
    ("address", ctypes.c_void_p),
]


def interface_addresses() -> list[InterfaceAddress]:
    """All IPv4 and IPv6 addresses of the interfaces that are up, in the system's order. Raises: OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    head = ctypes.POINTER(_IfAddrs)()
    if libc.getifaddrs(ctypes.byref(head)):
        raise OSError(ctypes.get_errno(), "getifaddrs failed")
    found = []
    try:
        entry = head
        while entry:
            one = entry.contents
            family = ctypes.c_ushort.from_address(one.address).value if one.address else socket.AF_UNSPEC
            if family in _ADDRESS_AT and one.flags & _IFF_UP:
                offset, size = _ADDRESS_AT[socket.AddressFamily(family)]
                text = socket.inet_ntop(family, ctypes.string_at(one.address + offset, size))
                found.append(InterfaceAddress(os.fsdecode(one.name), text))
            entry = one.next
    finally:
        libc.freeifaddrs(head)
    return found


def interface_of(address: str) -> str:
    """The name of the interface that has ``address``; empty if none has."""
    return next((each.interface for each in interface_addresses() if each.address == address), "")


@functools.lru_cache
def is_reachable(address: str) -> bool:
    """Whether other hosts may reach ``address``: loopback serves this host only, and so do link-local addresses.

    An IPv6 link-local address is valid together with the number of an interface, which differs from host to host.
    """
    try:
        ip = ipaddress.ip_address(address)
    except ValueError:
        return False
    return not (ip.is_loopback or ip.is_unspecified or (ip.version == 6 and ip.is_link_local))


def reachable_addresses() -> list[InterfaceAddress]:
    """The addresses of this host that other hosts may reach."""
    return [each for each in interface_addresses() if is_reachable(each.address)]


def addresses_of(name: str) -> list[str]:
    """The addresses that a host name resolves to; none if it does not resolve. Blocks, maybe for seconds."""
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except OSError:
        return []
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


def address_towards(host: str, port: int) -> str | None:
    """The address of the interface that reaches ``host``; None if the name does not resolve or no route exists."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as sock:
            sock.connect(address)  # sends nothing
            return str(sock.getsockname()[0])
    except OSError:
        return None


def network_id() -> str:
    """An identity of this process's network: equal where two processes reach each other by loopback.

    Containers of one machine differ in it, also where they share a host name.
    """
    try:
        return f"{_boot_id()}/{os.stat('/proc/self/ns/net').st_ino}"
    except OSError:
        return socket.gethostname()


@functools.cache
def _boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
