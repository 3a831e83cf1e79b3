"""Train data-parallel on three ranks, lose one to ``kill -9``, go on with two, take a new one in, and finish.

    python examples/elastic.py
    python examples/elastic.py --kill 0 --backend gloo

The loss goes on as if nothing had happened. That takes three things, all in ``step_with_recovery`` and ``Training``:

- The global batch of a step, and the weight of each sample in it, do not depend on how many ranks there are.
- A step counts once its gradients have been summed. One that a loss has interrupted is done again, by those that are
  left.
- Whenever the ranks have changed, those that are behind get the state of one that is not: newcomers, and survivors that
  missed the end of the last step.

The process that you start does not train. It starts ``asynccomm run --elastic --restart 1``, which hosts the store
where the ranks meet and starts a newcomer in place of a lost rank; kills a rank; and prints the losses that the ranks
report. In the end it compares them with those of an ordinary loop in one process.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import itertools
import json
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F

import asynccomm
from asynccomm import Comm, GradientReducer, ReduceOp

RANKS = 3
STEPS = 150
BATCH = 96  # samples of one step, of all ranks together
KILL_AT = 40  # the step of the kill
JOIN_AFTER = 40  # steps from the kill to the step before which the newcomer must have come
LOOK_EVERY = 5  # steps from one look for newcomers to the next
PACE = 0.02  # seconds of a step: a larger model would take them by itself
NEWCOMER = "ASYNCCOMM_NEWCOMER" in os.environ  # set by `asynccomm run --restart`


class Training:
    """All that must survive: the weights, the optimizer's state, and how many steps have been done."""

    def __init__(self, join_at: int = STEPS) -> None:
        torch.manual_seed(0)
        pixels, digits = load_digits(return_X_y=True)
        self.images, self.labels = torch.from_numpy(pixels).float() / 16 - 0.5, torch.from_numpy(digits)
        self.model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.step = 0
        self.join_at = join_at  # the step that waits for a newcomer
        self.gradients: GradientReducer | None = None
        self.comm: Comm | None = None  # on which all ranks have been brought to one state

    def batch(self) -> tuple[Tensor, Tensor]:
        """The global batch of this step: it follows from the step alone, and so is the same whoever does it."""
        chosen = torch.randint(len(self.labels), (BATCH,), generator=torch.Generator().manual_seed(self.step))
        return self.images[chosen], self.labels[chosen]

    async def do_step(self, comm: Comm) -> float:
        """One step; returns its loss. If it raises, nothing has changed here, and it can be done again."""
        # any number of ranks can share a batch, also one that does not divide it
        images, labels = (tensor.tensor_split(comm.size)[comm.rank] for tensor in self.batch())
        self.optimizer.zero_grad()
        # Over the whole batch, and so the ranks' gradients are summed. With the mean of each rank's own samples, and
        # ReduceOp.AVG, a step of two ranks would weigh samples otherwise than one of three where shares are uneven.
        loss = F.cross_entropy(self.model(images), labels, reduction="sum") / BATCH
        work = comm.all_reduce(loss.detach().clone())
        loss.backward()  # type: ignore[no-untyped-call]
        assert self.gradients is not None
        await self.gradients.finish()
        total = await work
        # From here on nothing waits for anybody: the step is done here even if others never hear the end of it.
        self.optimizer.step()
        self.step += 1
        return total.item()

    async def catch_up(self, comm: Comm) -> None:
        """Bring all ranks to the state of the one that has done the most steps."""
        steps: list[Any] = await comm.all_gather_object(self.step)  # 0: a newcomer
        # Ranks may differ by one step: the sum may have reached some before the loss, and others never.
        root = steps.index(max(steps))
        if self.gradients is None:
            self.gradients = GradientReducer(self.model, comm, op=ReduceOp.SUM)
        await self.gradients.rebind(comm, root)  # with the weights of that rank
        mine = self.optimizer.state_dict(), self.step
        theirs: Any = await comm.broadcast_object(mine if comm.rank == root else None, root=root)
        state, self.step = theirs
        self.optimizer.load_state_dict(state)
        self.comm = comm

    def digest(self) -> str:
        """Of all weights, to the last bit."""
        return hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in self.model.parameters())).hexdigest()


