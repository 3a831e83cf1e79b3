"""Errors of torchcomms' types."""

import pytest

from asynccomm.compat.torchcomms.errors import RefusedError, made_or_refused, refusing


def test_a_wrong_value_is_both_errors() -> None:
    with pytest.raises(RuntimeError, match="root") as caught, refusing():
        raise ValueError("root must be ...")
    assert isinstance(caught.value, RefusedError)
    assert isinstance(caught.value, ValueError)
    with pytest.raises(TypeError), refusing():
        raise TypeError


async def wrong() -> None:
    raise ValueError("root must be ...")


async def test_a_wrong_value_that_awaiting_finds_is_both_errors() -> None:
    made = made_or_refused(wrong)
    with pytest.raises(RefusedError, match="root"):
        await made
