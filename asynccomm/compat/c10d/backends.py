"""Names of backends, the devices they serve, and their availability in this installation.

A name is torch's (``gloo``, ``nccl``) or one of ours: ``shm`` (the ranks of one machine), ``auto`` (the fastest
available backend for the CPU), ``loopback`` (tests), or a backend added by an entry point. All backends run on
asynccomm's transports, except ``fake``, which moves no data: see the module ``fake``.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any, ClassVar, Final, NamedTuple, cast, final

import torch
from torch import distributed as dist

_log: Final = logging.getLogger("asynccomm")

_GLOO_AVAILABLE: Final = dist.is_gloo_available()
_NCCL_AVAILABLE: Final = dist.is_nccl_available() and find_spec("nccl") is not None
_MPI_AVAILABLE: Final = False  # no transport of ours uses it, also if torch was built with it
_UCC_AVAILABLE: Final = False
_XCCL_AVAILABLE: Final = False


def is_mpi_available() -> bool:
    """Whether MPI can be used: never, as no transport of ours uses it."""
    return _MPI_AVAILABLE


def is_nccl_available() -> bool:
    """Whether torch was built with NCCL and our NCCL binding is installed."""
    return _NCCL_AVAILABLE


def is_gloo_available() -> bool:
    """Whether torch was built with gloo."""
    return _GLOO_AVAILABLE


def is_ucc_available() -> bool:
    """Whether UCC can be used: never, as no transport of ours uses it."""
    return _UCC_AVAILABLE


def is_xccl_available() -> bool:
    """Whether XCCL can be used: never, as no transport of ours uses it."""
    return _XCCL_AVAILABLE


class Plugin(NamedTuple):
    """Arguments of one ``Backend.register_backend`` call."""

    creator_fn: Callable[..., Any]
    extended_api: bool


class Backend(str):
    """Names of backends: ``Backend.GLOO`` and ``Backend("GLOO")`` are both ``"gloo"``.

    ``Backend`` accepts an unknown name, and returns it in lower case; creating a group with it fails.
    """

    __slots__ = ()

    UNDEFINED: Final = "undefined"
    GLOO: Final = "gloo"
    NCCL: Final = "nccl"
    UCC: Final = "ucc"
    MPI: Final = "mpi"
    XCCL: Final = "xccl"
    AUTO: Final = "auto"
    SHM: Final = "shm"
    LOOPBACK: Final = "loopback"
    FAKE: Final = "fake"

    _plugins: ClassVar[dict[str, Plugin]] = {}
    backend_list: ClassVar[list[str]] = [UNDEFINED, GLOO, NCCL, XCCL, UCC, MPI, AUTO, SHM, LOOPBACK, FAKE]
    default_device_backend_map: ClassVar[dict[str, str]] = {"cpu": GLOO, "cuda": NCCL, "xpu": XCCL, "mps": GLOO}
    backend_capability: ClassVar[dict[str, list[str]]] = {
        GLOO: ["cpu", "cuda"],
        NCCL: ["cuda"],
        XCCL: ["xpu"],
        UCC: ["cpu", "cuda"],
        MPI: ["cpu", "cuda"],
        AUTO: ["cpu"],
        SHM: ["cpu"],
        LOOPBACK: ["cpu"],
        FAKE: ["cpu", "cuda"],
    }
    backend_type_map: ClassVar[dict[str, dist.ProcessGroup.BackendType]] = {
        UNDEFINED: dist.ProcessGroup.BackendType.UNDEFINED,
        GLOO: dist.ProcessGroup.BackendType.GLOO,
        NCCL: dist.ProcessGroup.BackendType.NCCL,
        XCCL: dist.ProcessGroup.BackendType.XCCL,
        UCC: dist.ProcessGroup.BackendType.UCC,
        MPI: dist.ProcessGroup.BackendType.MPI,
        **dict.fromkeys((AUTO, SHM, LOOPBACK, FAKE), dist.ProcessGroup.BackendType.CUSTOM),
    }

    def __new__(cls, name: str) -> Backend:
        """Return the name in lower case, as a plain str. Raises ``ValueError`` if it is not a str."""
        if not isinstance(name, str):
            raise ValueError(f"a backend is named by a str, got {name!r}")
        found: str = getattr(Backend, name.upper(), Backend.UNDEFINED)
        return cast("Backend", name.lower() if found == Backend.UNDEFINED else found)

    @classmethod
    def register_backend(
        cls,
        name: str,
        func: Callable[..., Any],
        extended_api: bool = False,
        devices: str | Sequence[str] | None = None,
    ) -> None:
        """Register ``func`` as the constructor of groups of backend ``name``.

        Args:
            func: returns a ``Comm`` or a ``ProcessGroup``, or an awaitable of either. Groups call
                ``func(store, rank, size, timeout)``, or with ``extended_api`` ``func(options, pg_options)``, where
                options has ``store, group_rank, group_size, timeout, group_id, global_ranks_in_group``.
            devices: the types of device that the backend serves; types without a default backend get this one.
        """
        served = [devices] if isinstance(devices, str) else None if devices is None else list(devices)
        known, upper = name.lower(), name.upper()
        if not hasattr(cls, upper):
            setattr(cls, upper, known)
        if known not in cls.backend_list:
            cls.backend_list.append(known)
        if served is None:
            warnings.warn(
                f"backend {name!r} was registered without devices=: it is taken to serve 'cpu' and 'cuda'"
                + (" and 'xpu'" if torch.xpu.is_available() else ""),
                stacklevel=2,
            )
            served = ["cpu", "cuda", *(["xpu"] if torch.xpu.is_available() else [])]
        else:
            for device in served:
                cls.default_device_backend_map.setdefault(device, known)
        cls.backend_type_map[known] = dist.ProcessGroup.BackendType.CUSTOM
        cls.backend_capability[known] = served
        cls._plugins[upper] = Plugin(func, extended_api)


@final
class BackendConfig:
    """Backends of one group by type of device.

    Args:
        backend: a name; ``"undefined"``, for the accelerator of this machine or else the CPU; or pairs such as
            ``"cpu:gloo,cuda:nccl"``.
    """

    def __init__(self, backend: str) -> None:
        name = str(backend)
        if name == Backend.UNDEFINED:
            self.device_backend_map: dict[str, Backend] = _detected()
        elif name.lower() in Backend.backend_list:
            self.device_backend_map = dict.fromkeys(Backend.backend_capability[name.lower()], Backend(name))
        elif ":" in name:
            self.device_backend_map = _pairs(name)
        else:
            warnings.warn(
                f"the devices of backend {name!r} are not known: it is taken to serve 'cpu', 'cuda' and 'xpu'; "
                f"name them as in 'device:backend'",
                stacklevel=2,
            )
            self.device_backend_map = dict.fromkeys(("cpu", "cuda", "xpu"), Backend(name))
        _log.info("backends by device: %s", self.device_backend_map)

    def __repr__(self) -> str:
        return ",".join(f"{device}:{backend}" for device, backend in self.device_backend_map.items())

    def get_device_backend_map(self) -> dict[str, Backend]:
        """Return the backends by type of device."""
        return self.device_backend_map


def _detected() -> dict[str, Backend]:
    device = accelerator()
    if device not in Backend.default_device_backend_map:
        raise ValueError(
            f"this machine has an accelerator of type {device!r}, which no backend is known for: pass backend= to "
            f"init_process_group"
        )
    return {device: Backend(Backend.default_device_backend_map[device])}


def _pairs(name: str) -> dict[str, Backend]:
    found: dict[str, Backend] = {}
    for pair in name.lower().split(","):
        device, *rest = pair.split(":")
        if len(rest) != 1:
            raise ValueError(f"{pair!r} in backend {name!r} is no pair: it must be like 'cpu:gloo,cuda:nccl'")
        if device in found:
            raise ValueError(f"device {device!r} is twice in backend {name!r}: it must be like 'cpu:gloo,cuda:nccl'")
        found[device] = Backend(rest[0])
    return found


def accelerator() -> str:
    """Return the type of this machine's accelerator; ``"cpu"`` if the machine has none."""
    if not torch.accelerator.is_available():
        return "cpu"
    device = torch.accelerator.current_accelerator()
    return "cpu" if device is None else device.type


