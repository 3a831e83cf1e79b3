"""The columns of nccl-tests."""

import json
from itertools import product
from pathlib import Path

from asynccomm.benchmarks.operations import OPS
from asynccomm.benchmarks.rows import (
    OPERATIONS,
    Measurement,
    bus_factor,
    floats_of,
    read_measurements,
    size_of,
    write_rows,
)
from tests.cases import cases


def row(op: str = "all_reduce", **rest) -> Measurement:
    return Measurement(
        **{"op": op, "contender": "gloo", "backend": "shm", "ranks": 4, "bytes": 8000, "us": 2.0, **rest}
    )


def test_bus_factors_are_those_of_nccl_tests() -> None:
    factors = {op: bus_factor(op, 4) for op in OPERATIONS}
    assert factors == {
        "all_reduce": 1.5,
        "broadcast": 1.0,
        "reduce": 1.0,
        "all_gather_single": 0.75,
        "reduce_scatter_single": 0.75,
        "all_to_all_single": 0.75,
        "gather": 0.75,
        "scatter": 0.75,
        "send_recv": 1.0,
        "barrier": 1.0,
    }
    assert bus_factor("all_reduce", 1) == 0


def test_bandwidths_are_in_gigabytes_per_second() -> None:
    found = row()
    assert (found.algbw, found.busbw) == (4.0, 6.0)
    assert str(found).split() == ["all_reduce", "gloo", "8000", "2.00", "4.000", "6.000"]
    assert "asynccomm (shm)" in str(row(contender="asynccomm"))


@cases("op, nbytes", product([op for op in OPERATIONS if op != "barrier"], [1, 4096, 4100]))
def test_the_size_is_the_larger_one_of_input_and_output(op: str, nbytes: int) -> None:
    floats = floats_of(op, nbytes, 4)
    sides = [each if isinstance(each, list) else [each] for each in OPS[op].tensors(floats, 0, 4) if each is not None]
    size = size_of(op, floats, 4)
    assert size == max(sum(tensor.nbytes for tensor in side) for side in sides)
    assert size <= max(nbytes, 16)


def test_a_barrier_has_no_size() -> None:
    assert size_of("barrier", floats_of("barrier", 4096, 2), 2) == 0
    assert row("barrier", bytes=0).busbw == 0


def test_rows_come_back_from_their_file(tmp_path: Path) -> None:
    rows = [row(), row("broadcast")]
    (tmp_path / "rows.json.new").touch()  # a file of the user
    write_rows(tmp_path / "rows.json", rows)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rows.json", "rows.json.new"]
    assert json.loads((tmp_path / "rows.json").read_text())[0]["busbw"] == 6.0
    assert read_measurements(tmp_path / "rows.json") == rows
