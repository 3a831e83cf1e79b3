"""The rendezvous of a rank, from a URL, the environment, or a given store.

    env://                            RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT, as launchers set them, or the
                                      variables of srun and mpirun (``launchers``)
    tcp://host:port?rank=0&world_size=2
    file:///path?rank=0&world_size=2  a file that all ranks see

Rank 0 hosts the store for ``env://`` and ``tcp://``, unless the launcher already does (TORCHELASTIC_USE_AGENT_STORE).
Rank and size given as arguments must agree with those of the URL.
"""

from __future__ import annotations

import operator
import os
import secrets
import stat
import threading
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from typing import Final, SupportsIndex, final
from urllib.parse import SplitResult, parse_qs, urlsplit
from weakref import WeakKeyDictionary, WeakValueDictionary

import anyio.to_thread
from torch import distributed as dist

from asynccomm.core.hosts import loopback_address
from asynccomm.errors import RendezvousError
from asynccomm.options import check_name, whole_number
from asynccomm.rendezvous.launchers import SLURM, job_name, launcher_of, on_one_host, slurm_address, started_by
from asynccomm.rendezvous.local_meeting import PortAnnouncer, find_port, meeting_name
from asynccomm.store.base import PrefixStore, Store, within
from asynccomm.store.client import StoreClient, check_host
from asynccomm.store.server import StoreServer, listen, serve, share
from asynccomm.store.shared import SharedClient
from asynccomm.store.torch_store import TorchStore

LOOPBACK: Final = "127.0.0.1"
NAMESPACE_KEY: Final = "asynccomm/namespace"

# One server per port and process, shared by all comms that meet there. Global, because the kernel's ports are.
_hosted: WeakValueDictionary[tuple[str, int], StoreServer] = WeakValueDictionary()
_hosting = threading.Lock()
_namespaces: WeakKeyDictionary[dist.Store, str] = WeakKeyDictionary()  # that the ranks have agreed on, by torch's store


@final
@dataclass(frozen=True, slots=True)
class RendezvousSpec:
    """The rendezvous and this process's rank there; describes, and connects nothing."""

    rank: int
    size: int
    scope: str  #: prefix of all keys: the run and its restart
    store: Store | None = None  #: from the caller, which closes it
    path: str | None = None  #: of a file store
    host: str = ""  #: a loopback address in its usual spelling: the comms of a process compare the text
    port: int = 0
    meeting: str = ""  #: the socket of this host that has the port, in place of a host and a port
    hosting: bool = False  #: whether this rank starts the server
    server: StoreServer | None = field(default=None, compare=False)  #: a server that lives as long as this spec

    @property
    def run(self) -> str:
        """The launcher's name of this run; empty without one."""
        name = self.scope.partition("/")[2].rpartition("/")[0]
        return "" if name == "run" else name

    @property
    def world(self) -> object:
        """An identity that distinguishes the rendezvous points of one process."""
        if self.store is not None:
            return id(self.store)
        return self.path or self.meeting or (self.host, self.port, self.scope)


@final
@dataclass(slots=True)
class StoreSession:
    """A connected store. Closing the session closes only the resources that this process opened."""

    store: Store
    close: Callable[[], Awaitable[None]] | None = None  #: closes the opened store; None: the store was open before
    hosted: StoreServer | None = None
    given: Store | None = None  #: of the caller; its server may end with it
    address: str = ""  #: distinguishes the store from others; empty: unknown

    async def aclose(self) -> None:
        try:
            if self.close is not None:
                close, self.close = self.close, None
                await close()
        finally:
            if self.hosted is not None:
                hosted, self.hosted = self.hosted, None
                hosted.release()


