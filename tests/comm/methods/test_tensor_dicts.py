"""Dicts of tensors between ranks."""

import asyncio
import math
import threading
from collections.abc import Awaitable
from typing import Any

import pytest
import torch

from asynccomm import AbortedError, Comm, PayloadError, Work, WouldBlockError, new_comm
from asynccomm.comm.methods.base import ReceivePolicy
from asynccomm.comm.methods.tensor_dicts import GatheredDict, _DictReceiver
from asynccomm.ops import Call, Parcel, SendParcel
from asynccomm.ops.validation import CommInfo
from asynccomm.serialization.tensor_dicts import ReceiverSchemaCache, SenderSchemaCache, describe
from asynccomm.testing.local import loopback_world
from tests.waiting import until


class Point:
    def __init__(self, x: int) -> None:
        self.x = x


def sample() -> dict[Any, Any]:
    return {
        "z": torch.arange(6.0).view(2, 3),
        "a": torch.arange(6).view(2, 3).t(),
        "empty": torch.empty(0, 4),
        "step": 3,
        7: {"half": torch.ones(2, dtype=torch.bfloat16), "name": "x", "deep": [1, (torch.tensor(True), None)]},
        "none": None,
    }


def check(got: Any) -> None:
    assert list(got) == ["z", "a", "empty", "step", 7, "none"]
    assert got["z"].equal(torch.arange(6.0).view(2, 3))
    assert got["a"].equal(torch.tensor([[0, 3], [1, 4], [2, 5]]))
    assert got["empty"].shape == (0, 4)
    assert (got["step"], got["none"], got[7]["name"]) == (3, None, "x")
    assert got[7]["half"].dtype == torch.bfloat16
    assert got[7]["half"].tolist() == [1, 1]
    assert list(got[7]) == ["half", "name", "deep"]
    assert got[7]["deep"][1][0].item() is True


