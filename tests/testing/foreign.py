"""A project that does not know of this repository, for the tests of isolation: the files, by name."""

from __future__ import annotations

CONFTEST = """
    import os, random
    from pathlib import Path

    NAME, DRAWN = "root", random.random()

    def pytest_runtest_call(item):
        from asynccomm.testing import plugin
        pool = item.config.stash.get(plugin._pool_key, None)
        with open(Path(__file__).parent / "processes", "a") as file:
            file.write(f"{0 if pool is None else len(pool.pids)}\\n")

    def pytest_collection_modifyitems(items):
        if "REVERSED" in os.environ:
            items.reverse()
"""

COMMON = """
    import gc, logging, os, random, resource, signal, socket, sys, time
    import numpy, torch
    from pathlib import Path

    ROOT = Path(__file__).parent
    HOME, THREADS, PATH = os.getcwd(), torch.get_num_threads(), "/made/by/a/test"
    DEPTH, ZONE = sys.getrecursionlimit(), time.tzname
    FILES = resource.getrlimit(resource.RLIMIT_NOFILE)
    TIMERS = signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF

    def draws():
        return [random.random(), float(numpy.random.random()), float(torch.rand(()))]

    def check_clean():
        assert "MESS" not in os.environ and os.environ["HOME"] != "/mess"
        assert os.getcwd() == HOME and PATH not in sys.path
        assert torch.get_default_dtype() is torch.float32 and torch.get_default_device().type == "cpu"
        assert torch.get_num_threads() == THREADS and torch.is_grad_enabled()
        assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL
        assert sys.modules["wave"].__name__ == "wave" and sys.argv[-1] != "mess"
        assert os.path.sep == "/"
        assert [signal.getitimer(timer) for timer in TIMERS] == [(0, 0)] * 3
        assert gc.isenabled() and sys.getrecursionlimit() == DEPTH and time.tzname == ZONE
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == FILES
        assert socket.getdefaulttimeout() is None and logging.root.manager.disable == 0

    def make_mess():
        os.environ["MESS"], os.environ["HOME"] = "left", "/mess"
        os.chdir("/")
        sys.path.insert(0, PATH)
        torch.set_default_dtype(torch.float64)
        torch.set_default_device("meta")
        torch.set_num_threads(THREADS + 1)
        torch.set_grad_enabled(False)
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        sys.modules["wave"] = sys
        sys.argv.append("mess")
        for timer in TIMERS:
            signal.setitimer(timer, 1000)
        gc.disable()
        sys.setrecursionlimit(DEPTH + 1)
        resource.setrlimit(resource.RLIMIT_NOFILE, (FILES[0] - 1, FILES[1]))
        socket.setdefaulttimeout(1000)
        logging.disable(logging.CRITICAL)
        os.environ["TZ"] = "MESS-1"
        time.tzset()
"""

MESS = """
    import os, sys, wave
    import pytest, torch
    from common import ROOT, check_clean, draws, make_mess
    import product

    DRAWN = draws()  # at the import

    async def check_and_make(comm):
        check_clean()
        mine = draws()
        assert DRAWN == mine and sys.modules["conftest"].DRAWN == mine[0]
        assert await comm.all_gather_object(mine) == [mine] * comm.size
        with open(ROOT / "draws", "a") as file:
            file.write(f"{mine}\\n")
        assert product.made_in_ranks(1) == 2
        make_mess()

    @pytest.mark.ranks(2)
    async def test_one(comm):
        print("the output of", comm.rank)
        await check_and_make(comm)

    @pytest.mark.ranks(2)
    async def test_two(comm):
        await check_and_make(comm)

    @pytest.mark.ranks(1)
    async def test_of_one_rank(comm):
        await check_and_make(comm)

    @pytest.mark.ranks(2)
    async def test_patches(comm, monkeypatch):
        check_clean()
        monkeypatch.setattr(os.path, "sep", "patched")
        monkeypatch.chdir("/")
        assert os.path.sep == "patched"

    @pytest.fixture
    def surroundings(monkeypatch, tmp_path):
        monkeypatch.setenv("FROM_FIXTURE", "yes")
        monkeypatch.chdir(tmp_path)
        monkeypatch.syspath_prepend(tmp_path)
        torch.set_default_dtype(torch.float64)
        yield tmp_path
        torch.set_default_dtype(torch.float32)

    @pytest.mark.ranks(2)
    async def test_surroundings(comm, surroundings):
        import sys
        assert os.environ["FROM_FIXTURE"] == "yes" and os.getcwd() == str(surroundings)
        assert sys.path[0] == str(surroundings) and torch.get_default_dtype() is torch.float64

    @pytest.mark.ranks(2)
    async def test_without_surroundings():
        check_clean()
        assert "FROM_FIXTURE" not in os.environ

    @pytest.mark.ranks(1)
    async def test_default_group():
        import torch.distributed as dist
        dist.init_process_group("gloo")  # and the test leaves it behind

    @pytest.mark.ranks(1)
    async def test_default_group_again():
        import torch.distributed as dist
        dist.init_process_group("gloo")
"""

NAMESAKE = """
    import random
    import pytest
    import helpers
    from conftest import DRAWN, NAME

    HERE = random.random()

    @pytest.mark.ranks(1)
    async def test_of_{0}():
        assert HERE == DRAWN, "the import of each file is seeded"
        assert (helpers.NAME, NAME) == ("{0}", "{0}")
"""

FOREIGN = {
    "pytest.ini": "[pytest]\nasyncio_default_fixture_loop_scope = function\nfilterwarnings = error\n",
    "conftest.py": CONFTEST,
    "common.py": COMMON,
    "product.py": "def made_in_ranks(number):\n    result = number + 1\n    return result\n",
    "test_mess.py": MESS,
    **{
        f"{name}/{file}": text
        for name in ("a", "b")
        for file, text in {
            f"test_{name}.py": NAMESAKE.format(name),
            "helpers.py": f"NAME = {name!r}\n",
            "conftest.py": f"import random\nNAME, DRAWN = {name!r}, random.random()\n",
        }.items()
    },
}

NAMES = {
    "test_mess.py::test_one[2ranks]",
    "test_mess.py::test_two[2ranks]",
    "test_mess.py::test_of_one_rank[1ranks]",
    "test_mess.py::test_patches[2ranks]",
    "test_mess.py::test_surroundings[2ranks]",
    "test_mess.py::test_without_surroundings[2ranks]",
    "test_mess.py::test_default_group[1ranks]",
    "test_mess.py::test_default_group_again[1ranks]",
    "a/test_a.py::test_of_a[1ranks]",
    "b/test_b.py::test_of_b[1ranks]",
}