def resolve_spec(
    store: Store | dist.Store | str | None,
    rank: SupportsIndex | None,
    size: SupportsIndex | None,
    environ: Mapping[str, str] | None = None,
) -> RendezvousSpec:
    """Decide on the rendezvous. Opens nothing.

    Raises: ValueError naming the argument or variable and its value; TypeError.
    """
    env = os.environ if environ is None else environ
    run, restart = _key_part(env, "TORCHELASTIC_RUN_ID", "run"), _key_part(env, "TORCHELASTIC_RESTART_COUNT", "0")
    scope = f"asynccomm/{run}/{restart}"
    if isinstance(store, (Store, dist.Store)):
        ours = store if isinstance(store, Store) else TorchStore(store)
        return RendezvousSpec(*_rank_and_size(rank, size, {}, env), scope, store=ours)
    if store is not None and not isinstance(store, str):
        raise TypeError(f"store must be a Store, a torch.distributed.Store or an URL, got {store!r}")
    text = "env://" if store is None else store
    try:
        is_file = text.strip().lower().startswith("file:")
        url = urlsplit(text, allow_fragments=not is_file)  # a path may contain "#"
        parsed = parse_qs(url.query, keep_blank_values=True) if url.query else {}
    except ValueError as exc:
        raise ValueError(f"store {store!r} is no valid URL: {exc}") from None
    query = {key: texts[-1] for key, texts in parsed.items()}
    if unknown := query.keys() - {"rank", "world_size"}:
        raise ValueError(f"store {store!r} may say rank and world_size, not {', '.join(sorted(unknown))}")
    where = _rank_and_size(rank, size, query, env)
    if url.scheme == "env":
        return _of_environment(where, scope, env)
    if url.scheme == "tcp":
        if url.path.strip("/") or url.fragment or url.username is not None:
            raise ValueError(f"store {store!r} must be tcp://host:port")
        host, port = _address(url)
        return RendezvousSpec(*where, scope, host=host, port=port, hosting=where[0] == 0)
    if url.scheme == "file":
        path = url.netloc + url.path
        if not path.startswith("/") or "\0" in path:
            raise ValueError(f"store {store!r} must name an absolute path: file:///path")
        return RendezvousSpec(*where, scope, path=path)
    raise ValueError(f"store {store!r} must be env://, tcp://host:port or file:///path")


def _of_environment(where: tuple[int, int], scope: str, env: Mapping[str, str]) -> RendezvousSpec:
    """The rendezvous at MASTER_ADDR and MASTER_PORT, or at the place that the launcher's variables give."""
    host, port_text = env.get("MASTER_ADDR", ""), env.get("MASTER_PORT", "")
    if not (host and port_text) and (launcher := started_by(env)) is not None:
        if launcher is SLURM and (derived := slurm_address(env)) is not None:
            host, port_text = host or derived[0], port_text or str(derived[1])
        elif launcher is not SLURM and not host and not port_text and on_one_host(launcher, env):
            return RendezvousSpec(*where, scope, meeting=meeting_name(job_name(launcher)), hosting=where[0] == 0)
    host = host or _required(env, "MASTER_ADDR")
    check_host(host, "environment variable MASTER_ADDR")
    host = loopback_address(host) or host
    port = _port("MASTER_PORT", port_text or _required(env, "MASTER_PORT"))
    agent = env.get("TORCHELASTIC_USE_AGENT_STORE", "").lower() in ("true", "1")
    return RendezvousSpec(*where, scope, host=host, port=port, hosting=where[0] == 0 and not agent)


async def connect_store(place: RendezvousSpec, timeout: float) -> StoreSession:
    """Open the store, and host the store if this rank has to. Cancelling is safe.

    Raises: RendezvousError when the port is in use or no server answers within ``timeout`` seconds.
    """
    if place.store is not None:
        return await _connect_given(place.store, timeout)
    if place.path is not None:
        try:
            async with within(timeout):
                opened = await anyio.to_thread.run_sync(_file_store, place.path, place.size, abandon_on_cancel=True)
        except TimeoutError:
            raise RendezvousError(f"the file {place.path} did not open within {timeout:g} s") from None
        file = TorchStore(opened, timeout)
        return StoreSession(file, file.aclose, address=place.path)
    hosted = None
    if place.hosting:
        hosted = _already_hosted(place) or await anyio.to_thread.run_sync(_host, place, abandon_on_cancel=True)
    try:
        host, port = place.host, place.port
        if place.meeting:
            host, port = LOOPBACK, await find_port(place.meeting, timeout) if hosted is None else hosted.port
        shared = await SharedClient.connect(host, port, timeout, hosted)
    except BaseException:
        if hosted is not None:
            hosted.release()
        raise
    return StoreSession(shared.client, shared.release, hosted, address=place.meeting or f"{host}:{port}")


