"""Every rank brings a number, every rank gets the sum. Start it with: asynccomm run -n 3 examples/hello.py"""

import torch

import asynccomm


async def main() -> None:
    async with asynccomm.new_comm() as comm:
        total = await comm.all_reduce(torch.tensor([comm.rank + 1]))
        print(f"rank {comm.rank} of {comm.size}: the numbers 1 to {comm.size} sum up to {total.item()}")


asynccomm.run(main())
