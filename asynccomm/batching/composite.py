"""Where operations and Works are not one to one: several operations with one Work, several Works with one operation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, final

import torch

from asynccomm.core.work import Driver, StreamOrder, Work
from asynccomm.errors import AsyncCommError


@final
class CompositeWork:
    """Several operations, and the Work that is done when all of them are. It carries the number of the first.

    Attributes:
        work: that Work; to be set before any is handed on.
        parts: the Works of the operations.
    """

    def __init__(self) -> None:
        self.work: Work[Any]
        self.parts: Sequence[Work[Any]] = ()
        self._left: list[int] = []  # several threads may take one each: whoever gets 0 is the last

    def expect(self, parts: Sequence[Work[Any]]) -> None:
        """Name the parts, before any is handed on."""
        self.parts = parts
        self._left = list(range(len(parts)))

    def settled(self, part: Work[Any]) -> None:
        """One part is done. From any thread."""
        if self._left.pop() == 0:
            self._all_settled()

    def _all_settled(self) -> None:
        errors = [part.take_error() for part in self.parts]
        if any(part.captured for part in self.parts):
            self.work.capture()
        else:
            self.work.settle(next((error for error in errors if error is not None), None))

    def sent(self) -> None:
        """Parts were numbered and handed on."""
        self.work.seq = self.parts[0].seq
        orders = [part.order for part in self.parts]
        if all(orders):
            self.work.order = _CompositeOrder([order for order in orders if order is not None])

    # -- it drives its Work -------------------------------------------------------------------------------------------

    def hurry(self, work: Work[Any]) -> None:
        for part in self.parts:
            if (driver := part.driver) is not None:
                driver.hurry(part)

    def relieve(self, work: Work[Any]) -> None:
        for part in self.parts:
            if (driver := part.driver) is not None:
                driver.relieve(part)


@final
class FusedWork:
    """One operation made of several, which settles the Works of all of them.

    Args:
        parts: their Works.
        driver: what moves the operation on.
    """

    def __init__(self, parts: Sequence[Work[Any]], driver: Driver) -> None:
        self.work: Work[Any]  #: the operation's; to be set before it is handed on
        self._parts = parts
        self._driver = driver

    def settled(self, work: Work[Any]) -> None:
        """The operation is done. From any thread."""
        error: AsyncCommError | None = work.take_error()
        if work.captured:
            for part in self._parts:
                part.capture()
        else:
            for part in self._parts:
                part.settle(error)

    def sent(self) -> None:
        """The operation was handed on."""
        if (order := self.work.order) is not None:
            for part in self._parts:
                part.order = order

    # -- it drives the parts' Works -----------------------------------------------------------------------------------

    def hurry(self, work: Work[Any]) -> None:
        self._driver.hurry(self.work)

    def relieve(self, work: Work[Any]) -> None:
        self._driver.relieve(self.work)


@final
class _CompositeOrder:
    """The place of several operations in the streams of a GPU."""

    def __init__(self, orders: Sequence[StreamOrder]) -> None:
        self._orders = orders
        self.immediate = all(order.immediate for order in orders)

    @property
    def issued(self) -> bool:
        return all(order.issued for order in self._orders)

    def listen(self, listener: Callable[[], object]) -> None:
        def one_more() -> None:
            if self.issued:
                listener()

        for order in self._orders:
            order.listen(one_more)

    def order(self, stream: torch.cuda.Stream | None) -> None:
        for order in self._orders:
            order.order(stream)