async def _connect_given(store: Store, timeout: float) -> StoreSession:
    """Open a given store: its server by a client of our own, which needs no threads, if it is a TCPStore of torch's."""
    if not isinstance(store, TorchStore) or (server := store.server()) is None:
        whole = store
        while isinstance(whole, PrefixStore):
            whole = whole.underlying
        address = f"{whole.host}:{whole.port}" if isinstance(whole, StoreClient) else ""
        return StoreSession(store, address=address)
    shared = await SharedClient.connect(server.host, server.port, timeout)
    address = f"{server.host}:{server.port}"
    if not server.prefixed:
        return StoreSession(shared.client, shared.release, given=store, address=address)
    namespace = _namespaces.get(store.torchs)
    if namespace is None:
        async with AsyncExitStack() as unless_agreed:
            unless_agreed.push_async_callback(shared.release)
            try:  # the prefixes of torch's store are its secret: the ranks agree on another one there
                async with within(timeout):
                    agreed = await store.compare_set(NAMESPACE_KEY, "", secrets.token_hex(8))
            except TimeoutError:
                raise RendezvousError(f"the client of the store at {address} was busy for {timeout:g} s") from None
            unless_agreed.pop_all()
        namespace = _namespaces[store.torchs] = agreed.decode()
    return StoreSession(shared.client.prefix(namespace), shared.release, given=store, address=address)


def _file_store(path: str, size: int) -> dist.FileStore:
    try:
        # first by ourselves: torch would retry for minutes, and stop all threads meanwhile
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        regular = stat.S_ISREG(os.fstat(fd).st_mode)
        os.close(fd)
    except OSError as exc:
        raise RendezvousError(f"cannot use the file {path}: {exc.strerror}") from exc
    if not regular:
        raise RendezvousError(f"cannot use the file {path}: it is not a regular file")
    try:
        return dist.FileStore(path, size)
    except (RuntimeError, TypeError) as exc:  # TypeError: torch takes names in UTF-8 only
        raise RendezvousError(f"cannot use the file {path!r}: {exc}") from exc


def _host(place: RendezvousSpec) -> StoreServer:
    """This process's server at the spec's address; blocks for some milliseconds."""
    with _hosting:  # two comms may arrive at once, also from two loops
        hosted = _already_hosted(place)
        if hosted is not None:
            return hosted
        if place.meeting:
            hosted = _announced(place.meeting)
        else:
            # other hosts may resolve the name to another interface than this host: listen on all, unless it is loopback
            try:
                hosted = serve(place.host, listen(loopback_address(place.host), place.port), shared=True)
            except RendezvousError:
                if not _torch_hosts(place.port):
                    raise
                hosted = share(place.host, place.port)
        _hosted[_hosted_key(place)] = hosted
    return hosted


def _torch_hosts(port: int) -> bool:
    """Whether the default group of torch.distributed has met at ``port``, so that its server may be in this process."""
    if not dist.is_initialized():
        return False
    server = TorchStore(dist.distributed_c10d._get_default_store()).server()
    return server is not None and server.port == port


def _already_hosted(place: RendezvousSpec) -> StoreServer | None:
    """This process's server at the spec's address, for one more user; None: there is none."""
    hosted = _hosted.get(_hosted_key(place))
    return hosted if hosted is not None and hosted.acquire() else None


def _hosted_key(place: RendezvousSpec) -> tuple[str, int]:
    return place.meeting or place.host, place.port


def _announced(meeting: str) -> StoreServer:
    """A server at any port of this host, which the socket ``meeting`` announces."""
    hosted = serve(LOOPBACK, listen(LOOPBACK, 0))
    try:
        hosted.on_end = PortAnnouncer(meeting, hosted.port).close
    except OSError as exc:
        hosted.release()
        raise RendezvousError(f"cannot announce the store at the socket @{meeting}: {exc.strerror or exc}") from exc
    return hosted


