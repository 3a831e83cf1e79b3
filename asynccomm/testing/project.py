"""The modules of the tested project in a rank process: the files of tests, and conftest.py files."""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Sequence
from functools import reduce
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, final

from _pytest.config import Config
from _pytest.pathlib import CouldNotResolvePathError, ImportMode, import_path, resolve_pkg_root_and_module_name

from asynccomm.testing.isolation import ImportedFiles, seed_all

__all__ = ["FoundTest", "ProjectModules"]


class FoundTest(NamedTuple):
    """A test function, and the instance of its class."""

    function: Any
    instance: object  #: None for a function outside of classes


@final
class ProjectModules:
    """Imports files of tests as pytest does, and tells when only a new process could do so.

    Args:
        config: of this process.
        files: the files imported so far, apart from those that belong to every new process.
    """

    def __init__(self, config: Config, files: ImportedFiles) -> None:
        self._config = config
        self._mode = ImportMode(config.getoption("importmode"))
        self._namespaces = config.getini("consider_namespace_packages")
        self._files = files
        files.update()

    def update(self) -> None:
        """Note the modules that were imported since the last call."""
        self._files.update()

    def stale(self, path: Path, sys_path: Sequence[str]) -> str | None:
        """Why a new process would import other code for the test file ``path``; None: it would not."""
        if self._mode is ImportMode.prepend:  # then the file's directory comes first
            root = path.parent
            with contextlib.suppress(CouldNotResolvePathError):  # the file is in no package
                root, _ = resolve_pkg_root_and_module_name(path, consider_namespace_packages=self._namespaces)
            sys_path = [str(root), *sys_path]
        return self._files.stale(sys_path)

    def load(self, path: Path, seed: int | None = None) -> ModuleType:
        """Import a file of tests, after its conftest.py files.

        Args:
            seed: of the random number generators, for the import; None: they are not seeded.
        """
        config, mode, namespaces = self._config, self._mode, self._namespaces
        sys_path = list(sys.path)  # imports put directories in front of it, where pytest's process has them already
        if seed is not None:
            seed_all(seed)
        # conftest modules may define the classes of the test's arguments, or explain its assertions
        config.pluginmanager._loadconftestmodules(path, mode, config.rootpath, consider_namespace_packages=namespaces)
        for module in config.pluginmanager._getconftestmodules(path):
            if module.__name__ == "conftest":  # all of that name outside of packages; the file means the nearest one
                sys.modules["conftest"] = module
        if seed is not None:
            seed_all(seed)  # as if the conftest modules had been imported before
        try:
            return import_path(path, mode=mode, root=config.rootpath, consider_namespace_packages=namespaces)
        finally:
            sys.path[:] = sys_path

    def find(self, path: Path, qualname: str) -> FoundTest:
        """The test function ``qualname`` of a file."""
        *classes, name = qualname.split(".")
        owner: Any = reduce(getattr, classes, self.load(path))
        instance = owner() if inspect.isclass(owner) else None
        return FoundTest(getattr(owner if instance is None else instance, name), instance)
