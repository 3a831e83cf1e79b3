"""Workers train one model in the memory of rank 0, which takes no part in the transfers.

    asynccomm run -n 3 examples/parameter_server.py

Rank 0 has the parameters in a window. Each worker gets them, computes a gradient on its own data, and accumulates a
step into them, as often as it can: no worker waits for another, nor for the server. Adding to a signal of the server
counts the steps, and the server waits for nothing but these.
"""

from __future__ import annotations

import argparse

import torch

import asynccomm
from asynccomm import Comm, Window

SERVER = 0
STEPS_DONE = 0  # the signal of the server that counts
FEATURES = 8


def loss_of(parameters: torch.Tensor, seed: int) -> torch.Tensor:
    """The loss on random data: the network is to learn the sum of its inputs."""
    inputs = torch.randn(64, FEATURES, generator=torch.Generator().manual_seed(seed))
    return (inputs @ parameters - inputs.sum(1)).square().mean()


async def work(comm: Comm, window: Window, steps: int, rate: float) -> None:
    parameters = torch.zeros(FEATURES)
    for step in range(steps):
        await window.get(parameters, SERVER)
        copy = parameters.clone().requires_grad_()
        loss_of(copy, seed=steps * comm.rank + step).backward()  # type: ignore[no-untyped-call]
        assert copy.grad is not None
        await window.accumulate(-rate * copy.grad, SERVER)
        window.signal(SERVER, STEPS_DONE, add=True)  # behind the accumulate


async def serve(comm: Comm, window: Window, steps: int) -> None:
    parameters = window.tensor(dtype=torch.float32)
    total = steps * (comm.size - 1)
    for percent in (0, 25, 50, 75, 100):
        await window.wait_signal(STEPS_DONE, total * percent // 100)
        print(f"{window.signal_value(STEPS_DONE):4} of {total} steps: loss {loss_of(parameters, seed=10**6):.4f}")


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100, help="of each worker")
    parser.add_argument("--rate", type=float, default=0.01, help="of learning")
    parser.add_argument("--backend", default="auto")
    args = parser.parse_args()
    if args.steps < 1:
        parser.error("argument --steps: must be at least 1")

    torch.set_num_threads(1)
    async with asynccomm.new_comm(args.backend, name="parameters") as comm:
        if comm.size < 2:
            raise SystemExit("one rank serves, the others work: start at least two, asynccomm run -n 3 ...")
        nbytes = 4 * FEATURES if comm.rank == SERVER else 0
        async with await comm.window(nbytes) as window:
            if comm.rank == SERVER:
                await serve(comm, window, args.steps)
            else:
                await work(comm, window, args.steps, args.rate)


asynccomm.run(main())
