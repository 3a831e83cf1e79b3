"""Python processes that have imported torch when they start, because they are forks of one that has.

An import of torch takes 1.7 s of CPU time, a fork 0.02 s. With ``installed()``, ``subprocess`` starts commands of this
interpreter, as in ``[sys.executable, "-m", "pytest"]``, as forks of a server process. The server has one thread and
starts nothing else. A fork gets the command's arguments, environment, directory and descriptors, and is a child of the
process that asked, like every child of ``subprocess``. In a fork that starts Python, ``subprocess`` does the same.

The workers of xdist are such forks, too, and have servers of their own, which are forks; the tests that they run may
start new interpreters all the same.

The differences from a new interpreter: modules are imported already, all forks of a server hash strings alike, and the
process ends without finalization, unless that is asked for. Tests of imports start real interpreters, and so do
commands with options like ``-X dev``.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import ctypes
import fcntl
import gc
import importlib
import inspect
import marshal
import os
import pickle
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
import types
import weakref
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing import util
from pathlib import Path
from typing import Any, Final, NamedTuple

ROOT: Final = Path(__file__).parent.parent
PR_SET_NAME: Final = 15
PR_SET_CHILD_SUBREAPER: Final = 36
MESSAGE_BYTES: Final = 1 << 17
DESCRIPTORS: Final = 64  # at most, of one command
# modules that start Python themselves
STARTERS: Final = {"pytest", "asynccomm", "asynccomm.cli.main", "asynccomm.cli.tethered", "torch.distributed.run"}
EXECNET: Final = "import sys;exec(eval(sys.stdin.readline()))"  # the program of xdist's workers
# imported before any fork
IMPORTS: Final = (
    "asynccomm.comm.new_comm",
    "asynccomm.interop.torch_backend",
    "asynccomm.backends.shm.backend",
    "asynccomm.backends.gloo.backend",
    "asynccomm.testing.plugin",
    "asynccomm.testing.pool",
    "asynccomm.testing.worker",
    "asynccomm.cli.main",
    "anyio.pytest_plugin",
    "hypothesis",
    "pytest_asyncio.plugin",
    "pytest_cov.plugin",
    "pytest_timeout",
    "torch._dynamo",  # which torch itself imports at an optimizer's first step and in a mode of functions: 2 s
    "xdist.plugin",
)
EXAMPLES_IMPORT: Final = ("sklearn.datasets",)
WORKERS_IMPORT: Final = ("torch.distributed.fsdp", "torch.distributed.pipelining")  # the slowest imports of test files
_PLAIN: Final = dict.fromkeys(("shell", "env", "cwd", "executable", "preexec_fn", "start_new_session")) | {
    "close_fds": True,
    "umask": -1,
}
OPTIONS: Final = {"-B": "PYTHONDONTWRITEBYTECODE", "-P": "PYTHONSAFEPATH", "-u": "PYTHONUNBUFFERED"}
ONE_THREAD: Final = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}  # of a server, also while it imports
HUGE_PAGE: Final = 2 << 20
MADV_COLLAPSE: Final = 25
# variables that only a new process reads
AT_START: Final = ("LD_LIBRARY_PATH", "LD_PRELOAD", "PYTHONDEVMODE", "PYTHONHASHSEED", "PYTHONWARNINGS")
# The first rank of a pool is a real interpreter, so that not all ranks hash strings alike: the order of sets differs.
_real_once = {"asynccomm.testing.worker"}

_libc = ctypes.CDLL(None)
_lock = threading.Lock()
_real_popen, _real_spawnv_passfds = subprocess.Popen, util.spawnv_passfds
_server: _Server | None = None
_ends: tuple[socket.socket, socket.socket] | None = None  # of the channel to a server that has not been started
_finalize = _workers = False
_libraries: list[weakref.finalize[..., Any]] = []  # of torch's operators, which are taken down at the end
_this = sys.modules[__name__]


class _Order(NamedTuple):
    """One command, as the server gets it together with its descriptors."""

    arguments: Sequence[str]  #: behind the interpreter's path
    environment: Mapping[str, str]
    directory: str
    descriptors: Sequence[int]  #: their numbers in the new process
    session: bool  #: a session of its own
    group: int  #: the process group; 0: one of its own; -1: that of the parent
    finalize: bool  #: at the end, as an interpreter does
    worker: bool  #: of xdist, in the run of pytest that orders
    ignored: Sequence[int]  #: of SIGHUP, as under nohup, and SIGINT, as in a shell's background, those that are ignored
    prepare: tuple[str, bytes, tuple[Any, ...]] | None  #: of preexec_fn: its module, code and closure


@contextlib.contextmanager
def installed(*, finalize: bool = False, workers: bool = False) -> Iterator[None]:
    """``subprocess`` and ``multiprocessing`` start Python by forks.

    Args:
        finalize: the forks end as interpreters do, which costs 0.3 s of CPU time.
        workers: the forks are workers of xdist, which run tests of ours.
    """
    global _finalize, _workers, _ends
    if _server is None and _ends is None:  # before a test counts its descriptors
        _ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for end in _ends:
            atexit.register(end.close)
    before = subprocess.Popen, util.spawnv_passfds, _finalize, _workers
    subprocess.Popen, util.spawnv_passfds, _finalize, _workers = Popen, _spawnv_passfds, finalize, workers  # type: ignore
    try:
        yield
    finally:
        subprocess.Popen, util.spawnv_passfds, _finalize, _workers = before  # type: ignore


def _spawnv_passfds(path: bytes, arguments: Sequence[str], descriptors: Sequence[int]) -> int:
    """Of multiprocessing."""
    order = _order({**_PLAIN, "args": arguments, "pass_fds": sorted(descriptors)})
    return _real_spawnv_passfds(path, arguments, descriptors) if order is None else _start(order, order.descriptors)


class Popen(subprocess.Popen):  # type: ignore[type-arg]
    """A Popen that has the server fork, where a fork is as good."""

    def _execute_child(self, *arguments: Any) -> None:
        call = inspect.signature(super()._execute_child).bind(*arguments).arguments
        order = _order(call)
        if order is None:
            super()._execute_child(*arguments)  # type: ignore[misc]
            return
        streams = [call["p2cread"], call["c2pwrite"], call["errwrite"]]
        given = [number if stream == -1 else stream for number, stream in enumerate(streams)]
        self.pid = _start(order, [*given, *call["pass_fds"]])
        self._child_created = True
        names = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
        self._close_pipe_fds(*(call[name] for name in names))  # type: ignore[attr-defined]


def _order(call: Mapping[str, Any]) -> _Order | None:
    """The order for arguments of ``_execute_child``; None where only a real interpreter will do."""
    command = call["args"]
    if isinstance(command, (str, bytes, os.PathLike)) or call["shell"]:
        return None
    executable, *arguments = map(os.fsdecode, command)
    environment = dict(os.environ if call["env"] is None else call["env"])
    while arguments and arguments[0] in OPTIONS:
        environment[OPTIONS[arguments.pop(0)]] = "1"
    directory = os.path.abspath(call["cwd"] or os.curdir)
    if (
        (call["executable"] or executable) != sys.executable
        or not arguments
        or (arguments[0].startswith("-") and arguments[0] not in ("-m", "-c"))
        or not call["close_fds"]
        or call["umask"] != -1
        or any(call.get(name) is not None for name in ("gid", "gids", "uid"))
        or any(environment.get(name) != os.environ.get(name) for name in AT_START)
        or not os.path.isdir(directory)
    ):
        return None
    if arguments[0] == "-m" and arguments[1] in _real_once:
        _real_once.remove(arguments[1])
        return None
    prepare = None
    if (function := call["preexec_fn"]) is not None:
        values = tuple(cell.cell_contents for cell in function.__closure__ or ())
        prepare = function.__module__, marshal.dumps(function.__code__), values
    numbers = (0, 1, 2, *call["pass_fds"])
    session, group = bool(call["start_new_session"]), call.get("process_group", -1)
    ignored = [number for number in (signal.SIGHUP, signal.SIGINT) if signal.getsignal(number) is signal.SIG_IGN]
    return _Order(arguments, environment, directory, numbers, session, group, _finalize, _workers, ignored, prepare)


def _start(order: _Order, descriptors: Sequence[int]) -> int:
    """The pid of a new child of this process."""
    global _server
    with _lock:
        if _server is None:
            _server = _new_server()
        _libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # the child's parent ends, and this process inherits the child
        try:
            socket.send_fds(_server.channel, [pickle.dumps(tuple(order))], descriptors)
            answer = _server.channel.recv(MESSAGE_BYTES)
        finally:
            _libc.prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
    if not answer:
        raise RuntimeError("the process that forks has ended")
    return int(answer)


# -- the server ------------------------------------------------------------------------------------------------------


class _Server(NamedTuple):
    """The server of this process."""

    channel: socket.socket
    pid: int

    def stop(self) -> None:
        self.channel.close()
        os.waitpid(self.pid, 0)


def _new_server() -> _Server:
    global _ends
    assert _ends is not None
    (ours, theirs), _ends = _ends, None
    with theirs:
        process = _real_popen(
            [sys.executable, "-m", __name__, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            env={**os.environ, **ONE_THREAD},
        )
    process.returncode = 0  # stop() waits for it
    server = _Server(ours, process.pid)
    atexit.register(server.stop)
    return server


def _forked_server() -> _Server:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    pid = os.fork()
    if pid == 0:
        ours.detach()
        null = os.open(os.devnull, os.O_RDWR)
        _place({0: null, 1: null, 2: null, 3: theirs.detach()})
        os.environ.update(ONE_THREAD)
        _serve(socket.socket(fileno=3))
    theirs.close()
    return _Server(ours, pid)


def _serve(channel: socket.socket) -> None:
    """Fork until the channel ends. Returns in each fork, as an order to carry out does."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the processes of the group that do something
    while True:
        data, descriptors, _, _ = socket.recv_fds(channel, MESSAGE_BYTES, DESCRIPTORS)
        if not data:
            os._exit(0)
        order = _Order(*pickle.loads(data))
        of_examples = any(argument.startswith("examples/") for argument in order.arguments)
        for name in (*(EXAMPLES_IMPORT if of_examples else ()), *(WORKERS_IMPORT if order.worker else ())):
            importlib.import_module(name)
        threads = len(os.listdir("/proc/self/task"))
        assert threads == 1, f"a fork of a process with {threads} threads is not safe"
        answer, result = os.pipe()
        between = os.fork()
        if between == 0:
            between = os.getpid()
            if os.fork() != 0:
                os._exit(0)
            while os.getppid() == between:
                time.sleep(0.0002)
            _prepare(order)
            os.write(result, b"%d" % os.getpid())
            channel.detach()  # _run() closes its number, which the program may use for something else
            _run(order, descriptors)
        os.close(result)  # before the read, which then ends if the fork has died
        os.waitpid(between, 0)
        channel.send(os.read(answer, 20))
        for descriptor in (answer, *descriptors):
            os.close(descriptor)