async def step_with_recovery(comm: Comm, training: Training) -> tuple[Comm, float]:
    """One step, whoever is lost and whoever comes meanwhile. Returns the comm to go on with, and the loss."""
    while True:
        try:
            if comm is not training.comm:  # the ranks have changed
                await training.catch_up(comm)
            must_grow = comm.size < RANKS and training.step >= training.join_at
            if (must_grow or training.step % LOOK_EVERY == 0) and (names := await newcomers(comm, wait=must_grow)):
                comm = await go_on(comm, names)
                continue  # to bring them up to date
            return comm, await training.do_step(comm)
        except asynccomm.BrokenError as error:  # on all ranks, also on those that wait for another one
            report(event=f"{type(error).__name__}: {error}", step=training.step)
            comm = await go_on(comm)


async def newcomers(comm: Comm, *, wait: bool) -> list[str]:
    """Who waits to be taken in. One rank looks and tells the others: all must propose the same."""
    while True:
        names: Any = await comm.broadcast_object(await comm.newcomers() if comm.rank == 0 else None, root=0)
        if names or not wait:
            return list(names)
        await asyncio.sleep(PACE)


async def go_on(comm: Comm, names: Sequence[str] = ()) -> Comm:
    """The comm that takes the place of ``comm``, which is closed: all that are left, and the newcomers."""
    while True:
        try:
            return await (comm.reconfigure([*range(comm.size), *names]) if names else comm.shrink())
        except ValueError:
            # A rank was lost while a newcomer was being taken in: those that had not heard of the newcomer yet asked
            # for something else. All were refused, and all ask again, without it. It is found again at the next look.
            names = ()


async def train(comm: Comm, training: Training) -> None:
    """What every rank runs, from the beginning or from where it has come in."""
    members = comm.size
    while training.step < STEPS:
        comm, loss = await step_with_recovery(comm, training)
        if comm.size != members:
            report(event=f"{comm.size} ranks now", step=training.step - 1)
            members = comm.size
        report(step=training.step - 1, loss=loss)
        await asyncio.sleep(PACE)
    # Until all have come here, a rank may be lost that somebody still needs; afterwards nobody needs anybody.
    try:
        await comm.barrier()
    except asynccomm.BrokenError:
        comm = await go_on(comm)
        await training.catch_up(comm)
    report(weights=training.digest())
    await comm.aclose()


async def come_in() -> Comm:
    """The comm that takes this process in, which waits again if the ranks go on without it after all."""
    while True:
        with contextlib.suppress(asynccomm.LeftOutError):
            return await asynccomm.join_comm(name="elastic", timeout=60)


async def be_rank(backend: str, kill_at: int) -> None:
    report(pid=os.getpid())
    if NEWCOMER:
        comm = await come_in()
    else:
        comm = await asynccomm.new_comm(backend, name="elastic", timeout=60)
    await train(comm, Training(kill_at + JOIN_AFTER))


def report(**what: Any) -> None:
    """Tell the process that has started all of this."""
    name = "newcomer" if NEWCOMER else f"rank {os.environ['RANK']}"
    print(json.dumps({"name": name, **what}), flush=True)


# -- the process that watches -----------------------------------------------------------------------------------------


@dataclass
class Heard:
    """What the ranks have reported."""

    pids: dict[str, int] = field(default_factory=dict)
    losses: dict[int, float] = field(default_factory=dict)  # by step
    by: dict[str, list[int]] = field(default_factory=dict)  # the steps that each process has done, in its order
    weights: dict[str, str] = field(default_factory=dict)  # digests in the end, by process
    news: asyncio.Event = field(default_factory=asyncio.Event)

    async def listen(self, said: asyncio.StreamReader) -> None:
        """Take and show what the ranks say, until all have ended."""
        async for line in said:
            what = json.loads(line)
            name = what["name"]
            if "pid" in what:
                self.pids[name] = what["pid"]
            elif "event" in what:
                print(f"step {what['step']:3}   {name}: {what['event']}", flush=True)
            elif "weights" in what:
                self.weights[name] = what["weights"]
            else:
                self._take(name, what["step"], what["loss"])
            self.news.set()

    def _take(self, name: str, step: int, loss: float) -> None:
        self.by.setdefault(name, []).append(step)
        if step not in self.losses and step % 10 == 0:
            print(f"step {step:3}   loss {loss:.4f}   {'#' * round(20 * loss)}", flush=True)
        if self.losses.setdefault(step, loss) != loss:
            raise SystemExit(f"step {step}: {name} has the loss {loss}, another rank {self.losses[step]}")

    async def reached(self, step: int) -> None:
        """Wait until somebody has done that step."""
        while step not in self.losses:
            self.news.clear()
            await self.news.wait()


