"""What the plugin is tried on: the files of the inner projects."""

from __future__ import annotations

HEAD = """
    import asyncio, os, pytest, signal, sys, time, pathlib
    import asynccomm, torch

    def note(name="pids"):
        with open(pathlib.Path(__file__).parent / name, "a") as file:
            file.write(f"{os.getpid()}\\n")
"""

CONFTEST = """
    import pytest

    FROM_CONFTEST = 1

    def pytest_collection_modifyitems(items):
        for item in items:
            if item.name == "test_marked_by_a_hook":
                item.add_marker(pytest.mark.ranks(2))
"""

PASS = """
    import unittest
    from conftest import FROM_CONFTEST
    from sibling import FROM_SIBLING

    @pytest.fixture
    def numbers(tmp_path):
        (tmp_path / "from_parent").write_text("here")
        return {"seven": 7}

    def helper(comm):
        return torch.tensor([float(comm.rank)])

    @pytest.mark.ranks(2)
    async def test_sum(comm):
        note()
        assert (FROM_CONFTEST, FROM_SIBLING) == (1, 2)
        tensor = helper(comm)
        await comm.all_reduce(tensor)
        assert tensor.item() == 1
        assert (os.environ["RANK"], os.environ["WORLD_SIZE"]) == (str(comm.rank), "2")

    @pytest.mark.ranks(2)
    async def test_again(comm):
        note()
        await comm.barrier()

    @pytest.mark.ranks([1, 2], backend=["gloo", "auto"])
    @pytest.mark.parametrize("word", ["a", "b"])
    async def test_lists(comm, word):
        assert word in "ab" and comm.backend in ("gloo", "shm") and comm.size in (1, 2)

    @pytest.mark.ranks(2)
    class TestClass:
        word = "class"

        async def test_method(self, comm, tmp_path, numbers, default=3):
            assert (self.word, numbers["seven"], default) == ("class", 7, 3)
            assert (tmp_path / "from_parent").read_text() == "here"
            with pytest.raises(ValueError, match="size of 7"):
                raise ValueError("size of 7")

    @pytest.mark.ranks(2)
    async def test_own():
        async with asynccomm.new_comm(name="mine") as mine:
            await mine.barrier()
            assert mine.size == 2

    @pytest.mark.ranks(2)
    async def test_skip(comm):
        pytest.skip(f"not today")

    @pytest.mark.ranks(2)
    async def test_unittest_skip(comm):
        raise unittest.SkipTest("not today either")

    @pytest.mark.anyio
    @pytest.mark.ranks(2)
    async def test_anyio():
        assert "RANK" in os.environ

    @pytest.mark.ranks(2)
    @pytest.mark.xfail(raises=LookupError, strict=True)
    async def test_xfail_raises(comm):
        raise KeyError("known")

    @pytest.mark.ranks(2)
    async def test_xfail_call(comm):
        pytest.xfail("known")

    @pytest.mark.ranks(2)
    @pytest.mark.filterwarnings("ignore:harmless")
    async def test_warning_ignored(comm):
        import warnings
        warnings.warn("harmless", UserWarning)
"""

FAIL = """
    @pytest.mark.ranks(2)
    async def test_all(comm, tmp_path):
        print("output of", comm.rank)
        (tmp_path / str(comm.rank)).touch()
        while len(os.listdir(tmp_path)) < 2:  # the loop is blocked: neither hears of the other's failure
            time.sleep(0.001)
        left = [1, 2, comm.rank]
        assert left == [1, 2, 7]

    @pytest.mark.ranks(2)
    async def test_one(comm):
        await comm.barrier()
        if comm.rank == 1:
            raise LookupError("mine alone")
        await comm.all_reduce(torch.ones(3))  # here rank 0 waits

    @pytest.mark.ranks(1)
    async def test_group(comm):
        async with asyncio.TaskGroup() as group:
            group.create_task(one_fails())

    async def one_fails():
        raise LookupError("in a task")

    @pytest.mark.ranks(2)
    async def test_some_skip(comm):
        await comm.barrier()
        if comm.rank == 1:
            pytest.skip("only me")

    @pytest.mark.ranks(2)
    async def test_pytest_fail(comm):
        pytest.fail("on purpose")

    @pytest.mark.ranks(2)
    async def test_base_exception():
        raise asyncio.CancelledError("loose")

    @pytest.mark.ranks(2)
    async def test_sys_exit():
        sys.exit(7)

    @pytest.mark.ranks(2)
    async def test_warning(comm):
        import warnings
        warnings.warn("unwelcome", UserWarning)

    @pytest.mark.ranks(1)
    async def test_still_the_same():
        note()
"""

