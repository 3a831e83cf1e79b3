"""The errors carry data, render it, and survive pickle."""

from __future__ import annotations

import pickle

from asynccomm.errors import AsyncCommError
from asynccomm.weights.errors import LayoutError, PushAbandonedError


def test_errors_show_their_data() -> None:
    layout = LayoutError(
        "s1", {"missing at the server": [f"t{i}" for i in range(6)], "other shapes": ["w ((1,), ...)"]}
    )
    assert str(layout) == (
        "the weights of server 's1' do not fit those of the trainers: "
        "missing at the server: t0, t1, t2, t3 and 2 more; other shapes: w ((1,), ...)"
    )
    abandoned = PushAbandonedError(3, "trainer 1 cancelled it")
    assert str(abandoned) == "the push of version 3 was abandoned: trainer 1 cancelled it"
    for error in (layout, abandoned):
        assert isinstance(error, AsyncCommError)
        again = pickle.loads(pickle.dumps(error))
        assert (type(again), str(again), vars(again)) == (type(error), str(error), vars(error))
