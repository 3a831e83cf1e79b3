"""The files of ``asynccomm diagnose --dump``; a real job's are tested in test_diagnose.py."""

import torch

from asynccomm.cli.dumps import dumps_of, write_dumps
from asynccomm.comm.flight import packed
from asynccomm.observe.analysis import load_dump
from asynccomm.testing.local import loopback_world


async def test_the_comms_of_a_rank_become_one_file(tmp_path) -> None:  # type: ignore[no-untyped-def]
    async with loopback_world(1, name="one") as (one,), loopback_world(1, name="two") as (two,):
        await one.all_reduce(torch.ones(2))
        await two.barrier()
        packs = [packed(comm._submitter, [2], 1 << 20) for comm in (one, two)]
    # a process has other ranks in the jobs of comms that replaced others, and of pairs
    answers = [{rank: {"key": {"flight": pack, "number": 2}}} for rank, pack in enumerate(packs)]
    dumps = dumps_of([*answers, {3: {"x": {"flight": "!", "number": 3}}, 4: {"y": {}}}])
    assert list(dumps) == [2]
    (path,) = write_dumps(dumps, tmp_path / "new")
    dump = load_dump(path)
    assert [entry["process_group"] for entry in dump["entries"]] == [("one", "one"), ("two", "two")]