# -- a fork ----------------------------------------------------------------------------------------------------------


def _prepare(order: _Order) -> None:
    """The part that subprocess does before its Popen returns: a caller may at once signal the child's group."""
    if order.session:
        os.setsid()
    if order.group >= 0:
        os.setpgid(0, order.group)
    signal.signal(signal.SIGHUP, signal.SIG_IGN if signal.SIGHUP in order.ignored else signal.SIG_DFL)
    if order.prepare is not None:
        module, code, values = order.prepare
        cells = tuple(map(types.CellType, values))
        # a function of a module that is not imported here uses no globals
        globals_there = vars(sys.modules.get(module, builtins))
        types.FunctionType(marshal.loads(code), globals_there, closure=cells)()


def _run(order: _Order, descriptors: Sequence[int]) -> None:
    """Do in this process as a new interpreter would; does not return."""
    global _server
    _place(dict(zip(order.descriptors, descriptors, strict=True)))
    if signal.SIGINT not in order.ignored:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(order.directory)
    os.environ.clear()
    os.environ.update(order.environment)
    kind, *rest = order.arguments
    name = rest[0].rpartition(".")[2] if kind == "-m" else Path(kind).stem
    _libc.prctl(PR_SET_NAME, name.encode(), 0, 0, 0)
    subprocess.Popen, util.spawnv_passfds = _real_popen, _real_spawnv_passfds  # type: ignore
    if order.worker:
        _server = _forked_server()
        sys.modules["tests.warm_python"] = _this  # so that the tests find this server
    elif _starts_python(kind, rest):
        _server = _forked_server()
        _real_once.clear()
        subprocess.Popen, util.spawnv_passfds, os.execv = Popen, _spawnv_passfds, _execv  # type: ignore
    if order.finalize:
        for library in _libraries:
            library.atexit = True
    status = _status_of_main(kind, rest)
    if order.finalize:
        sys.exit(status)
    _end(status)