def rehost(place: RendezvousSpec, address: str) -> RendezvousSpec:
    """A spec with a new server of this process at ``address``, in place of a lost store; blocks for milliseconds.

    The server lives as long as the returned spec, and until all comms that met there have left.

    Raises: RendezvousError.
    """
    hosted = serve(address, listen(address, 0))
    with _hosting:
        _hosted[(hosted.host, hosted.port)] = hosted
    nowhere = replace(place, store=None, path=None, meeting="")
    return replace(nowhere, host=hosted.host, port=hosted.port, hosting=True, server=hosted)


def _rank_and_size(
    rank: SupportsIndex | None, size: SupportsIndex | None, query: Mapping[str, str], env: Mapping[str, str]
) -> tuple[int, int]:
    launcher = launcher_of(env)
    names = ("RANK", "WORLD_SIZE") if launcher is None else (launcher.rank, launcher.size(env))
    my_rank = _number("rank", rank, query, "rank", env, names[0])
    my_size = _number("size", size, query, "world_size", env, names[1])
    if my_size[0] < 1:
        raise ValueError(f"{my_size[1]} must be at least 1, got {my_size[0]}")
    if not 0 <= my_rank[0] < my_size[0]:
        raise ValueError(f"{my_rank[1]} must be in [0, {my_size[0]}), got {my_rank[0]}")
    return my_rank[0], my_size[0]


def _number(
    argument: str, value: SupportsIndex | None, query: Mapping[str, str], key: str, env: Mapping[str, str], name: str
) -> tuple[int, str]:
    """The number and its name in errors."""
    given = None
    if value is not None:
        if isinstance(value, bool) or not hasattr(value, "__index__"):
            raise TypeError(f"{argument} must be an integer, got {value!r}")
        given = operator.index(value)
    if key in query:
        text, source = query[key], f"{key} in the store's URL"
    elif given is not None:
        return given, argument
    else:
        text, source = _required(env, name), f"environment variable {name}"
    try:
        number = int(text)
    except ValueError:
        raise ValueError(f"{source} must be an integer, got {text!r}") from None
    if given is not None and given != number:
        raise ValueError(f"{argument}={given} contradicts {source}: {text}")
    return number, source


def _key_part(env: Mapping[str, str], name: str, default: str) -> str:
    value = env.get(name, default)
    if value:
        check_name(value, f"environment variable {name}")
    return value


def _required(env: Mapping[str, str], name: str) -> str:
    value = env.get(name)
    if value:
        return value
    launcher = started_by(env)
    if launcher is not None and launcher.flags and name.startswith("MASTER"):
        raise ValueError(
            f"environment variable {name} is not set, and {launcher.name} does not set it for ranks on several hosts; "
            f"set it by {launcher.flags} (the host of rank 0)"
        )
    if launcher is SLURM and name.startswith("MASTER"):
        nodes = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST") or ""
        raise ValueError(
            f"environment variable {name} is not set, and follows only from SLURM_JOB_ID with SLURM_STEP_NODELIST or "
            f"SLURM_JOB_NODELIST, got {env.get('SLURM_JOB_ID', '')!r} and {nodes!r}"
        )
    raise ValueError(
        f"environment variable {name} is not set; start the script with `asynccomm run -n 2 ...`, torchrun, srun or "
        f"mpirun, or pass store=, rank= and size="
    )


def _port(name: str, text: str) -> int:
    number = whole_number(text)
    if number is None or not 0 < number < 65536:
        raise ValueError(f"environment variable {name} must be a port from 1 to 65535, got {text!r}")
    return number


def _address(url: SplitResult) -> tuple[str, int]:
    try:
        host, port = url.hostname, url.port
    except ValueError as exc:
        raise ValueError(f"store {url.geturl()!r} has no valid port: {exc}") from None
    if not host or not port:
        raise ValueError(f"store {url.geturl()!r} must be tcp://host:port")
    check_host(host, f"host of store {url.geturl()!r}")
    return loopback_address(host) or host, port


def _renew_lock() -> None:
    global _hosting
    _hosting = threading.Lock()  # a thread that is missing in the child may have held the old one


os.register_at_fork(after_in_child=_renew_lock)
