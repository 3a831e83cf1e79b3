"""The names of backends; those of other packages are in test_registry."""

import subprocess
import sys

import pytest

from asynccomm.backends.names import BUILTIN, backend_names


def test_the_names_are_sorted_and_have_all_built_in_ones() -> None:
    assert {"gloo", "hierarchical", "loopback", "nccl", "shm"} <= set(BUILTIN)  # tests add a simulated one
    assert backend_names() == sorted({*backend_names(), *BUILTIN})


@pytest.mark.real_python
def test_names_import_no_transport() -> None:
    code = (
        "import sys; from asynccomm.backends.names import backend_names; backend_names();"
        "print([m for m in sys.modules if m.startswith('asynccomm.backends.') or m == 'torch'])"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "['asynccomm.backends.names']"
