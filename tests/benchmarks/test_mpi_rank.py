"""The ranks of MPI; ``test_mpi_peer`` runs them."""

import ast
from pathlib import Path

from asynccomm.benchmarks.operations import OPS

SOURCE = Path(__file__).parents[2] / "asynccomm" / "benchmarks" / "mpi_rank.py"


def test_mpi_has_every_operation() -> None:
    """By the source, because mpi4py may not be installed."""
    body = ast.parse(SOURCE.read_text()).body
    (known,) = [node.value for node in body if ast.unparse(node).startswith("OPS") and hasattr(node, "value")]
    assert isinstance(known, ast.Dict)
    assert sorted(ast.literal_eval(key) for key in known.keys if key is not None) == sorted(OPS)
