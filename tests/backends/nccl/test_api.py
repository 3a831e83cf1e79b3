"""The values of the binding: errors, and NCCL's numbers."""

from __future__ import annotations

import pickle

import pytest

from asynccomm.backends.nccl import api
from asynccomm.errors import BackendError
from asynccomm.ops.reduce_op import RedOpType


def test_an_error_says_what_and_carries_the_code() -> None:
    error = api.NcclError("split a communicator", 6, "remote process exited", "connection closed by 10.0.0.1")
    assert str(error) == "NCCL could not split a communicator: remote process exited (connection closed by 10.0.0.1)"
    assert isinstance(error, BackendError)
    assert error.code == api.REMOTE_ERROR
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again), again.code) == (api.NcclError, str(error), 6)


def test_an_error_without_details() -> None:
    assert str(api.NcclError("abort", 1, "unhandled cuda error", "")) == "NCCL could not abort: unhandled cuda error"


def test_numbers_are_those_of_nccl() -> None:
    bindings = pytest.importorskip("nccl.bindings.nccl", reason="needs nccl4py")
    types = {str(dtype).removeprefix("torch."): number for dtype, number in api.DTYPES.items()}
    types["float8e4m3"], types["float8e5m2"] = types.pop("float8_e4m3fn"), types.pop("float8_e5m2")
    assert types == {kind.name.lower(): kind.value for kind in bindings.DataType if kind.name != "NumTypes"}
    names = {"SUM": "Sum", "PRODUCT": "Prod", "MAX": "Max", "MIN": "Min", "AVG": "Avg"}
    assert {kind: bindings.RedOp[names[kind.name]].value for kind in api.REDUCTIONS} == api.REDUCTIONS
    assert RedOpType.PREMUL_SUM not in api.REDUCTIONS
    assert bindings.Result.RemoteError == api.REMOTE_ERROR


@pytest.mark.parametrize(("number", "text"), [(22800, "2.28.0"), (23007, "2.30.7"), (23203, "2.32.3")])
def test_a_version_is_written_as_in_the_documents(number: int, text: str) -> None:
    assert api.dotted(number) == text
