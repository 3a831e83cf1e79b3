"""The tree of ranks, without a socket: whatever way they go, all hear of it, and of all news."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import to_builtins

from asynccomm.control import patient
from asynccomm.control import router as module
from asynccomm.control.batches import batches
from asynccomm.control.messages import ALL, ROOT, Departure, MessageBatch, News, Reply, RoutedMessage
from asynccomm.control.runs import Run, expand_ranks
from asynccomm.control.transport.schema import JsonObject, MessageError
from asynccomm.control.transport.topology import RankAddress, Topology
from tests.sampling import examples

from .simulated_tree import End, Place, Tree

HOSTS: Any = st.text("abc", min_size=1, max_size=8)
ONE_HOST: Any = st.text("a", min_size=1, max_size=8)


def up(hosts: str) -> Tree:
    """A tree in which all have found each other."""
    tree = Tree(hosts)
    tree.settle()
    return tree


def end_of(place: Place) -> End:
    """The connection upwards."""
    link = place.router.up
    assert isinstance(link, End)
    return link


# -- ways -------------------------------------------------------------------------------------------------------------


@given(HOSTS, st.integers(0, 1000))
def test_each_rank_reaches_each_other(hosts: str, seed: int) -> None:
    tree = Tree(hosts, seed)
    tree.settle()
    for one in tree.places:
        for other in tree.places:
            one.ask(other.rank, (one.rank, other.rank))
        one.ask(ROOT, (one.rank, "root"))
    tree.settle()
    for one in tree.places:
        expected = {(other.rank, one.rank) for other in tree.places}
        if one.rank == 0:
            expected |= {(other.rank, "root") for other in tree.places}
        assert set(one.asked()) == expected
        assert len(one.heard) == len(expected)


@given(HOSTS, st.integers(0, 1000))
def test_what_is_for_all_reaches_all_in_one_order_from_the_very_beginning(hosts: str, seed: int) -> None:
    tree = Tree(hosts, seed)
    for rank in range(len(hosts)):
        tree.tell(rank, (rank, 0))  # nobody is connected yet
        tree.settle(3)
        tree.tell(rank, (rank, 1))
    tree.settle()
    news = [place.news() for place in tree.places]
    assert sorted(news[0]) == sorted((rank, n) for rank in range(len(hosts)) for n in range(2))
    assert all(sorted(one) == sorted(news[0]) for one in news)
    for rank in range(len(hosts)):
        tree.tell(rank, (rank, 2))
    tree.settle()
    assert all(place.news()[-len(hosts) :] == tree.places[0].news()[-len(hosts) :] for place in tree.places)


def test_messages_for_who_is_not_there_go_nowhere() -> None:
    tree = up("aab")
    tree.places[2].ask(9, 1)
    tree.places[1].kill()
    tree.settle()
    tree.places[0].ask(1, 2)
    tree.settle()
    assert not tree.steps()


# -- going ------------------------------------------------------------------------------------------------------------


def check_all_know(tree: Tree, dead: set[int], left: set[int]) -> None:
    """All that still run have heard once of each that does not, and of nobody else; who left was not taken for lost."""
    for place in tree.running:
        found = dict(place.gone)
        assert len(found) == len(place.gone), "told twice"
        assert found.keys() == dead | left
        assert all(bool(found[rank]) == (rank in dead) for rank in found), found


def check_all_reach_each_other(tree: Tree) -> None:
    """A message from each to each comes, once; also while what was for all is sent again."""
    for place in tree.running:
        place.heard = [(source, body) for source, body in place.heard if not isinstance(body, Reply)]
        for other in tree.running:
            place.router.send(other.rank, Reply(0, {}))
    tree.settle()
    for place in tree.running:
        senders = [source for source, body in place.heard if isinstance(body, Reply)]
        assert sorted(senders) == [other.rank for other in tree.running]


@given(HOSTS, st.integers(0, 10_000), st.data())
def test_one_after_the_other(hosts: str, seed: int, data: st.DataObject) -> None:
    with missed_news_made_anew(data):
        check_one_after_the_other(hosts, seed, data)


@contextlib.contextmanager
def missed_news_made_anew(data: st.DataObject) -> Iterator[None]:
    """Have the nodes make the list of missed news anew after so few changes."""
    with mock.patch.object(module, "LATER", data.draw(st.sampled_from([0, 1, 3, module.LATER]))):
        yield


def check_one_after_the_other(hosts: str, seed: int, data: st.DataObject) -> None:
    tree = Tree(hosts, seed)
    tree.settle()
    dead: set[int] = set()
    left: set[int] = set()
    for rank in data.draw(st.permutations(range(len(hosts)))):
        if data.draw(st.booleans()):
            tree.places[rank].kill()
            dead.add(rank)
        else:
            tree.places[rank].leave()
            left.add(rank)
        tree.settle()
        assert not tree.places[rank].runs, "it waits for nobody who is not there"
        check_all_know(tree, dead, left)
        for place in tree.running:
            tree.tell(place.rank, (rank, place.rank))
        tree.settle()
        expected = sorted((rank, place.rank) for place in tree.running)
        assert all(sorted(what for what in place.news() if what[0] == rank) == expected for place in tree.running)
        check_all_reach_each_other(tree)


def meet_fates(tree: Tree, data: st.DataObject, stay: Callable[[int], object]) -> list[str]:
    """Have each rank stay, die or leave at some time, in any order; returns what became of them."""
    tree.settle(data.draw(st.integers(0, 40)))
    size = len(tree.places)
    fates = data.draw(st.lists(st.sampled_from(["stays", "dies", "leaves"]), min_size=size, max_size=size))
    for rank in data.draw(st.permutations(range(size))):
        if fates[rank] == "dies":
            tree.places[rank].kill()
        elif fates[rank] == "leaves":
            tree.places[rank].leave()
        else:
            stay(rank)
        tree.settle(data.draw(st.integers(0, 3)))
    tree.settle()
    return fates


@examples(200)
@given(HOSTS, st.integers(0, 10_000), st.data())
def test_all_at_once(hosts: str, seed: int, data: st.DataObject) -> None:
    tree = Tree(hosts, seed)
    with missed_news_made_anew(data):
        fates = meet_fates(tree, data, lambda rank: None)
    dead = {rank for rank, fate in enumerate(fates) if fate == "dies"}
    for place in tree.running:
        found = dict(place.gone)
        assert len(found) == len(place.gone), "told twice"
        assert {rank for rank in found if fates[rank] == "stays"} == set()
        assert dead <= found.keys()
    assert {place.rank for place in tree.running} == {rank for rank, fate in enumerate(fates) if fate == "stays"}


@examples(200)
@given(ONE_HOST, st.integers(0, 10_000), st.data())
def test_who_leaves_is_never_taken_for_lost_whoever_leaves_with_it(hosts: str, seed: int, data: st.DataObject) -> None:
    tree = Tree(hosts, seed)
    tree.settle(data.draw(st.integers(0, 40)))
    leaving = data.draw(st.sets(st.integers(0, len(hosts) - 1)))
    for rank in leaving:
        tree.places[rank].leave()
        tree.settle(data.draw(st.integers(0, 3)))
    tree.settle()
    check_all_know(tree, set(), leaving)
    assert {place.rank for place in tree.running} == set(range(len(hosts))) - leaving


def test_one_whose_goodbye_only_those_have_heard_who_leave_themselves() -> None:
    tree = Tree("aaaaaa", 2)
    tree.settle(10)
    for rank, steps in ((0, 2), (1, 2), (2, 0), (4, 0)):
        tree.places[rank].leave()
        tree.settle(steps)
    tree.settle()
    check_all_know(tree, set(), {0, 1, 2, 4})


def test_who_has_not_come_to_a_new_root_is_silent() -> None:
    tree = Tree("aaa", 0)
    tree.settle()
    successor = tree.places[1].router
    assert successor.silence(2) is None, "it has nothing to do with that one"
    tree.places[2].runs = False  # it is stopped, and comes to nobody
    tree.places[0].kill()
    tree.settle()
    assert successor.is_root
    assert successor.silence(2) is not None
    assert 2 not in successor.gone


@examples(200)
@given(HOSTS, st.integers(0, 10_000), st.data())
def test_news_of_those_who_stay_reach_all_who_stay(hosts: str, seed: int, data: st.DataObject) -> None:
    tree = Tree(hosts, seed)
    with missed_news_made_anew(data):
        fates = meet_fates(tree, data, lambda rank: tree.tell(rank, rank))
    staying = {rank for rank, fate in enumerate(fates) if fate == "stays"}
    for place in tree.running:
        assert staying <= set(place.news())
        assert len(place.news()) == len(set(place.news())), "heard twice"


def test_the_news_that_all_ranks_missed_are_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """All ranks connect to a new root at once."""
    hosts = [RankAddress(rank, f"host{rank}", rank, local="x") for rank in range(200)]
    root = module.Router(0, Topology(hosts), lambda *_: None, lambda *_: None)
    made: list[int] = []  # the ranks in each list of departures that is made

    def counted(messages: Sequence[RoutedMessage]) -> Iterator[RoutedMessage | MessageBatch]:
        bodies = [message.body for message in messages]
        made.append(sum(len(expand_ranks(body.ranks)) for body in bodies if isinstance(body, Departure)))
        yield from batches(messages)

    monkeypatch.setattr(module, "batches", counted)
    for rank in range(101, 200):
        root.declare_lost(rank, "it is lost")
    root.send(ALL, News("comm", {"what": 0}))
    for rank in range(1, 21):
        link = Sink()
        root.accept(rank, link)
        assert ranks_gone(link) == set(range(100 - rank + 2, 200))
        assert sum(isinstance(message.body, News) for message in link.messages) == 1
        root.declare_lost(100 - rank + 1, "it is lost, too")
    assert [count for count in made if count > module.LATER] == [99]


class Sink:
    """A connection that keeps the messages."""

    def __init__(self) -> None:
        self.messages: list[RoutedMessage] = []

    def send(self, message: object) -> None:
        if isinstance(message, MessageBatch):
            self.messages += message.messages
        else:
            assert isinstance(message, RoutedMessage)
            self.messages.append(message)

    def close(self) -> None:
        pass


def ranks_gone(link: Sink) -> set[int]:
    bodies = [message.body for message in link.messages]
    return {rank for body in bodies if isinstance(body, Departure) for rank in expand_ranks(body.ranks)}


def test_leaders_send_a_new_root_the_ranks_that_it_knows_as_one_equal_list(monkeypatch: pytest.MonkeyPatch) -> None:
    """The root reads such a list once; the ranks that only one leader knows are a list of their own."""
    monkeypatch.setattr(module, "LATER", 4)
    hosts = [RankAddress(rank, f"host{rank // 2}", rank, local="x") for rank in range(40)]
    for rank in (2, 4):
        leader, old, new = module.Router(rank, Topology(hosts), lambda *_: None, lambda *_: None), Sink(), Sink()
        below = Sink()
        leader.accept(rank + 1, below)
        leader.attach(0, old)
        told = RoutedMessage(ALL, 0, Departure((Run(6, 15, 2),), ""))
        leader.received(old, to_builtins(told))
        leader.received(below, to_builtins(RoutedMessage(ALL, rank + 1, Departure((rank + 1,), ""), patient=True)))
        leader.ended(old, "it has ended")
        leader.attach(1, new)
        assert ranks_gone(new) == {0, rank + 1, *range(6, 36, 2)}
        lists = [message.body.ranks for message in new.messages if isinstance(message.body, Departure)]
        assert {(rank + 1,), (Run(6, 15, 2),)} <= set(lists)


def test_a_leader_that_leaves_tells_the_ranks_below_it() -> None:
    tree = up("abb")
    tree.places[1].leave()
    tree.settle()
    assert tree.places[2].gone == [(1, "")]
    assert end_of(tree.places[2]).other in tree.places[0].ends


def test_leaving_waits_until_those_below_have_heard() -> None:
    tree = up("aab")
    zero = tree.places[0]
    assert not zero.router.leave_acknowledged
    zero.leave()
    assert not zero.router.leave_acknowledged
    for place in tree.places[1:]:
        while place.router.up is not None:
            place.receive(end_of(place))
        assert place.gone == [(0, "")]
    for end in zero.ends:
        while end.coming and end.open:
            zero.receive(end)
    assert zero.router.leave_acknowledged
    assert zero.gone == []


@examples(200)
@given(HOSTS, st.integers(0, 10_000), st.data())
def test_messages_to_one_rank_outlive_the_leave_of_the_root(hosts: str, seed: int, data: st.DataObject) -> None:
    tree = Tree("a" + hosts, seed)
    tree.settle()
    sent: dict[int, list[int]] = {rank: [] for rank in range(1, len(hosts) + 1)}
    for number, rank in enumerate(data.draw(st.lists(st.integers(1, len(hosts)), max_size=10))):
        tree.places[0].ask(rank, number)
        sent[rank].append(number)
        tree.settle(data.draw(st.integers(0, 2)))
    tree.places[0].leave()
    tree.settle()
    assert {rank: tree.places[rank].asked() for rank in sent} == sent


def test_messages_before_a_leave_that_another_rank_tells_first_are_read() -> None:
    tree = up("aba")
    zero, one, two = tree.places
    zero.ask(1, "before")
    zero.leave()
    while two.router.above == 0:
        two.receive(end_of(two))
    two.climb()
    while one.gone == []:
        one.receive(one.ends[-1])  # from rank 2
    assert one.gone == [(0, "")]
    assert one.asked() == []
    tree.settle()
    assert one.asked() == ["before"]
    assert not one.router._left_above
    assert {place.rank for place in tree.running} == {1, 2}


@given(HOSTS, st.integers(0, 1000), st.data())
def test_a_leave_that_only_the_root_has_heard_of_is_known_to_its_heir(
    hosts: str, seed: int, data: st.DataObject
) -> None:
    last = len(hosts) + 2
    leave_before_the_root_is_lost(
        Tree("a" + hosts + "bd", seed), data.draw(st.lists(st.integers(1, last - 1), unique=True, max_size=last - 1))
    )


@pytest.mark.parametrize(("hosts", "leaving"), [("abcd", 1), ("aabd", 1), ("acaabd", 2), ("acaabd", 4)])
def test_all_know_at_once_that_the_heir_or_the_next_leader_has_left(hosts: str, leaving: int) -> None:
    leave_before_the_root_is_lost(Tree(hosts), [leaving])


def leave_before_the_root_is_lost(tree: Tree, leaving: list[int]) -> None:
    tree.settle()
    root, last = tree.places[0], tree.places[-1]
    last.router.send(ALL, News("comm", {"what": "the news after which others wait"}), patient=True)
    receive_all(tree)
    assert root.waiting
    for rank in leaving:
        tree.places[rank].leave()
        while not tree.places[rank].router.leave_acknowledged:
            tree.choice.choice(soon(tree.places))()
        tree._gone(tree.places[rank])
    receive_all(tree)
    root.kill()
    tree.settle()
    check_all_know(tree, {0}, set(leaving))


def soon(places: list[Place]) -> list[Callable[[], object]]:
    """What happens before any time passes: ranks connect, and receive what is on its way."""
    steps = [partial(place.receive, end) for place in places if place.runs for end in place.ends if end.coming]
    unconnected = [place for place in places if place.runs and place.router.up is None]
    return [*steps, *(place.climb for place in unconnected if place.router.above is not None)]


def receive_all(tree: Tree) -> None:
    while steps := soon(tree.places):
        tree.choice.choice(steps)()


def test_an_heir_keeps_what_waits_and_forgets_what_was_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patient, "HELD", 2)
    tree = up("aaaa")
    root, heir = tree.places[0], tree.places[1]
    for number in range(4):
        tree.places[2].router.send(ALL, News("comm", {"what": number}), patient=True)
        receive_all(tree)
    assert [len(each.router._entrusted) for each in tree.places] == [0, 3, 0, 0], "the first did not wait"
    assert heir.news() == [0]
    tree.settle()
    assert heir.news() == [0, 1, 2, 3]
    known = RoutedMessage(ALL, 2, News("comm", {"what": 3}), 4, patient=True, held=True)
    for _ in range(6):
        heir.router._entrusted.add(known)
    assert len(heir.router._entrusted) == 0
    root.kill()
    tree.settle()
    assert all(place.news() == [0, 1, 2, 3] for place in tree.running)


def test_only_the_rank_above_entrusts_messages() -> None:
    tree = up("aa")
    held = {**GOOD, "body": {"kind": "Departure", "ranks": [1], "reason": ""}, "held": True}
    with pytest.raises(MessageError, match="only the root entrusts messages"):
        tree.places[0].router.received(tree.places[0].ends[0], held)


def test_equal_news_of_many_ranks_reach_each_rank_once_from_each() -> None:
    tree = up("aabbccdd")
    for rank in range(8):
        tree.places[rank].router.send(ALL, News("comm", {"what": "same"}), patient=True)
    tree.settle()
    for place in tree.places:
        assert sorted(source for source, body in place.heard if isinstance(body, News)) == list(range(8))
    assert any(message.also for message in tree.places[7].router._log.recent), "they came as one"


def test_who_is_alone_leaves_at_once() -> None:
    tree = up("a")
    tree.places[0].leave()
    assert tree.places[0].router.leave_acknowledged


def test_who_was_given_up_sees_all_others_gone() -> None:
    tree = up("aabb")
    tree.places[0].router.declare_lost(3, "it is silent")
    tree.settle()
    assert sorted(rank for rank, _ in tree.places[3].gone) == [0, 1, 2]
    assert all("it goes on without rank 3: it is silent" in how for _, how in tree.places[3].gone)
    for place in tree.places[:3]:
        assert place.gone == [(3, "it is silent")]


@given(HOSTS, st.integers(0, 1000), st.data())
def test_whoever_gives_up_whom(hosts: str, seed: int, data: st.DataObject) -> None:
    tree = Tree(hosts + "a", seed)  # two at least
    tree.settle()
    ranks = range(len(tree.places))
    neighbours = [(rank, above) for rank in ranks if (above := tree.topology.above(rank, ())) is not None]
    one, other = data.draw(st.sampled_from([*neighbours, *((above, rank) for rank, above in neighbours)]))
    tree.places[one].router.declare_lost(other, "it is silent")
    tree.settle()
    assert sorted(rank for rank, _ in tree.places[other].gone) == [rank for rank in ranks if rank != other]
    for place in tree.places:
        if place.rank != other:
            assert [rank for rank, _ in place.gone] == [other]


def test_a_loss_of_the_rank_above_needs_no_way_over_that_rank() -> None:
    tree = up("aaa")
    tree.places[0].runs = False  # it is stopped: its connections stay open
    tree.places[2].router.declare_lost(0, "it is silent")
    tree.settle()
    assert tree.places[1].gone == [(0, "it is silent")]
    assert tree.places[1].router.is_root
    tree.tell(2, "still here")
    tree.settle()
    assert tree.places[1].news() == ["still here"]


def test_the_children_of_who_was_given_up_go_on() -> None:
    tree = up("abb")
    tree.places[0].router.declare_lost(1, "it is silent")
    tree.settle()
    assert tree.places[2].gone == [(1, "it is silent")] or tree.places[2].gone[0][0] == 1
    assert end_of(tree.places[2]).other in tree.places[0].ends
    tree.tell(2, "still here")
    tree.settle()
    assert "still here" in tree.places[0].news()


def test_who_was_given_up_is_not_let_in_again() -> None:
    tree = up("aab")
    zero = tree.places[0].router
    assert "is connected already" in zero.refusal(1)
    assert "no other rank 7" in zero.refusal(7)
    assert "no other rank 0" in zero.refusal(0)
    tree.places[1].kill()
    tree.places[2].leave()
    tree.settle()
    assert zero.refusal(1) == "rank 1 was given up: its connection ended"
    assert zero.refusal(2) == "rank 2 was given up: it has left"


# -- what is kept -----------------------------------------------------------------------------------------------------


def test_what_cannot_go_on_its_way_waits() -> None:
    tree = Tree("ab")
    tree.places[1].ask(ROOT, 1)
    tree.places[1].ask(0, 2)
    tree.settle()
    assert tree.places[0].asked() == [1, 2]


def test_what_waits_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "KEPT", 3)
    tree = Tree("ab")
    for number in range(5):
        tree.places[1].ask(ROOT, number)
    tree.settle()
    assert tree.places[0].asked() == [2, 3, 4]


def test_who_becomes_the_root_takes_what_waited_for_it() -> None:
    tree = Tree("ab")
    tree.places[0].kill()
    tree.places[1].ask(ROOT, 1)
    tree.tell(1, "mine")
    tree.settle()
    assert tree.places[1].asked() == [1]
    assert tree.places[1].news() == ["mine"]


# -- heartbeats -------------------------------------------------------------------------------------------------------


def test_a_rank_behind_another_is_silent_from_its_first_message_on() -> None:
    """It may stop before the leader of its host has sent a heartbeat."""
    tree = up("abb")
    assert tree.places[0].router.silence(2) is not None


def test_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    tree = up("aabb")
    assert tree.places[0].router.silence(0) is None
    now += 5
    tree.places[3].router.send_heartbeats()
    tree.settle()
    assert tree.places[2].router.silence(3) == 0
    assert tree.places[0].router.silence(2) == 5
    now += 1
    tree.places[2].router.send_heartbeats()
    tree.settle()
    assert tree.places[0].router.silence(2) == 0
    assert tree.places[0].router.silence(3) == 1, "told by its leader"
    tree.places[0].router.reset_heartbeats()
    assert tree.places[0].router.silence(3) == 0
    assert tree.places[3].router.silence(0) is None
    assert tree.places[3].router.silence(2) == 0
    assert not any(place.heard for place in tree.places), "nobody else is told of heartbeats"


def test_ages_of_ranks_that_are_none_are_left_out() -> None:
    tree = up("abb")
    link = tree.places[0].ends[0]
    heard = dict(tree.places[0].router.last_heard)
    body = {"kind": "Heartbeat", "ages": {"9": 1}}
    tree.places[0].router.received(link, {"to": ROOT, "source": 1, "body": body})
    assert tree.places[0].router.last_heard.keys() == heard.keys()


GOOD: JsonObject = {"to": ALL, "source": 1, "body": {"kind": "Presence"}}


@pytest.mark.parametrize(
    "message",
    [
        {},
        {**GOOD, "source": 77},
        {**GOOD, "to": "everybody"},
        {**GOOD, "body": {"kind": "Nonsense"}},
        {**GOOD, "body": {"kind": "Departure", "ranks": [77], "reason": ""}},
        {**GOOD, "body": {"kind": "Departure", "ranks": [1, [0, 99, 1]], "reason": ""}},
        {**GOOD, "body": {"kind": "Heartbeat", "ages": {"2": -1}}},
        {**GOOD, "also": [0]},
        {**GOOD, "also": [77], "number": 1},
    ],
)
def test_what_no_node_has_sent(message: JsonObject) -> None:
    tree = up("ab")
    with pytest.raises(MessageError):
        tree.places[0].router.received(tree.places[0].ends[0], message)


def test_what_comes_over_a_connection_that_was_given_up_is_nothing() -> None:
    tree = up("ab")
    tree.places[0].router.received(End(tree.places[0]), GOOD)
    assert tree.places[0].heard == []
