"""Versions take effect between requests, in order, and never in parts."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import nn

from asynccomm import AbortedError, ClosedError, MemoryStore, RendezvousError, StoreError, StoreTimeoutError
from asynccomm.ops.validation import CommInfo
from asynccomm.testing import loopback_world
from asynccomm.weights import LayoutError, Publisher, PushAbandonedError, Server
from asynccomm.weights import meeting as meeting_module
from asynccomm.weights import updates as updates_module
from asynccomm.weights.conversation import (
    SERVER,
    TRAINER,
    Begin,
    Connected,
    Conversation,
    FinishedError,
    LayoutOffer,
    TrainerLayouts,
)
from asynccomm.weights.layout import collect
from asynccomm.weights.meeting import Meeting
from asynccomm.weights.updates import Updates
from tests.forking import fork
from tests.waiting import until

from .scenes import LIMIT, Gate, Served, content, fill, publishers, state


def tensors_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return dict(model.state_dict())


def two_layers() -> nn.Module:
    """A large message of one tensor, a message of the others, and a buffer that is a view."""
    model = nn.Sequential(nn.Linear(3, 600), nn.Linear(600, 600))
    model.register_buffer("part", model[0].bias.detach()[:5])
    return model


async def test_requests_see_one_version_while_the_next_arrives() -> None:
    sizes = [(300, 200), (200, 100), (100, 300)]  # copied in threads, and in several messages
    models = [
        nn.Sequential(*(nn.Linear(a, b, dtype=dtype) for a, b in sizes)) for dtype in (torch.float64, torch.float32)
    ]
    source, target = models
    for model in models:
        for parameter in model.parameters():
            parameter.detach().zero_()
    seen, while_receiving = set(), 0
    async with loopback_world(1) as comms:
        served = Served(comms[0], target)

        async def answer() -> None:
            nonlocal while_receiving
            while True:
                while_receiving += served.updates.receiving
                seen.add(content(tensors_of(target)))
                await asyncio.sleep(0)

        async with publishers(comms, [source], servers=1, bucket_mb=0.2) as (publisher,):
            answering = asyncio.create_task(answer())
            for version in range(1, 6):
                for parameter in source.parameters():
                    parameter.detach().fill_(version)
                await publisher.push()
            await served.reached(5)
            answering.cancel()
        assert served.versions == [1, 2, 3, 4, 5]
        assert while_receiving
        assert {*range(1, 6)} - {5} <= seen <= {*range(6)}
        assert served.server.version == content(tensors_of(target)) == 5


async def test_a_forked_child_leaves_publisher_and_updates_to_its_parent() -> None:
    source, target = two_layers(), two_layers()
    async with loopback_world(1) as comms:
        served = Served(comms[0], target)
        async with publishers(comms, [source], servers=1) as (publisher,):
            await publisher.push()
            await served.reached(1)
            pid = fork()
            if pid == 0:
                code = 1
                try:
                    signal.alarm(20)  # ends it if it waits
                    await publisher.__aexit__(ValueError, ValueError("in the child"), None)
                    await served.updates.__aexit__(None, None, None)
                    code = 0
                finally:
                    os._exit(code)
            _, status = await asyncio.to_thread(os.waitpid, pid, 0)
            assert os.waitstatus_to_exitcode(status) == 0
            fill(tensors_of(source), 2)
            await publisher.push()
            await served.reached(2)
        assert served.versions == [1, 2]
        assert content(tensors_of(target)) == 2


@pytest.mark.parametrize("options", [{}, {"automatic": False}, {"in_place": True}], ids=str)
async def test_a_model_of_inference_tensors(options: dict[str, bool]) -> None:
    source = two_layers()
    with torch.inference_mode():
        target = two_layers()
    async with loopback_world(1) as comms:
        served = Served(comms[0], target, **options)
        async with publishers(comms, [source], servers=1) as (publisher,):
            for version in range(1, 4):
                fill(tensors_of(source), version)
                await publisher.push()
            await served.reached(3)
        assert content(tensors_of(target)) == 3
        assert all(tensor.is_inference() for tensor in target.state_dict(keep_vars=True).values())


async def test_inference_mode_of_the_program_does_not_reach_the_weights() -> None:
    source, target = two_layers(), two_layers()
    async with loopback_world(1) as comms:
        with torch.inference_mode():  # of the thread, and so of all tasks
            served = Served(comms[0], target)
            async with publishers(comms, [source], servers=1) as (publisher,):
                fill(tensors_of(source), 1)
                await publisher.push()
                with torch.inference_mode(False):
                    fill(tensors_of(source), 2)
                    await publisher.push()
                    await served.reached(2)
        assert content(tensors_of(target)) == 2
    target(torch.ones(1, 3)).sum().backward()


async def test_a_version_waits_for_its_apply_and_holds_the_next_one_back() -> None:
    async with loopback_world(1) as comms:
        mine, theirs = state(1), state()
        server = Server(theirs, store=comms[0], label="s")
        async with asyncio.timeout(LIMIT), publishers(comms, [mine]) as (publisher,), server.updates() as updates:
            await until(lambda: publisher.servers)
            await publisher.push()
            fill(mine, 2)
            pushing = asyncio.create_task(publisher.push(info={"loss": 0.5}))
            first = await anext(updates)
            assert (first.version, first.info, repr(first)) == (1, None, "<Update to version 1>")
            for _ in range(100):
                await asyncio.sleep(0)
            assert not pushing.done()
            assert (content(theirs), server.version) == (0, 0)
            first.apply()
            first.apply()
            assert (content(theirs), server.version) == (1, 1)
            await pushing
            second = await anext(updates)
            assert (second.version, second.info) == (2, {"loss": 0.5})
            with pytest.raises(RuntimeError, match="server 's' has open updates"):
                await server.updates().__aenter__()
            third = asyncio.create_task(anext(updates))
            await asyncio.sleep(0)
            with pytest.raises(RuntimeError, match="version 2 was not applied in its turn"):
                second.apply()
            fill(mine, 3)
            await publisher.push()
            (await third).apply()
            assert (content(theirs), server.version) == (3, 3)


@pytest.mark.parametrize("retain", [True, False])
async def test_a_version_that_was_complete_before_its_turn_also_waits(retain: bool) -> None:
    async with loopback_world(1) as comms:
        mine, theirs = state(), state()
        server = Server(theirs, store=comms[0])
        made = publishers(comms, [mine], retain=retain)
        async with asyncio.timeout(LIMIT), made as (publisher,), server.updates() as updates:
            await until(lambda: publisher.servers)
            for version in range(1, 5):
                fill(mine, version)
                await publisher.push()
                await until(lambda: updates._next)  # while the version before is the last that was given
                update = await anext(updates)
                fill(mine, -1)
                pushing = asyncio.create_task(publisher.push())
                for _ in range(100):
                    await asyncio.sleep(0)
                assert not pushing.done()
                assert not updates.receiving
                pushing.cancel()
                await asyncio.wait([pushing])
                update.apply()
                assert content(theirs) == server.version == update.version == version


async def test_a_slow_reader_of_automatic_updates_gets_the_newest() -> None:
    async with loopback_world(1) as comms:
        server = Server(state(), store=comms[0])
        async with publishers(comms, [state(1)]) as (publisher,), server.updates(automatic=True) as updates:
            await until(lambda: publisher.servers)
            for _ in range(3):
                await publisher.push()
            await until(lambda: server.version == 3)
            assert (await anext(updates)).version == 3


async def test_in_place_a_version_arrives_when_the_server_is_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    async with loopback_world(1) as comms:
        mine, theirs = state(1, dtype=torch.float64), state()
        server = Server(theirs, store=comms[0], in_place=True)
        made = publishers(comms, [mine], bucket_mb=2e-5)
        async with asyncio.timeout(LIMIT), made as (publisher,), server.updates() as updates:
            await until(lambda: publisher.servers)
            pushing = asyncio.create_task(publisher.push())
            first = await anext(updates)
            with pytest.raises(RuntimeError, match=r"version 1 arrives in place: await update\.receive"):
                first.apply()
            with pytest.raises(RuntimeError, match="before the next one"):
                await anext(updates)
            assert content(theirs) == 0
            await first.receive()
            assert (content(theirs), server.version) == (1, 1)
            first.apply()
            await pushing
            fill(mine, 2)
            gate = Gate(monkeypatch, 2)
            pushing = asyncio.create_task(publisher.push())
            second = await anext(updates)
            receiving = asyncio.ensure_future(second.receive())
            await gate.blocked(1)
            pushing.cancel()
            with pytest.raises(PushAbandonedError, match="trainer 0 cancelled it"):
                await receiving
            assert len({float(tensor.mean()) for tensor in theirs.values()}) > 1  # as receive() warns
            assert server.version == 1
            gate.open.set()
            pushing = asyncio.create_task(publisher.push())
            await (await anext(updates)).receive()
            await pushing
            assert content(theirs) == server.version == 2


async def test_in_place_the_iteration_goes_on_while_a_version_arrives() -> None:
    async with loopback_world(1) as comms:
        mine, theirs = state(1), state()
        server = Server(theirs, store=comms[0], in_place=True)
        async with asyncio.timeout(LIMIT), publishers(comms, [mine]) as (publisher,), server.updates() as updates:
            await until(lambda: publisher.servers)
            pushing = asyncio.create_task(publisher.push())
            first = await anext(updates)
            receiving = asyncio.ensure_future(first.receive())
            await asyncio.sleep(0)
            receiving.cancel()
            taking = asyncio.ensure_future(anext(updates))
            await pushing
            await first.receive()
            first.apply()
            assert content(theirs) == server.version == 1
            fill(mine, 2)
            pushing = asyncio.create_task(publisher.push())
            await (await taking).receive()
            await pushing
            assert content(theirs) == server.version == 2


async def test_in_place_no_version_arrives_after_the_updates_were_left() -> None:
    async with loopback_world(1) as comms:
        server = Server(state(), store=comms[0], in_place=True, label="s")
        async with asyncio.timeout(LIMIT), publishers(comms, [state(1)]) as (publisher,):
            async with server.updates() as updates:
                await until(lambda: publisher.servers)
                pushing = asyncio.create_task(publisher.push())
                update = await anext(updates)
            with pytest.raises(ClosedError, match="the updates were left"):
                await update.receive()
            assert set((await pushing).lost) == {"s"}


async def test_in_place_and_automatic() -> None:
    async with loopback_world(1) as comms:
        model = nn.Linear(2, 2)
        address = model.weight.data_ptr()
        served = Served(comms[0], model, in_place=True)
        async with publishers(comms, [nn.Linear(2, 2)], servers=1) as (publisher,):
            await publisher.push()
            await served.reached(1)
        assert model.weight.data_ptr() == address


async def test_updates_end_with_the_publisher_and_may_be_opened_again() -> None:
    async with loopback_world(1) as comms:
        server = Server(state(), store=comms[0], timeout=10)
        for value in (1, 2):
            updates = server.updates(automatic=True)
            joining = asyncio.ensure_future(updates.__aenter__())  # the second waits for a new publisher
            async with publishers(comms, [state(value)], servers=1) as (publisher,):
                await publisher.push()
                await joining
                assert (await anext(updates)).version == 1
            with pytest.raises(StopAsyncIteration):
                await anext(updates)
            await updates.__aexit__(None, None, None)
            with pytest.raises(RuntimeError, match="entered before"):
                await updates.__aenter__()
        with pytest.raises(RuntimeError, match="not open"):
            await anext(server.updates())


async def test_a_version_that_was_kept_is_not_applied_once_other_updates_are_open() -> None:
    async with loopback_world(1) as comms:
        mine, theirs = state(1), state()
        server = Server(theirs, store=comms[0], timeout=10)
        async with asyncio.timeout(LIMIT), publishers(comms, [mine], servers=0) as (publisher,):
            await publisher.push()
            async with server.updates() as updates:
                kept = await anext(updates)
            async with server.updates() as updates:
                (await anext(updates)).apply()
                fill(mine, 2)
                pushing = asyncio.create_task(publisher.push())
                (await anext(updates)).apply()
                await pushing
                with pytest.raises(RuntimeError, match="version 1 was not applied in its turn"):
                    kept.apply()
            assert content(theirs) == server.version == 2


async def test_a_version_is_applied_after_its_updates_were_left() -> None:
    async with loopback_world(1) as comms:
        theirs = state()
        server = Server(theirs, store=comms[0], timeout=10)
        async with asyncio.timeout(LIMIT), publishers(comms, [state(1)], servers=0) as (publisher,):
            await publisher.push()
            async with server.updates() as updates:
                kept = await anext(updates)
            kept.apply()
            assert content(theirs) == server.version == 1


async def test_a_server_that_has_left_joins_the_same_publisher_again() -> None:
    async with loopback_world(1) as comms:
        mine, theirs = state(1), state()
        server = Server(theirs, store=comms[0], timeout=10)
        async with asyncio.timeout(LIMIT), publishers(comms, [mine], servers=0) as (publisher,):
            await publisher.push()
            for version in (1, 2, 3):
                async with server.updates() as updates:
                    (await anext(updates)).apply()
                    assert content(theirs) == server.version == version
                    fill(mine, version + 1)
                    await publisher.push()  # arrives, and is not taken


async def test_a_server_that_counted_as_lost_joins_again() -> None:
    async with loopback_world(1) as comms:
        mine, theirs = state(1), state()
        server = Server(theirs, store=comms[0], label="s")
        async with asyncio.timeout(LIMIT), publishers(comms, [mine], timeout=0.3) as (publisher,):
            async with server.updates() as updates:
                await until(lambda: publisher.servers)
                await publisher.push()
                held = await anext(updates)
                fill(mine, 2)
                assert (await publisher.push()).lost == {"s": "no answer within 0.3 s"}
                held.apply()
                assert content(theirs) == server.version == 1
                with pytest.raises(AbortedError, match="no answer within"):
                    await anext(updates)
            async with server.updates() as updates:
                (await anext(updates)).apply()
                assert content(theirs) == server.version == 2
                fill(mine, 3)
                assert (await publisher.push()).servers == ("s",)
                (await anext(updates)).apply()
                assert content(theirs) == server.version == 3


@pytest.mark.parametrize("fails", [False, True])
async def test_a_server_waits_for_the_publisher_after_the_one_that_has_ended(fails: bool) -> None:
    store = MemoryStore()
    async with loopback_world(1) as comms:
        server = Server(state(), store=store, timeout=10)

        async def follow() -> list[int]:
            versions = []
            with suppress(AbortedError):
                async with server.updates() as updates:
                    async for update in updates:
                        update.apply()
                        versions.append(update.version)
            return versions

        for count in (1, 2, 3):
            following = asyncio.ensure_future(follow())
            for _ in range(100):
                await asyncio.sleep(0)
            with suppress(ZeroDivisionError):
                async with asyncio.timeout(LIMIT), Publisher(comms[0], state(), servers=1, store=store) as publisher:
                    for _ in range(count):
                        await publisher.push()
                    while server.version < count:
                        await asyncio.sleep(0)
                    if fails:
                        raise ZeroDivisionError
            assert await following == [*range(1, count + 1)]
        for number in (1, 2, 3):
            assert await store.add(f"asynccomm/run/weights/weights/{number}/servers", 0) == 1


@pytest.mark.parametrize("stage", ["not seen", "not welcomed"])
async def test_a_server_that_meets_a_publisher_at_its_end_waits_for_the_next_one(
    stage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(meeting_module, "LOOK_SECONDS", 0.01)
    here = asyncio.Event()
    async with loopback_world(1) as comms:
        with monkeypatch.context() as patched:
            if stage == "not seen":
                enter = Meeting.enter

                async def enter_unseen(meeting: Meeting) -> int:
                    here.set()
                    return 1 + await enter(meeting)  # another server has the number before, and does not come

                patched.setattr(Meeting, "enter", enter_unseen)
            else:
                say = Conversation.say

                def say_no_welcome(talk: Conversation, message: Any) -> None:
                    if isinstance(message, TrainerLayouts):
                        here.set()
                    else:
                        say(talk, message)

                patched.setattr(Conversation, "say", say_no_welcome)
            async with Publisher(comms[0], state(1), timeout=10):
                served = Served(comms[0], state())
                await asyncio.wait_for(here.wait(), LIMIT)
        async with publishers(comms, [state(2)], servers=1) as (publisher,):
            await publisher.push()
            await served.reached(1)
        assert served.error is None
        assert content(served.tensors) == 2


async def test_the_updates_of_a_server_that_is_not_admitted_yet_end_with_the_publisher(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    here = asyncio.Event()
    hear = Conversation.hear

    async def hear_no_offer(talk: Conversation, kind: Any, job: int | None = None) -> Any:
        if kind is LayoutOffer:
            await talk.wait_for(kind)
            here.set()
            await asyncio.Event().wait()
        return await hear(talk, kind, job)

    monkeypatch.setattr(Conversation, "hear", hear_no_offer)
    async with loopback_world(1) as comms:
        async with Publisher(comms[0], state(1), timeout=10):
            served = Served(comms[0], state())
            await asyncio.wait_for(here.wait(), LIMIT)
        await served.end()
        assert served.error is None
        assert served.versions == []


async def test_the_keys_of_a_lost_publisher_do_not_hold_a_server_up(monkeypatch: pytest.MonkeyPatch) -> None:
    async with loopback_world(1) as comms:
        with monkeypatch.context() as patched:
            patched.setattr(Meeting, "close", lambda _: asyncio.sleep(0))
            async with publishers(comms, [state(1)]):
                pass
        served = Served(comms[0], state())  # finds a publisher that is no longer there
        await until(lambda: served.updates._site.occupied)
        async with publishers(comms, [state(1)], servers=1) as (publisher,):
            await publisher.push()
            await served.reached(1)


@pytest.mark.parametrize(("lost", "words"), [(0, "publisher 'p'"), (1, "trainer 1 of publisher 'p'")])
async def test_a_trainer_that_does_not_answer_is_named(lost: int, words: str) -> None:
    store = MemoryStore()
    meeting = await Meeting.open(store, "p", "loopback", torch.device("cpu"), 10, None)
    meeting = meeting.of(await meeting.register())
    await meeting.accept()
    layouts = [collect({name: torch.zeros(1)}, CommInfo("t", 0, 1, torch.device("cpu"))).layout for name in "ab"]

    async def welcome() -> None:
        talk = Conversation(await meeting.pair(0, 1, TRAINER), SERVER, "server 1")
        talk.say(TrainerLayouts(layouts, 1000))
        await talk.hear(LayoutOffer)
        with pytest.raises(FinishedError):
            await talk.hear(Connected)
        await talk.aclose()

    welcoming = asyncio.ensure_future(welcome()) if lost else None
    server = Server({name: torch.zeros(1) for name in "ab"}, name="p", store=store, timeout=0.5)
    async with asyncio.timeout(LIMIT):
        with pytest.raises(RendezvousError, match=rf"^{words} did not answer within 0\.5 s; it may be lost$") as caught:
            await server.updates().__aenter__()
        assert isinstance(caught.value.__cause__, RendezvousError)
        if welcoming is not None:
            await welcoming
    await meeting.aclose()


@pytest.mark.parametrize("stalls", [False, True])
async def test_a_store_that_does_not_tell_whether_a_publisher_closed_hides_nothing(
    stalls: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(meeting_module, "LOOK_SECONDS", 0.01)
    monkeypatch.setattr(meeting_module, "CLOSE_SECONDS", 0.01)
    store = MemoryStore()
    meeting = await Meeting.open(store, "weights", "loopback", torch.device("cpu"), 10, None)
    await meeting.of(await meeting.register()).accept()
    get, looks = MemoryStore.get, 0

    async def get_once(store: MemoryStore, key: str, timeout: float | None = None) -> bytes:
        nonlocal looks
        looks += key.endswith("1/open")
        if key.endswith("1/open") and looks > 1:
            if stalls:
                await asyncio.sleep(0.02)
                raise StoreTimeoutError("the store did not answer in time")
            raise StoreError("the connection was lost")
        return await get(store, key, timeout)

    monkeypatch.setattr(MemoryStore, "get", get_once)
    with pytest.raises(RendezvousError, match=r"did not answer within 0\.3 s; it may be lost"):
        await Server(state(), store=store, timeout=0.3).updates().__aenter__()
    assert looks > 2


async def test_a_lost_store_ends_the_wait_for_a_publisher(monkeypatch: pytest.MonkeyPatch) -> None:
    store = MemoryStore()
    meeting = await Meeting.open(store, "weights", "loopback", torch.device("cpu"), 10, None)
    await meeting.of(await meeting.register()).accept()
    finds = iter([await meeting.find(), StoreError("the connection was lost")])

    async def find_once(*_: object) -> Meeting:
        match next(finds):
            case Meeting() as found:
                return found
            case error:
                raise error

    monkeypatch.setattr(Meeting, "find", find_once)
    async with asyncio.timeout(LIMIT):
        with pytest.raises(StoreError, match="the connection was lost"):
            await Server(state(), store=store).updates().__aenter__()


async def a_misfit() -> tuple[Meeting, asyncio.Task[Updates], Conversation]:
    """A publisher's place, a server that opens there with weights that do not fit, and the first trainer's side."""
    store = MemoryStore()
    meeting = await Meeting.open(store, "weights", "loopback", torch.device("cpu"), 10, None)
    meeting = meeting.of(await meeting.register())
    await meeting.accept()
    layout = collect({"x": torch.zeros(1)}, CommInfo("t", 0, 1, torch.device("cpu"))).layout
    opening = asyncio.ensure_future(Server({"x": torch.zeros(2)}, store=store).updates().__aenter__())
    talk = Conversation(await meeting.pair(0, 1, TRAINER), SERVER, "server 1")
    talk.say(TrainerLayouts([layout], 1000))
    return meeting, opening, talk


@pytest.mark.parametrize("ends", ["cancelled", "closes"])
async def test_weights_that_do_not_fit_are_told_also_where_the_wait_for_the_trainer_is_cut_off(
    ends: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(meeting_module, "LOOK_SECONDS", 0.01)
    monkeypatch.setattr(updates_module, "REFUSAL_SECONDS", LIMIT)
    meeting, opening, talk = await a_misfit()
    waits = asyncio.Event()
    hear = Conversation.hear
    unread: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: unread.append(context))

    async def hear_begin(talk: Conversation, kind: Any, job: int | None = None) -> Any:
        if kind is Begin:
            waits.set()
        return await hear(talk, kind, job)

    monkeypatch.setattr(Conversation, "hear", hear_begin)
    async with asyncio.timeout(LIMIT):
        await waits.wait()
        if ends == "closes":
            await meeting.close()
            with pytest.raises(LayoutError, match="the weights of server"):
                await opening
        else:
            opening.cancel()
            with pytest.raises(asyncio.CancelledError):
                await opening
        with pytest.raises(AbortedError, match="LayoutError"):
            await talk.hear(Connected)
    await talk.aclose()
    del opening
    gc.collect()
    assert unread == []


async def test_weights_that_do_not_fit_are_told_where_the_publisher_closes_as_the_server_leaves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    closes, leaves, go, abort = asyncio.Event(), asyncio.Event(), asyncio.Event(), Conversation.abort

    async def abort_late(talk: Conversation, reason: str) -> None:
        leaves.set()
        await go.wait()
        await abort(talk, reason)

    monkeypatch.setattr(Meeting, "passed", lambda _: closes.wait())
    _, opening, talk = await a_misfit()
    async with asyncio.timeout(LIMIT):
        await talk.hear(LayoutOffer)
        monkeypatch.setattr(Conversation, "abort", abort_late)
        talk.comm.abort("they do not fit")
        await leaves.wait()
        closes.set()
        for _ in range(10):
            await asyncio.sleep(0)
        go.set()
        with pytest.raises(LayoutError, match="the weights of server"):
            await opening
        await abort(talk, "the end")


async def test_a_refusal_of_a_trainer_is_told_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    async def refuse(*_: object) -> None:
        raise RendezvousError("backend differs")

    monkeypatch.setattr(Meeting, "pair", refuse)
    store = MemoryStore()
    meeting = await Meeting.open(store, "weights", "loopback", torch.device("cpu"), 10, None)
    await meeting.of(await meeting.register()).accept()
    with pytest.raises(RendezvousError, match="backend differs"):
        await Server(state(), store=store).updates().__aenter__()
    await meeting.aclose()


async def test_a_server_leaves_while_a_version_arrives(monkeypatch: pytest.MonkeyPatch) -> None:
    async with loopback_world(1) as comms:
        mine = state(1, dtype=torch.float64)
        staying, leaving = Served(comms[0], state()), Served(comms[0], state(), label="leaving")
        async with publishers(comms, [mine], servers=2, bucket_mb=2e-5) as (publisher,):
            gate = Gate(monkeypatch, 1)
            pushing = asyncio.create_task(publisher.push())
            await gate.blocked(1)
            await leaving.leave()
            gate.open.set()
            result = await pushing
            assert set(result.lost) == {"leaving"}
            await staying.reached(1)
            assert content(staying.tensors) == 1
            assert content(leaving.tensors) == 0
