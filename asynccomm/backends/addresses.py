"""The address of this host that a comm uses between hosts: for gloo, and for the control channel.

In this order: the hint ``hostname`` or ``interface``, the interface of GLOO_SOCKET_IFNAME, loopback if all ranks are on
one host, the interface that leads to the store, the one that leads to another host's, the address of the host's name,
the interface of the default route. Loopback is never taken where ranks are in several networks.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, final

from asynccomm.backends.base import RankInfo
from asynccomm.errors import BackendError
from asynccomm.store.routes import (
    address_towards,
    addresses_of,
    interface_addresses,
    interface_of,
    is_reachable,
    reachable_addresses,
)

LOOPBACK: Final = "127.0.0.1"
VARIABLE: Final = "GLOO_SOCKET_IFNAME"

_ANY_PORT: Final = 9  # nothing is sent there
_FAR_AWAY: Final = ("192.0.2.1", "2001:db8::1")  # reserved for documents: the way there is the default route


@final
@dataclass(frozen=True, slots=True)
class LocalAddress:
    """An address of this host, and the reason for its choice, which completes "..., because"."""

    address: str
    reason: str

    def __str__(self) -> str:
        return f"{self.address} ({interface_of(self.address) or 'no interface'})"


def choose_address(
    hints: Mapping[str, str], environ: Mapping[str, str], rank: int, members: Sequence[RankInfo]
) -> LocalAddress:
    """The address of ``rank``, which is this process. May block while names are resolved.

    Raises: BackendError naming host, interface and address, and the variable to set.
    """
    found = named_address(hints, environ) or automatic_address(rank, members)
    host = members[rank].host
    if found is None:
        raise BackendError(f"host {host!r} has no way to the other hosts of the comm: {advice()}")
    if several_networks(members) and not is_reachable(found.address):
        raise BackendError(
            f"host {host!r} would use {found}, because {found.reason}; other hosts cannot reach it: {advice()}"
        )
    return found


def several_networks(members: Sequence[RankInfo]) -> bool:
    """Whether some ranks cannot reach each other by loopback."""
    return len({member.network for member in members}) > 1


def named_address(hints: Mapping[str, str], environ: Mapping[str, str]) -> LocalAddress | None:
    """The address that a hint or the environment names; None if none does. Raises: BackendError if it is wrong."""
    if (name := hints.get("hostname")) is not None:
        return _of_name(f"hint 'hostname'={name!r}", name)
    if (name := hints.get("interface")) is not None:
        return _of_interfaces(f"hint 'interface'={name!r}", [name])
    if names := [name.strip() for name in environ.get(VARIABLE, "").split(",") if name.strip()]:
        return _of_interfaces(f"{VARIABLE}={environ[VARIABLE]!r}", names)
    return None


def _of_name(source: str, name: str) -> LocalAddress:
    ours = {each.address for each in interface_addresses()}
    resolved = addresses_of(name)
    for address in resolved:
        if address in ours:
            return LocalAddress(address, f"{source} names it")
    to = f"resolves to {', '.join(resolved)}, which no interface has" if resolved else "does not resolve"
    raise BackendError(f"{source} {to} on host {socket.gethostname()!r}: {advice()}")


def _of_interfaces(source: str, names: Sequence[str]) -> LocalAddress:
    """The first address of the first of these interfaces, one that other hosts may reach if there is one."""
    addresses = interface_addresses()
    for name in names:
        found = [each.address for each in addresses if each.interface == name]
        found.sort(key=lambda address: not is_reachable(address))
        if found:
            return LocalAddress(found[0], f"{source} names it")
    raise BackendError(
        f"{source} names no interface of host {socket.gethostname()!r} that is up and has an address: {advice()}"
    )


def automatic_address(rank: int, members: Sequence[RankInfo]) -> LocalAddress | None:
    """The address of ``rank``, which is this process, without a hint; None if there is none."""
    me = members[rank]
    if all(member.host == me.host for member in members):
        return LocalAddress(LOOPBACK, "all ranks are on one host")
    if me.address:
        return LocalAddress(me.address, "it leads to the store")
    if not several_networks(members):
        return LocalAddress(LOOPBACK, "all ranks are on one machine")
    return _towards_others(me, members)


def _towards_others(me: RankInfo, members: Sequence[RankInfo]) -> LocalAddress | None:
    """The way out of a host where the store gives none: the store is on this host, or is a file."""
    for member in members:
        if member.address and member.network != me.network:
            address = address_towards(member.address, _ANY_PORT)
            if address and is_reachable(address):
                return LocalAddress(address, f"it leads to host {member.host!r}")
    ours = {each.address for each in interface_addresses()}
    for address in addresses_of(socket.gethostname()):
        if address in ours and is_reachable(address):
            return LocalAddress(address, "the host's name resolves to it")
    for far in _FAR_AWAY:
        address = address_towards(far, _ANY_PORT)
        if address and is_reachable(address):
            return LocalAddress(address, "it is on the default route")
    return None


def advice() -> str:
    """The end of an error about the address: the variable to set, and its choices."""
    found = reachable_addresses()
    if not found:
        return "no interface of this host has an address that other hosts could reach"
    return f"set {VARIABLE}, or hints={{'interface': ...}}, to one of {', '.join(map(str, found))}"