def _starts_python(kind: str, rest: Sequence[str]) -> bool:
    if kind == "-m":
        return rest[0] in STARTERS
    if kind == "-c":
        return rest[0].startswith(EXECNET)
    return "RANK" not in os.environ


def _execv(path: str, arguments: Sequence[str]) -> None:
    """Of os, for this interpreter."""
    assert path == sys.executable
    _end(_status_of_main(arguments[1], arguments[2:]))


def _end(status: int) -> None:
    with contextlib.suppress(Exception):
        threading._shutdown()  # type: ignore[attr-defined]
    if _server is not None:
        _server.stop()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(status)


def _place(descriptors: Mapping[int, int]) -> None:
    """Give descriptors these numbers, and close all others."""
    above = max(descriptors) + 1
    placed = {number: fcntl.fcntl(given, fcntl.F_DUPFD, above) for number, given in descriptors.items()}
    for number, copy in placed.items():
        os.dup2(copy, number)
    for name in os.listdir("/proc/self/fd"):
        if int(name) not in placed:
            with contextlib.suppress(OSError):  # the directory's own
                os.close(int(name))


def _status_of_main(kind: str, rest: Sequence[str]) -> int:
    """Run the program; its exit status."""
    inherited = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:] = [*filter(None, inherited), *_standard_path]
    sys.dont_write_bytecode = bool(os.environ.get("PYTHONDONTWRITEBYTECODE"))
    if os.environ.get("PYTHONUNBUFFERED"):
        sys.stdout.reconfigure(write_through=True)
    main = types.ModuleType("__main__")
    main.__builtins__ = __builtins__
    sys.modules["__main__"] = sys.modules["__mp_main__"] = main  # the other name is multiprocessing's
    try:
        if kind == "-c":
            sys.path.insert(0, "")
            sys.argv[:] = ["-c", *rest[1:]]
            exec(compile(rest[0], "<string>", "exec"), vars(main))
        elif kind == "-m":
            sys.path.insert(0, os.getcwd())
            sys.argv[:] = rest
            if not hasattr(sys.modules.get(rest[0]), "__path__"):
                sys.modules.pop(rest[0], None)
            runpy._run_module_as_main(rest[0])  # type: ignore[attr-defined]
        else:
            sys.path.insert(0, os.path.dirname(os.path.abspath(kind)))
            sys.argv[:] = [kind, *rest]
            main.__file__ = os.path.abspath(kind)
            exec(compile(Path(kind).read_bytes(), main.__file__, "exec"), vars(main))
    except SystemExit as exc:
        if exc.code is None or isinstance(exc.code, int):
            return (exc.code or 0) & 0xFF
        print(exc.code, file=sys.stderr)
        return 1
    except BaseException as exc:
        sys.excepthook(type(exc), exc.with_traceback(_theirs(exc.__traceback__)), exc.__traceback__)
        if isinstance(exc, KeyboardInterrupt):
            sys.stdout.flush()
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
        return 1
    return 0