def backend_of(name: str, config: BackendConfig) -> str:
    """The name to report for a group with several backends: NCCL, else a registered backend, else gloo."""
    if name != Backend.UNDEFINED and ":" not in name and "," not in name:
        return str(name)
    used = config.device_backend_map.values()
    if Backend.NCCL in used:
        return Backend.NCCL
    if name != Backend.UNDEFINED:
        plugins = [backend for backend in used if backend.upper() in Backend._plugins]
        if plugins:
            return plugins[0]
    return Backend.GLOO


def is_backend_available(backend: str) -> bool:
    """Whether groups can use ``backend``; for pairs such as ``"cpu:gloo,cuda:nccl"``, whether they can use all."""
    if ":" in backend.lower():
        return all(is_single_available(one) for one in _pairs(backend).values())
    return is_single_available(backend)


def is_single_available(backend: str) -> bool:
    """Whether groups can use the backend of this name, which is of no pairs."""
    checks = {
        Backend.GLOO: is_gloo_available,
        Backend.NCCL: is_nccl_available,
        Backend.MPI: is_mpi_available,
        Backend.UCC: is_ucc_available,
        Backend.XCCL: is_xccl_available,
    }
    check = checks.get(backend.lower())
    return backend.lower() in Backend.backend_list if check is None else check()


def get_default_backend_for_device(device: str | torch.device) -> str:
    """Return the default backend of a type of device. Raises: ValueError if the type has none."""
    kind = device.type if isinstance(device, torch.device) else torch.device(device).type
    if kind not in Backend.default_device_backend_map:
        raise ValueError(f"no default backend is registered for device {device}")
    return Backend.default_device_backend_map[kind]