async def watch(backend: str, victim: str, kill_at: int) -> None:
    command = [sys.executable, "-m", "asynccomm", "run", "-n", str(RANKS), "--elastic", "--restart", "1", "--no-prefix"]
    script = [__file__, "--role", "rank", "--backend", backend, "--at", str(kill_at)]
    # in a process group of its own, Ctrl-C reaches it once: from here
    run = await asyncio.create_subprocess_exec(*command, *script, stdout=asyncio.subprocess.PIPE, process_group=0)
    assert run.stdout is not None
    heard = Heard()
    try:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(heard.listen(run.stdout))
            await heard.reached(kill_at)
            print(f"step {kill_at:3}   kill -9 of {victim}", flush=True)
            os.kill(heard.pids[victim], signal.SIGKILL)
        if await run.wait():
            raise SystemExit("the run has failed")
    finally:
        if run.returncode is None:
            run.terminate()
            await run.wait()
    check(heard, victim, kill_at)


def check(heard: Heard, victim: str, kill_at: int) -> None:
    """That nothing was lost, repeated or otherwise than in a run that was never interrupted."""
    if sorted(heard.losses) != list(range(STEPS)):
        raise SystemExit(f"steps are missing: {sorted(set(range(STEPS)) - heard.losses.keys())}")
    for name, steps in heard.by.items():
        if any(after <= before for before, after in itertools.pairwise(steps)):
            raise SystemExit(f"{name} has repeated a step: {steps}")
    if max(heard.by[victim]) >= STEPS - 1 or min(heard.by["newcomer"]) <= kill_at:
        raise SystemExit("the ranks did not come and go as they should")
    if len(heard.weights) != RANKS or len(set(heard.weights.values())) != 1:
        raise SystemExit(f"the weights differ in the end: {heard.weights}")
    plain = uninterrupted()
    worst = max(abs(heard.losses[step] - loss) / loss for step, loss in enumerate(plain))
    if worst > 1e-3:
        raise SystemExit(f"the losses differ from those of an uninterrupted run by up to {worst:.2e} of their value")
    print(f"{STEPS} steps, none lost, none repeated; loss {heard.losses[0]:.4f} to {heard.losses[STEPS - 1]:.4f}")
    print(f"all {RANKS} ranks have the same weights, bit by bit; {victim} was killed, one came in")
    print(f"an uninterrupted run in one process has the same losses, within {worst:.1e} of their value")


def uninterrupted() -> list[float]:
    """The same training as an ordinary loop, without ranks."""
    training = Training()
    losses = []
    for training.step in range(STEPS):
        images, labels = training.batch()
        training.optimizer.zero_grad()
        loss = F.cross_entropy(training.model(images), labels)
        loss.backward()  # type: ignore[no-untyped-call]
        training.optimizer.step()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Lose a rank and take one in, in the middle of training.")
    parser.add_argument("--backend", default="auto", help="auto, shm or gloo")
    parser.add_argument("--kill", type=int, choices=range(RANKS), default=1, help="the rank to kill")
    last = STEPS - JOIN_AFTER - 1
    parser.add_argument("--at", type=int, choices=range(last), default=KILL_AT, metavar="STEP", help="of the kill")
    parser.add_argument("--role", choices=["watch", "rank"], default="watch", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.role == "rank":
        asynccomm.run(be_rank(options.backend, options.at))
    else:
        try:
            asyncio.run(watch(options.backend, f"rank {options.kill}", options.at))
        except KeyboardInterrupt:
            sys.exit(128 + signal.SIGINT)
