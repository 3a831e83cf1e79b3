"""All trainers draw the same verdict from the reports of all."""

from __future__ import annotations

from asynccomm.control.transport.schema import dumps, loads
from asynccomm.weights.layout import Slice
from asynccomm.weights.orders import Admit, AnyOrder, Deliver, End, Report, Start, verdict


def test_a_version_is_complete_when_all_trainers_have_sent() -> None:
    found = verdict([Report(10), Report(5, lost={2: "it died"}), Report(0, lost={2: "later", 4: "gone"})])
    assert found == ("", {2: "it died", 4: "gone"}, 15, 0)


def test_a_version_is_abandoned_when_one_trainer_stops() -> None:
    found = verdict([Report(10), Report(0, "cancelled it"), Report(3, "failed", {1: "gone"})])
    assert (found.reason, found.lost) == ("trainer 1 cancelled it; trainer 2 failed", {1: "gone"})


def test_the_version_before_is_kept_where_all_trainers_have_it() -> None:
    assert verdict([Report(0, "cancelled it", copied=3), Report(0, "cancelled it", copied=3)]).copied == 3
    assert verdict([Report(0, "cancelled it", copied=3), Report(5)]).copied == 0


def test_orders_travel() -> None:
    layout = {"a": Slice((2,), "torch.float32", (0,), (2,))}
    for order in (Start(), End(), Admit(3, "s", layout, True), Deliver(1, 2, True, [3], [4])):
        assert loads(AnyOrder, dumps(order)) == order
    report = Report(7, "no", {1: "gone"}, 3)
    assert loads(Report, dumps(report)) == report
