"""Works and operations that are not one to one: one Work for several operations, or one operation for several Works."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, final

import torch

from asynccomm.core.work import Driver, StreamOrder, Work
from asynccomm.errors import AsyncCommError


@final
class CompositeWork:
    """Several operations with one Work, which is done when all of them are. It carries the number of the first.

    Attributes:
        work: that Work; set before any operation is submitted.
        parts: the Works of the operations.
    """

    def __init__(self) -> None:
        self.work: Work[Any]
        self.parts: Sequence[Work[Any]] = ()
        self._left: list[int] = []  # several threads may pop one entry each; the thread that pops 0 is the last

    def expect(self, parts: Sequence[Work[Any]]) -> None:
        """Set the parts, before any is submitted."""
        self.parts = parts
        self._left = list(range(len(parts)))

    def settled(self, part: Work[Any]) -> None:
        """Count a part that is done. From any thread."""
        if self._left.pop() == 0:
            self._all_settled()

    def _all_settled(self) -> None:
        errors = [part.take_error() for part in self.parts]
        if any(part.captured for part in self.parts):
            self.work.capture()
        else:
            self.work.settle(next((error for error in errors if error is not None), None))

    def sent(self) -> None:
        """Take over number and stream order from the parts, which are numbered and submitted."""
        self.work.seq = self.parts[0].seq
        orders = [part.order for part in self.parts]
        if all(orders):
            self.work.order = _CompositeOrder([order for order in orders if order is not None])

    # -- as the driver of its Work ------------------------------------------------------------------------------------

    def before_await(self, work: Work[Any]) -> None:
        for part in self.parts:
            if (driver := part.driver) is not None:
                driver.before_await(part)

    def before_block(self, work: Work[Any]) -> None:
        for part in self.parts:
            if (driver := part.driver) is not None:
                driver.before_block(part)


@final
class FusedWork:
    """One operation made of several; settles the Works of all of them.

    Args:
        parts: the Works of the members.
        driver: the driver of the fused operation.
    """

    def __init__(self, parts: Sequence[Work[Any]], driver: Driver) -> None:
        self.work: Work[Any]  #: the Work of the fused operation; set before it is submitted
        self._parts = parts
        self._driver = driver

    def settled(self, work: Work[Any]) -> None:
        """Settle all parts, now that the operation is done. From any thread."""
        error: AsyncCommError | None = work.take_error()
        if work.captured:
            for part in self._parts:
                part.capture()
        else:
            for part in self._parts:
                part.settle(error)

    def sent(self) -> None:
        """Pass the operation's stream order on to the parts, once it is submitted."""
        if (order := self.work.order) is not None:
            for part in self._parts:
                part.order = order

    # -- as the driver of the parts' Works ----------------------------------------------------------------------------

    def before_await(self, work: Work[Any]) -> None:
        self._driver.before_await(self.work)

    def before_block(self, work: Work[Any]) -> None:
        self._driver.before_block(self.work)


@final
class _CompositeOrder:
    """The position of several operations in the streams of a GPU."""

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
