"""Ready-made hooks of a TorchComm."""

import asyncio
import json
import pickle
from pathlib import Path

import pytest
import torch

from asynccomm import Comm
from asynccomm.compat import torchcomms
from asynccomm.compat.torchcomms import ReduceOp, functional, hooks
from tests.waiting import until

NAN = float("nan")


@pytest.mark.ranks(2)
async def test_nan_is_refused(comm: Comm) -> None:
    def program() -> None:
        main = torchcomms.new_comm(comm.backend, torch.device("cpu"), "nan")
        rank, bad, good = main.get_rank(), torch.tensor([1, NAN]), torch.tensor([1, float("inf")])
        check = hooks.NanCheckHook()
        assert not check.is_enabled()
        check.register_with_comm(main)
        assert check.is_enabled()
        text = r"NaN detected in input tensor for 'all_reduce' on comm 'nan': shape \(2,\), 1 elements"
        with pytest.raises(RuntimeError, match=text):
            main.all_reduce(bad, ReduceOp.SUM, False)
        with pytest.raises(RuntimeError, match="'all_to_all'"):
            main.all_to_all([good, good], [good, bad], False)
        with pytest.raises(RuntimeError, match="'all_reduce'"):
            main.all_reduce(torch.tensor([complex(0, NAN)]), ReduceOp.SUM, False)
        batch = main.batch_op_create()
        batch.send(bad, 1 - rank)
        batch.recv(torch.zeros(2), 1 - rank)
        with pytest.raises(RuntimeError, match="'batch_op_issue'"):
            batch.issue(False)
        filled = bad.clone()  # NaN in tensors that are only written
        main.broadcast(filled if rank else good, 0, False)
        assert filled.isnan().any() == (rank == 0)
        main.all_gather_single(torch.full((4,), NAN), good, False)
        main.all_reduce(torch.ones(1, dtype=torch.int32), ReduceOp.SUM, False)
        main.barrier(False)
        check.unregister()
        assert not check.is_enabled()
        after = hooks.NanCheckHook(check_inputs=False, check_outputs=True)
        after.register_with_comm(main)
        main.reduce(bad.clone(), 0, ReduceOp.SUM, False)
        if rank == 0:
            asyncio.run(until(lambda: bool(after._found)))
            with pytest.raises(RuntimeError, match="NaN detected in output tensor for 'reduce' on comm 'nan'"):
                main.barrier(False)
        main.barrier(False)
        functional.all_gather_single(main, bad)
        asyncio.run(until(lambda: bool(after._found)))
        with pytest.raises(RuntimeError, match="NaN detected in output tensor for 'all_gather_single' on comm 'nan'"):
            main.barrier(False)
        main.barrier(False)
        after.remove()
        main.all_reduce(bad, ReduceOp.SUM, False)
        main.finalize()

    await asyncio.to_thread(program)


@pytest.mark.ranks(2)
async def test_the_recorder_has_operations_until_they_are_done(
    comm: Comm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHCOMM_FR_DUMP_TEMP_FILE", f"{tmp_path}/trace_")

    def program() -> None:
        main = torchcomms.new_comm(comm.backend, torch.device("cpu"), "recorded")
        main.barrier(False)
        recorder = hooks.FlightRecorderHook(max_entries=3)
        assert not recorder.is_enabled()
        recorder.register_with_comm(main)
        assert (recorder.is_enabled(), recorder.size()) == (True, 1)
        recorder.reset()
        assert recorder.size() == 0
        for _ in range(4):
            main.all_reduce(torch.ones(2), ReduceOp.SUM, False)
        assert recorder.size() == 3
        work = main.recv(torch.zeros(1), 1 - main.get_rank(), True)
        (pending,) = json.loads(recorder.dump_json(include_completed=False))["entries"]
        assert "recv" in pending["profiling_name"]
        path = recorder.dump_file(main.get_rank())
        assert path.name == f"trace_{main.get_rank()}"
        assert len(pickle.loads(path.read_bytes())["entries"]) == 3
        main.barrier(False)  # until now the other rank has sent nothing
        main.send(torch.ones(1), 1 - main.get_rank(), True).wait()
        work.wait()
        asyncio.run(until(lambda: not json.loads(recorder.dump_json(include_completed=False))["entries"]))
        with pytest.raises(ValueError, match="max_entries must be a positive integer, got 0"):
            hooks.FlightRecorderHook(0)
        main.finalize()

    await asyncio.to_thread(program)