END = """
    import ctypes, faulthandler

    @pytest.mark.ranks(2)
    @pytest.mark.timeout(2)
    async def test_pytest_timeout(comm):
        note("timed_out")
        await asyncio.Event().wait()

    @pytest.mark.ranks(2)
    async def test_after(comm):
        note("after")
        await comm.barrier()

    @pytest.mark.ranks(2, timeout=3)  # the ranks of the test before: time for both to come so far, on a busy machine
    async def test_never_comes(comm):
        await comm.barrier()
        if comm.rank == 1:
            await asyncio.Event().wait()  # rank 1 stays here
        await comm.all_reduce(torch.ones(3))  # rank 0 stays here

    @pytest.mark.ranks(2)
    async def test_killed(comm):
        await comm.barrier()
        if comm.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        await comm.barrier()

    @pytest.mark.ranks(2)
    async def test_segfault_and_exit():
        if os.environ["RANK"] == "1":
            os._exit(3)
        faulthandler._sigsegv()

    @pytest.mark.ranks(3, timeout=1)
    async def test_busy():
        if os.environ["RANK"] == "1":
            time.sleep(1000)  # blocked
        if os.environ["RANK"] == "2":
            ctypes.PyDLL(None).sleep(1000)  # with the interpreter lock
        while True: pass  # spinning
"""

WRONG = """
    import threading, unittest

    @pytest.fixture
    def lock():
        return threading.Lock()

    @pytest.mark.ranks(2)
    async def test_unpicklable(comm, lock):
        pass

    def test_no_marker(comm):
        pass

    @pytest.mark.ranks(2)
    def test_not_async():
        pass

    @pytest.mark.ranks(2)
    async def test_yields():
        yield

    @pytest.mark.parametrize("value", [pytest.param(1, marks=pytest.mark.ranks(2))])
    async def test_marked_parameter(comm, value):
        pass

    @pytest.mark.ranks(2)
    @pytest.mark.parametrize("value", [pytest.param(1, marks=pytest.mark.ranks(4))])
    async def test_marked_twice(comm, value):
        pass

    async def test_marked_by_a_hook(comm):
        pass

    @pytest.mark.ranks(2)
    class TestSetup:
        def setup_method(self):
            self.x = 1

        async def test_setup(self, comm):
            assert self.x == 1

    @pytest.mark.ranks(2)
    class TestAttribute:
        x = 0

        @pytest.fixture(autouse=True)
        def fixture(self):
            self.x = 1

        async def test_attribute(self, comm):
            assert self.x == 1

    class TestUnit(unittest.IsolatedAsyncioTestCase):
        @pytest.mark.ranks(2)
        async def test_unit(self):
            pass
"""

MARKERS = {
    "zero": ("0", "size must be a positive integer or a list of such, got 0"),
    "true": ("True", "size must be a positive integer or a list of such, got True"),
    "word": ("'two'", "size must be a positive integer or a list of such, got 'two'"),
    "empty": ("[]", "size must be a positive integer or a list of such, got []"),
    "keyword": ("2, tiemout=3", "got an unexpected keyword argument 'tiemout'"),
    "missing": ("", "missing 1 required positional argument: 'size'"),
    "time": ("2, timeout='long'", "timeout must be a positive number of seconds, got 'long'"),
    "backend": ("2, backend=3", "backend must be a name or a list of names, got 3"),
    "hints": ("2, hints='none'", "hints must be a dict, got 'none'"),
}

STRICT = """
    [pytest]
    asyncio_mode = strict
    asyncio_default_fixture_loop_scope = function
    filterwarnings = error
    addopts = --import-mode=prepend -p no:cacheprovider
"""


PACKAGE = {
    "pytest.ini": """
        [pytest]
        asyncio_mode = auto
        asyncio_default_fixture_loop_scope = function
        filterwarnings = error
        addopts = --import-mode=importlib
    """,
    "suite/__init__.py": "",
    "suite/helpers.py": "ANSWER = 42\n",
    "suite/deep/__init__.py": "",
    "suite/deep/conftest.py": """
        import pytest

        class Box:
            def __init__(self, value):
                self.value = value

        @pytest.fixture
        def box():
            return Box(42)

        def pytest_assertrepr_compare(op, left, right):
            if isinstance(left, Box):
                return ["boxes differ", f"left holds {left.value}"]
    """,
    "suite/deep/test_it.py": """
        import pytest, warnings
        from ..helpers import ANSWER
        from .conftest import Box

        class Local:
            pass

        @pytest.fixture
        def local():
            return Local()

        @pytest.mark.ranks(1)
        async def test_imports(comm, box, local):
            assert type(box) is Box and type(local) is Local and box.value == ANSWER
            warnings.warn("let. me")  # an error, but for the command line

        @pytest.mark.ranks(1)
        async def test_explained(box):
            assert box == 1

        async def test_plain():
            assert ANSWER == 42

        @pytest.mark.ranks(1)
        async def test_last(comm):
            pass
    """,
}


EXIT = """
    @pytest.mark.ranks(2)
    async def test_exits(comm):
        if comm.rank == 1:
            pytest.exit("enough", 7)
        await comm.barrier()

    def test_after():
        pass
"""

FOREVER = """
    @pytest.mark.ranks(2)
    async def test_forever(comm):
        note()
        while True:
            time.sleep(1)
"""