def _theirs(frames: types.TracebackType | None) -> types.TracebackType | None:
    """The traceback without the frames of this file."""
    while frames is not None and frames.tb_frame.f_code.co_filename == __file__:
        frames = frames.tb_next
    return frames


def _main() -> None:
    from _pytest.assertion import rewrite

    # pytest warns of modules that were imported before it could rewrite their assertions
    rewrite.AssertionRewritingHook._warn_already_imported = lambda self, name: None  # type: ignore[method-assign]
    for name in IMPORTS:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    for each in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        if each.peek()[1].__module__ == "torch.library":
            each.atexit = False  # they took 0.07 s of each fork
            _libraries.append(each)
    _gather_pages()
    _serve(socket.socket(fileno=int(sys.argv[1])))


def _gather_pages() -> None:
    """Move this process's memory to huge pages, where the kernel does that: a fork then takes a third of the time."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        where, access, _, _, inode, *_ = line.split()
        if access == "rw-p" and inode == "0":
            start, end = (int(address, 16) for address in where.split("-"))
            for page in range(-(-start // HUGE_PAGE) * HUGE_PAGE, end - HUGE_PAGE + 1, HUGE_PAGE):
                _libc.madvise(ctypes.c_void_p(page), ctypes.c_size_t(HUGE_PAGE), MADV_COLLAPSE)


_standard_path: list[str] = []

if __name__ == "__main__":
    sys.modules[__name__] = sys.modules["__main__"]
    _standard_path[:] = sys.path[1:]  # without the entry for -m
    for each in filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)):
        _standard_path.remove(each)
    for name in ("tests", "tests.warm_python"):
        sys.modules.pop(name, None)
    _main()