class Heads:
    """Sizes of the heads of what a comm sends."""

    def __init__(self, comm: Comm, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sizes: list[int] = []
        submit = comm._submitter.submit

        def watched(call: Any, *rest: Any) -> Any:
            self.sizes += [len(parcel.head) for parcel in call.parcels]
            return submit(call, *rest)

        monkeypatch.setattr(comm._submitter, "submit", watched)


async def test_broadcast() -> None:
    async with loopback_world(3) as comms:
        mine = sample()
        works = [comm.broadcast_tensor_dict(mine if comm.rank == 1 else None, 1) for comm in comms]
        assert await works[1] is mine
        for work in (works[0], works[2]):
            got = await work
            check(got)
            assert await work is got
            assert got["z"].data_ptr() != mine["z"].data_ptr()


async def test_send_and_receive() -> None:
    async with loopback_world(2) as (a, b):
        sent = a.send_tensor_dict(sample(), 1, 5)
        work = b.recv_tensor_dict(0, 5)
        assert isinstance(work, Work)
        check(await work)
        assert work.source == 0
        assert await sent is None
        posted = a.recv_tensor_dict(0)
        a.send_tensor_dict({}, 0)
        assert await posted == {}


async def test_to_oneself() -> None:
    async with loopback_world(1) as (comm,):
        for step in range(3):
            comm.send_tensor_dict({"t": torch.ones(2), "s": step}, 0)
            assert (await comm.recv_tensor_dict(0))["s"] == step


def test_a_tensor_from_a_device_arrives_on_the_device() -> None:
    sender, receiver = CommInfo("x", 0, 2, torch.device("cuda")), CommInfo("x", 1, 2, torch.device("meta"))
    described = describe({"c": torch.ones(2), "g": torch.ones(3).as_subclass(OnGPU)}, sender.device)
    inbox = _DictReceiver("recv_tensor_dict", receiver, 0, ReceivePolicy(True, 1000), ReceiverSchemaCache(), None)
    with SenderSchemaCache().heading((1, 0), described.schema) as heading, torch.inference_mode():
        places = inbox(0, heading, {0: 20})
    assert [(t.device.type, t.shape) for t in places] == [("cpu", (2,)), ("meta", (3,))]
    assert not places[0].is_inference()
    assert inbox.finish(None)["c"] is places[0]


async def test_tensors_go_straight_to_where_they_stay() -> None:
    async with loopback_world(2) as (a, b):
        work: Any = b.recv_tensor_dict(0)
        inbox = work._finish.__self__
        a.send_tensor_dict({"t": torch.ones(4)}, 1)
        assert inbox._tensors[0].tolist() == [1, 1, 1, 1]
        assert (await work)["t"].data_ptr() == inbox._tensors[0].data_ptr()


async def test_any_source() -> None:
    async with loopback_world(3) as comms:
        works: list[Any] = [comms[0].recv_tensor_dict() for _ in range(4)]
        for i in range(2):
            for comm in comms[1:]:
                comm.send_tensor_dict({"r": comm.rank, "t": torch.full((comm.rank,), i)}, 0)
        for work in works:
            got = await work
            assert got["r"] == work.source
            assert got["t"].shape == (work.source,)


async def test_a_repeated_structure_is_not_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async with loopback_world(2) as (a, b):
        heads = Heads(a, monkeypatch)
        for step in range(4):
            a.send_tensor_dict({f"layer{i}": torch.full((3,), step) for i in range(10)} | {"step": step}, 1)
            got = await b.recv_tensor_dict(0)
            assert (got["step"], got["layer9"].tolist()) == (step, [step] * 3)
        assert heads.sizes[0] > 200
        assert set(heads.sizes[1:]) == {heads.sizes[1]}
        assert heads.sizes[1] < 60
        a.send_tensor_dict({f"layer{i}": torch.full((3,), 0) for i in range(10)} | {"step": 9}, 1, 1)
        assert heads.sizes[-1] > 200, "a tag is a channel of its own"
        await b.recv_tensor_dict(0, 1)
        for step in range(2):
            a.broadcast_tensor_dict({"t": torch.ones(5), "s": step}, 0)
            assert (await b.broadcast_tensor_dict(None, 0))["s"] == step
        assert heads.sizes[-1] < 60


async def test_comms_do_not_share_their_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    async with loopback_world(2, name="one") as (a, b), loopback_world(2, name="two") as (c, d):
        for sender, receiver in ((a, b), (c, d)):
            heads = Heads(sender, monkeypatch)
            sender.send_tensor_dict({"t": torch.ones(5)}, 1)
            assert heads.sizes[0] > 40
            assert (await receiver.recv_tensor_dict(0))["t"].tolist() == [1] * 5


async def test_both_ends_agree_also_after_a_refusal() -> None:
    async with loopback_world(2) as (a, b):
        d = {"t": torch.ones(100), "s": 1}
        a.send_tensor_dict(d, 1)
        with pytest.raises(PayloadError, match=r"max_bytes is 10$"):
            await b.recv_tensor_dict(0, max_bytes=10)
        a.send_tensor_dict(d, 1)
        assert (await b.recv_tensor_dict(0))["t"].sum() == 100
        e = {"u": torch.ones(3)}
        a.send_tensor_dict(e, 1)
        with pytest.raises(
            PayloadError,
            match=r"recv_object\(\) of rank 1 received the payload that rank 0 sent by send_tensor_dict\(\)",
        ):
            await b.recv_object(0)
        a.send_tensor_dict(e, 1)
        assert (await b.recv_tensor_dict(0))["u"].tolist() == [1, 1, 1]
        f = {"v": torch.ones(3)}
        a.send_tensor_dict(f, 1)
        with pytest.raises(PayloadError, match="recv_object_list"):
            await b.recv_object_list([], None)
        a.send_tensor_dict(f, 1)
        assert list(await b.recv_tensor_dict(0)) == ["v"]


async def test_the_structure_of_a_failed_call_is_not_cached() -> None:
    async with loopback_world(2) as (a, b):
        d = {"t": torch.ones(3)}
        with pytest.raises(TypeError, match="hints"):
            a.send_tensor_dict(d, 1, hints=[])  # type: ignore[arg-type]
        assert a.statistics().submitted == 0
        a.send_tensor_dict(d, 1)
        assert list(await b.recv_tensor_dict(0)) == ["t"]


async def test_many_forms_from_many_threads() -> None:
    async with loopback_world(2, max_ops=10_000) as (a, b):

        def sends(first: int) -> None:
            for i in range(100):
                a.send_tensor_dict({"n": (first + i) % 23, "t": torch.ones((first + i) % 23)}, 1)

        def send_all() -> None:
            threads = [threading.Thread(target=sends, args=(k * 7,)) for k in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()

        await asyncio.to_thread(send_all)
        for _ in range(400):
            got = await b.recv_tensor_dict(0)
            assert got["t"].shape == (got["n"],)


async def test_values_need_trust() -> None:
    async with loopback_world(2) as (a, b):
        d = {"t": torch.ones(1), "p": Point(3)}
        a.send_tensor_dict(d, 1, weights_only=False)
        with pytest.raises(PayloadError, match=r"from rank 0 is refused.*weights_only=False"):
            await b.recv_tensor_dict(0)
        a.send_tensor_dict(d, 1, weights_only=False)
        assert (await b.recv_tensor_dict(0, weights_only=False))["p"].x == 3
        a.broadcast_tensor_dict(d, 0, weights_only=False)
        with pytest.raises(PayloadError, match="weights_only=False"):
            await b.broadcast_tensor_dict(None, 0)
        a.broadcast_tensor_dict(d, 0, weights_only=False)
        assert (await b.broadcast_tensor_dict(None, 0, weights_only=False))["p"].x == 3
        for send in (lambda: a.send_tensor_dict(d, 1), lambda: a.broadcast_tensor_dict(d, 0)):
            with pytest.raises(TypeError, match=r"tensor_dict cannot be sent, because receivers refuse .*Point"):
                send()


async def test_other_kinds_are_refused() -> None:
    async with loopback_world(2) as (a, b):
        a.send_object({"a": 1}, 1)
        with pytest.raises(
            PayloadError,
            match=r"recv_tensor_dict\(\) of rank 1 received the payload that rank 0 sent by send_object\(\)",
        ):
            await b.recv_tensor_dict(0)


async def test_large_values() -> None:
    async with loopback_world(2) as (a, b):
        text = "x" * (1 << 20)
        a.send_tensor_dict({"t": torch.ones(3), "text": text, "u": torch.zeros(2)}, 1)
        got = await b.recv_tensor_dict(0)
        assert got["text"] == text
        assert (got["t"].tolist(), got["u"].tolist()) == ([1, 1, 1], [0, 0])


# -- shares, and the rest from the group ------------------------------------------------------------------------------


async def test_shares_are_gathered() -> None:
    """Ranks 0 and 1 send to 2 and 3; each pair is a group of its own."""
    async with (
        loopback_world(4, name="all") as world,
        loopback_world(2, name="senders") as senders,
        loopback_world(2, name="receivers") as receivers,
    ):
        d = {
            "even": torch.arange(12.0).view(3, 4),
            "odd": torch.arange(5),
            "own": torch.arange(4),
            "e": torch.empty(0, 2),
            "n": {"x": torch.arange(8).view(2, 4).t()},
            "step": 1,
        }
        sizes = []
        for rank, comm in enumerate(world[:2]):
            mine = {**d, "own": d["own"] + rank}
            work = comm.send_tensor_dict(
                mine, rank + 2, all_gather_group=senders[rank], all_gather_tensors={"own": False, "absent": True}
            )
            sizes.append(work)

        async def receive(rank: int) -> dict[Any, Any]:
            got = world[rank + 2].recv_tensor_dict(rank, all_gather_group=receivers[rank])
            assert not isinstance(got, Work)
            first = await got
            assert await got is first
            return first

        for rank, got in enumerate(await asyncio.gather(receive(0), receive(1))):
            assert list(got) == list(d)
            assert got["even"].equal(d["even"])
            assert got["odd"].equal(d["odd"])
            assert got["own"].equal(d["own"] + rank)
            assert got["e"].shape == (0, 2)
            assert got["n"]["x"].equal(d["n"]["x"])  # type: ignore[index]
            assert receivers[rank].statistics().submitted == 3, "one of what has come, and for each that was divided"


async def test_only_a_share_is_sent() -> None:
    async with loopback_world(2) as (a, b), loopback_world(2, name="g") as group:
        work = b.recv_object(0)
        a.send_tensor_dict({"t": torch.arange(1000.0)}, 1, all_gather_group=group[1])
        with pytest.raises(PayloadError):
            await work
        receive: Any = b.recv_tensor_dict(0, all_gather_group=group[1])
        a.send_tensor_dict({"t": torch.arange(1000.0)}, 1, all_gather_group=group[1])
        (share,) = receive._receiver._tensors
        assert share[500:].tolist() == list(range(500, 1000)), "in its place in the whole"
        assert receive._receiver.shares[0][1].data_ptr() == share[500:].data_ptr()


async def test_gathers_wait_for_the_await_and_go_on_when_it_is_cancelled() -> None:
    async with loopback_world(2) as (a, b), loopback_world(2, name="g") as group:
        first, second = (b.recv_tensor_dict(0, tag, all_gather_group=group[tag]) for tag in range(2))
        a.send_tensor_dict({"t": torch.arange(4)}, 1, 0, all_gather_group=group[0])
        await asyncio.sleep(0)
        assert group[0].statistics().submitted == 0

        async def wait() -> Any:
            return await first

        task = asyncio.ensure_future(wait())
        await until(lambda: group[0].statistics().submitted == 1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        a.send_tensor_dict({"t": torch.arange(4)}, 1, 1, all_gather_group=group[1])
        for got in (await second, await first, await first):
            assert got["t"].tolist() == [0, 1, 2, 3]
        assert group[0].statistics().submitted == group[1].statistics().submitted == 2
        assert "all_gathers" in repr(first)


async def test_a_group_of_one() -> None:
    async with loopback_world(2) as (a, b), loopback_world(1, name="g") as (alone,):
        a.send_tensor_dict({"t": torch.ones(4)}, 1, all_gather_group=alone)
        got = await b.recv_tensor_dict(0, all_gather_group=alone)
        assert got["t"].tolist() == [1] * 4


async def outcomes(*receives: Awaitable[dict[Any, Any]]) -> list[str]:
    """Of receives that belong together: what the dicts hold, or why there is none."""

    async def one(receive: Awaitable[dict[Any, Any]]) -> str:
        try:
            return repr({key: getattr(value, "tolist", lambda v=value: v)() for key, value in (await receive).items()})
        except PayloadError as exc:
            return str(exc)

    return list(await asyncio.gather(*map(one, receives)))


async def test_groups_must_fit() -> None:
    async with loopback_world(2) as (a, b), loopback_world(2, name="g") as two, loopback_world(4, name="h") as four:
        d = {"t": torch.arange(4)}
        a.send_tensor_dict(d, 1, all_gather_group=two[1])
        with pytest.raises(PayloadError, match="sent share 1 of 2 of a tensor, but no all_gather_group was given here"):
            await b.recv_tensor_dict(0)
        for mine, sent, text in (
            (four, (1, 1, 1, 1), "share 1 of 2 of a tensor, but this is rank 0 of 4 in all_gather_group"),
            (two, (1, 1), "share 1 of 2 of a tensor, but this is rank 0 of 2 in all_gather_group"),
        ):
            for part, tag in zip(sent, range(4), strict=False):
                a.send_tensor_dict(d, 1, tag, all_gather_group=two[part])
            receives = [b.recv_tensor_dict(0, comm.rank, all_gather_group=comm) for comm in mine]
            first, *_, last = await outcomes(*receives)
            assert first == f"rank 0 sent {text}"
            assert "sent share 1 of 2" in last
        receives = [b.recv_tensor_dict(0, comm.rank, all_gather_group=comm) for comm in two]
        for tag in range(2):
            a.send_tensor_dict(d, 1, tag, all_gather_group=two[tag])
        assert await outcomes(*receives) == ["{'t': [0, 1, 2, 3]}"] * 2


async def test_an_unreadable_head_fails_the_dict_on_the_whole_group() -> None:
    async with loopback_world(2) as (a, b), loopback_world(2, name="g") as group:
        for head in (b"", b"\1\3\7", b"\1\3garbage garbage", b"\xff" * 40):
            receives = [b.recv_tensor_dict(0, comm.rank, all_gather_group=comm, timeout=5) for comm in group]
            a.send_tensor_dict({"t": torch.arange(4)}, 1, 0, all_gather_group=group[0])
            a._submit(Call(SendParcel("x", 1, 1), (), (), None, parcels=(Parcel(head, ()),)), None, None)
            told, own = await outcomes(*receives)
            assert own.startswith("what rank 0 sent cannot be read")
            assert told == f"rank 1 of comm 'g' could not receive its share of the dict: {own}"
        assert [comm.statistics().submitted for comm in group] == [4, 4]


async def test_a_rank_that_refuses_a_share_does_not_wait_for_the_group() -> None:
    async with loopback_world(2) as (a, b), loopback_world(2, name="g") as group:
        a.send_tensor_dict({"t": torch.arange(4)}, 1, all_gather_group=group[0])
        with pytest.raises(PayloadError, match="max_bytes is 1"):
            await b.recv_tensor_dict(0, max_bytes=1, all_gather_group=group[0])
        a.send_tensor_dict({"t": torch.arange(4)}, 1, all_gather_group=group[1])
        with pytest.raises(PayloadError, match=r"rank 0 of comm 'g' could not receive its share .* max_bytes is 1"):
            await b.recv_tensor_dict(0, all_gather_group=group[1])


async def test_a_long_reason_is_cut() -> None:
    def refuse(meta: object) -> None:
        raise ValueError("ü" * 999)

    async with loopback_world(2) as (a, b), loopback_world(2, name="g") as group:
        receives: list[Any] = [b.recv_tensor_dict(0, comm.rank, all_gather_group=comm) for comm in group]
        a.send_tensor_dict({"t": torch.arange(4)}, 1, 0, all_gather_group=group[0])
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(receives[1]._receiver, "_place", refuse)
            a.send_tensor_dict({"t": torch.arange(4)}, 1, 1, all_gather_group=group[1])
        told, own = await outcomes(*receives)
        assert own.count("ü") == 999
        assert 50 < told.count("ü") < 200


# -- mistakes ---------------------------------------------------------------------------------------------------------


async def test_arguments_are_checked_at_the_call() -> None:
    async with loopback_world(2) as (a, _):
        for wrong in (None, [1], [("a", 1)], torch.ones(1)):
            with pytest.raises(TypeError, match="tensor_dict must be a dict, got"):
                a.broadcast_tensor_dict(wrong, 0)  # type: ignore[arg-type]
            with pytest.raises(TypeError, match="tensor_dict must be a dict, got"):
                a.send_tensor_dict(wrong, 1)  # type: ignore[arg-type]
        send: Any = a.send_tensor_dict
        recv: Any = a.recv_tensor_dict
        cast: Any = a.broadcast_tensor_dict
        for error, text, call in (
            (TypeError, "tensor_dict cannot be sent", lambda: send({"f": lambda: 0}, 1)),
            (TypeError, "keys in tensor_dict", lambda: send({Point: torch.ones(1)}, 1)),
            (ValueError, "dst must be in", lambda: send({}, 2)),
            (ValueError, "tag must be in", lambda: send({}, 1, -1)),
            (TypeError, "all_gather_group must be a Comm, got 3", lambda: send({}, 1, all_gather_group=3)),
            (
                TypeError,
                "all_gather_tensors must be a mapping",
                lambda: send({}, 1, all_gather_group=a, all_gather_tensors=["a"]),
            ),
            (
                ValueError,
                "divide evenly among 2 ranks",
                lambda: send({"a": torch.ones(3)}, 1, all_gather_group=a, all_gather_tensors={"a": True}),
            ),
            (ValueError, "src must be in", lambda: recv(2)),
            (ValueError, "tag must be in", lambda: recv(0, -1)),
            (TypeError, "all_gather_group must be a Comm", lambda: recv(0, all_gather_group="g")),
            (TypeError, "weights_only", lambda: recv(0, weights_only=None)),
            (ValueError, "max_bytes", lambda: recv(0, max_bytes=-1)),
            (ValueError, "root must be in", lambda: cast({}, 2)),
            (TypeError, "weights_only", lambda: cast({}, 1, weights_only=1)),
        ):
            with pytest.raises(error, match=text):
                call()
        assert a.statistics().submitted == 0


async def test_a_head_that_does_not_fit_its_payload() -> None:
    async with loopback_world(2) as (a, b):
        schema = describe({"t": torch.ones(1 << 30, 1 << 30, device="meta").as_subclass(OnCPU)}, a.device).schema
        with a._sent_schemas.heading((1, 0), schema) as heading:
            parcel = Parcel(heading, (torch.ones(2),))
            a._submit(Call(SendParcel("send_tensor_dict", 1, 0), (), (), None, parcels=(parcel,)), None, None)
        with pytest.raises(PayloadError, match=f"rank 0 sent 8 bytes of tensors that have {1 << 62}"):
            await b.recv_tensor_dict(0)


class OnGPU(torch.Tensor):
    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("cuda", 1)


class OnCPU(torch.Tensor):
    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("cpu")


@pytest.mark.ranks(2)
async def test_a_thread_may_wait_for_a_gathered_dict(comm: Comm) -> None:
    if comm.rank == 0:
        await comm.send_tensor_dict({"t": torch.arange(2)}, 1)
        return
    async with new_comm(alone=True, name="one") as one:
        gathered = comm.recv_tensor_dict(0, all_gather_group=one)
        assert isinstance(gathered, GatheredDict)
        with pytest.raises(WouldBlockError, match="use `await`"):
            gathered.wait()
        received = await asyncio.to_thread(gathered.wait, 20)
        assert received["t"].tolist() == [0, 1]
        assert await gathered is received
        never = comm.recv_tensor_dict(0, 1, all_gather_group=one, timeout=math.inf)
        with pytest.raises(TimeoutError):
            await asyncio.to_thread(never.wait, 0.05)
        comm.abort("enough")
        with pytest.raises(AbortedError):
            await never
