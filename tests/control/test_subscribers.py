"""The comms of a rank, and what is kept for those that come later."""

from __future__ import annotations

import pytest

from asynccomm.control import subscribers as module
from asynccomm.control.subscribers import EVERY, Subscribers

from .channel_pairs import Member, job
from .unauthenticated import until

pytestmark = pytest.mark.usefixtures("quiet")


async def test_news_are_kept_for_comms_that_are_enrolled_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "KEPT_NEWS", 3)
    monkeypatch.setattr(module, "KEPT_COMMS", 2)
    async with job("aa") as found:
        for number in range(5):
            found.channels[0].broadcast("later", {"n": number})
        found.channels[0].broadcast("main", {"the": "last"})
        await until(lambda: found.members[1].heard, "the news")
        late = Member()
        found.channels[1].subscribe("later", late)
        await until(lambda: late.heard, "what was kept")
        assert [item["n"] for _, item in late.heard] == [0, 1, 2]
        for name in "xyz":
            found.channels[0].broadcast(name, {"n": name})
        found.channels[0].broadcast("main", {"the": "end"})
        await until(lambda: len(found.members[1].heard) == 2, "the news")
        others = [Member() for _ in "xyz"]
        for name, member in zip("xyz", others, strict=True):
            found.channels[1].subscribe(name, member)
        await until(lambda: others[2].heard, "what was kept")
        assert [len(member.heard) for member in others] == [0, 1, 1], "of the latest comms only"


async def test_a_comm_that_cannot_take_news_does_not_end_the_channel(caplog: pytest.LogCaptureFixture) -> None:
    async with job("aa") as found:
        found.channels[0].broadcast("main", {"bad": "luck"})
        found.channels[0].broadcast("main", {"good": "luck"})
        await until(lambda: found.members[1].heard, "the news")
        assert found.members[1].heard == [(0, {"good": "luck"})]
        assert "comm main could not handle a message of the control channel" in caplog.text


async def test_comms_that_are_enrolled_later_hear_who_is_gone() -> None:
    async with job("aaa") as found:
        await found.kill(2)
        await found.lost(2, [0, 1])
        late = Member()
        found.channels[1].subscribe("late", late)
        await until(lambda: late.lost, "the loss")
        assert late.lost[0][0] == 2


# -- alone ------------------------------------------------------------------------------------------------------------


def test_who_enrols_hears_what_it_has_missed() -> None:
    members, late = Subscribers({3: "killed", 4: ""}), Member()
    members.on_news("late", 1, {"n": 1})
    members.on_news("another", 1, {"n": 2})
    members.subscribe("late", late)
    members.on_news("late", 2, {"n": 3})
    members.on_departure(5, "")
    assert late.heard == [(1, {"n": 1}), (2, {"n": 3})]
    assert late.lost == [(3, "killed"), (4, ""), (5, "")]
    members.unsubscribe("late")
    members.unsubscribe("late")
    members.on_departure(6, "")
    assert len(late.lost) == 3
    again = Member()
    members.subscribe("late", again)
    assert again.heard == [], "it was heard"


def test_only_who_is_here_can_be_told() -> None:
    members, member = Subscribers({}), Member()
    assert not members.deliver("main", 0, {"n": 1})
    members.subscribe("main", member)
    assert members.deliver("main", 0, {"n": 2})
    assert member.heard == [(0, {"n": 2})], "the first is not kept"
    assert "main" in members
    assert "other" not in members


def test_what_one_cannot_take_the_others_get(caplog: pytest.LogCaptureFixture) -> None:
    class Weak(Member):
        def on_departure(self, rank: int, how: str) -> None:
            raise ZeroDivisionError

    members, strong = Subscribers({}), Member()
    members.subscribe("weak", Weak())
    members.subscribe("strong", strong)
    members.on_departure(1, "killed")
    assert strong.lost == [(1, "killed")]
    assert "comm weak could not handle" in caplog.text


def test_answers(caplog: pytest.LogCaptureFixture) -> None:
    members = Subscribers({})
    assert members.on_request("main", {"a": 1}) == {}
    assert members.on_request(EVERY, {"a": 1}) == {"comms": {}}
    members.subscribe("main", Member())
    assert members.on_request("main", {"a": 1})["asked"] == {"a": 1}
    assert members.on_request(EVERY, {"a": 1})["comms"]["main"]["asked"] == {"a": 1}
    assert members.on_request("main", {"bad": "luck"}) == {"problem": "ZeroDivisionError: luck"}
    assert "comm main could not answer" in caplog.text


def test_fingerprints_of_all() -> None:
    members, one, two = Subscribers({}), Member(), Member()
    one.issued, two.size = [(0, 5, 5, 1)], 7
    members.subscribe("one", one)
    members.subscribe("two", two)
    assert list(members.take_fingerprints()) == [("one", 2, [(0, 5, 5, 1)]), ("two", 7, [])]
    assert list(members.take_fingerprints()) == [("one", 2, []), ("two", 7, [])]
