"""Checks of unusual tensors, in every form: complex, conjugated and negated views, scalars, every dtype.

Also checks of torch's own reduction types, in every form.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch import distributed as dist

from asynccomm.comm.comm import Comm
from asynccomm.ops.reduce_op import ReduceOp
from asynccomm.testing.conformance.argument_forms import Lay, StartedOp, every_move, every_reduction, expect_finished
from asynccomm.testing.conformance.data import (
    COMPLEX,
    DTYPES,
    REDUCTIONS,
    chunks,
    combinations,
    everyones,
    expect_all_equal,
    expect_equal,
    negated,
    reduced,
    sample,
    sentinel,
    strided,
)

SHAPES: list[tuple[int, ...]] = [(), (2, 3), (0,)]


def _conjugated(tensor: Tensor) -> Tensor:
    return tensor.conj().resolve_conj().conj()


def _strided_and_conjugated(tensor: Tensor) -> Tensor:
    return strided(tensor.conj().resolve_conj()).conj()


async def every_dtype_in_every_form(comm: Comm) -> None:
    for dtype in DTYPES:
        await every_move(comm, (2, 3), dtype, torch.clone, f"of {dtype}")
    for dtype, op in list(combinations())[::3]:  # other checks use all combinations in most forms
        await every_reduction(comm, (5,), dtype, op, torch.clone, f"of {dtype}")


async def reductions_of_torch_in_every_form(comm: Comm) -> None:
    members = [getattr(dist.ReduceOp, op.type.name) for op in REDUCTIONS]
    for op in [*members, *map(dist.ReduceOp, members)]:
        await every_reduction(comm, (3,), torch.int32, op, torch.clone, f"of torch ({ReduceOp.of(op)})")

    for factor in (0.5, torch.tensor(0.5), torch.tensor([0.5])):
        op = dist._make_nccl_premul_sum(factor)
        await every_reduction(comm, (3,), torch.float32, op, torch.clone, f"of torch ({ReduceOp.of(op)})")


async def scalars_in_every_form(comm: Comm) -> None:
    for dtype in (torch.float32, torch.int64, torch.bool, torch.bfloat16, *COMPLEX):
        await every_move(comm, (), dtype, torch.clone, f"of {dtype} scalars")
    for dtype, op in combinations([torch.float32, torch.float16, torch.complex64, torch.uint8]):
        await every_reduction(comm, (), dtype, op, torch.clone, f"of {dtype} scalars")


async def empty_tensors_in_every_form(comm: Comm) -> None:
    for shape in ((0,), (2, 0, 3)):
        await every_move(comm, shape, torch.float32, torch.clone, f"of {shape}")
        await every_reduction(comm, shape, torch.float32, ReduceOp.SUM, torch.clone, f"of {shape}")


async def long_tensors_in_every_form(comm: Comm) -> None:
    for lay in (torch.clone, strided):
        await every_move(comm, (41, 500), torch.float32, lay, f"of 82 kB, {lay.__name__}")
        await every_reduction(comm, (41, 500), torch.float32, ReduceOp.SUM, lay, f"of 82 kB, {lay.__name__}")


async def strided_tensors_in_every_form(comm: Comm) -> None:
    for dtype in (torch.float32, torch.uint8, torch.complex128):
        await every_move(comm, (2, 3), dtype, strided, f"of strided {dtype}")
        await every_reduction(comm, (2, 3), dtype, ReduceOp.SUM, strided, f"of strided {dtype}")


async def conjugated_tensors_in_every_form(comm: Comm) -> None:
    cases: list[tuple[torch.dtype, Lay, list[tuple[int, ...]]]] = [
        (torch.complex64, _conjugated, SHAPES),
        (torch.complex128, _conjugated, [(2, 3)]),
        (torch.complex64, _strided_and_conjugated, [(2, 3)]),
    ]
    for dtype, lay, shapes in cases:
        for shape in shapes:
            what = f"of conjugated {dtype}{shape}"
            await every_move(comm, shape, dtype, lay, what)
            for op in (ReduceOp.SUM, ReduceOp.AVG):
                await every_reduction(comm, shape, dtype, op, lay, what)


async def negated_tensors_in_every_form(comm: Comm) -> None:
    cases: list[tuple[torch.dtype, list[tuple[int, ...]]]] = [(torch.float32, SHAPES), (torch.float64, [(2, 3)])]
    for dtype, shapes in cases:
        for shape in shapes:
            what = f"of negated {dtype}{shape}"
            await every_move(comm, shape, dtype, negated, what)
            for op in (ReduceOp.SUM, ReduceOp.MAX):
                await every_reduction(comm, shape, dtype, op, negated, what)


def _of_inference(tensor: Tensor) -> Tensor:
    with torch.inference_mode():
        return tensor.clone()


def _parameter(tensor: Tensor) -> Tensor:
    return tensor.clone().requires_grad_()


async def tensors_of_inference_mode_in_every_form(comm: Comm) -> None:
    await every_move(comm, (2, 3), torch.float32, _of_inference, "made in inference mode")
    await every_reduction(comm, (2, 3), torch.float32, ReduceOp.SUM, _of_inference, "made in inference mode")


async def parameters_in_every_form(comm: Comm) -> None:
    await every_move(comm, (2, 3), torch.float32, _parameter, "that require grad")
    await every_reduction(comm, (2, 3), torch.float32, ReduceOp.SUM, _parameter, "that require grad")


def _pairs(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor)


async def complex_outputs_of_real_inputs(comm: Comm) -> None:
    size, rank, root = comm.size, comm.rank, 0
    for dtype in COMPLEX:
        everyone = everyones(size, (3, 2), dtype)
        pairs = _pairs(everyone[rank])
        outputs = [sentinel((3, 2), dtype) for _ in range(size)]
        expect_all_equal(await comm.all_gather(outputs, pairs), everyone, f"all_gather {dtype} of pairs")
        single = await comm.all_gather_single(sentinel((3 * size, 2), dtype), pairs)
        expect_equal(single, torch.cat(everyone), f"all_gather_single {dtype} of pairs")
        outputs = [sentinel((3, 2), dtype) for _ in range(size)]
        if await comm.gather(outputs if rank == root else None, pairs, root) is not None:
            expect_all_equal(outputs, everyone, f"gather {dtype} of pairs")
        whole, total = _wholes(comm, dtype)
        output = await comm.reduce_scatter_single(sentinel((3,), dtype), _pairs(whole))
        expect_equal(output, total, f"reduce_scatter_single {dtype} of pairs")
        output = await comm.reduce_scatter(sentinel((3,), dtype), [_pairs(t) for t in whole.chunk(size)])
        expect_equal(output, total, f"reduce_scatter {dtype} of pairs")
        came = torch.cat([chunks(sample(r, (3 * size,), dtype), [3] * size)[rank] for r in range(size)])
        output = await comm.all_to_all_single(sentinel((3 * size,), dtype), _pairs(whole))
        expect_equal(output, came, f"all_to_all_single {dtype} of pairs")
        outputs = await comm.all_to_all(
            [sentinel((3,), dtype) for _ in range(size)], [_pairs(t) for t in whole.chunk(size)]
        )
        expect_equal(torch.cat(list(outputs)), came, f"all_to_all {dtype} of pairs")
        expect_equal(whole, sample(rank, (3 * size,), dtype), f"{dtype}: input")


def _wholes(comm: Comm, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """A vector with three elements per rank, and this rank's part of the sum over all ranks."""
    shape = (3 * comm.size,)
    total = reduced(everyones(comm.size, shape, dtype), ReduceOp.SUM)
    return sample(comm.rank, shape, dtype), total.chunk(comm.size)[comm.rank]


async def real_outputs_of_complex_inputs(comm: Comm) -> None:
    size, rank, root = comm.size, comm.rank, comm.size - 1
    for dtype in COMPLEX:
        everyone = everyones(size, (3,), dtype)
        pairs, mine = [_pairs(tensor) for tensor in everyone], everyone[rank].clone()

        def blank(*shape: int, like: Tensor = pairs[0]) -> Tensor:
            return sentinel((*shape, 3, 2), like.dtype)

        outputs = [blank() for _ in range(size)]
        expect_all_equal(await comm.all_gather(outputs, mine), pairs, f"all_gather of {dtype} as pairs")
        single = await comm.all_gather_single(blank(size), mine)
        expect_equal(single, torch.stack(pairs), f"all_gather_single of {dtype} as pairs")
        output = await comm.scatter(blank(), everyone if rank == root else None, root)
        expect_equal(output, pairs[rank], f"scatter of {dtype} as pairs")
        whole, total = _wholes(comm, dtype)
        output = await comm.reduce_scatter_single(blank(), whole)
        expect_equal(output, _pairs(total), f"reduce_scatter_single of {dtype} as pairs")
        some = [sentinel((3,), dtype) if r % 2 else blank() for r in range(size)]  # both kinds in one list
        await comm.all_gather(some, mine)
        for r, tensor in enumerate(some):
            expect_equal(tensor if r % 2 == 0 else _pairs(tensor), pairs[r], f"all_gather of {dtype}, mixed")
        expect_equal(mine, everyone[rank], f"{dtype}: input")


async def complex_on_some_ranks_and_real_on_others(comm: Comm) -> None:
    for dtype in (*COMPLEX, torch.complex32):
        for shape in ((3,), (0,), (64, 41)):  # the last shape is too large for an eager message
            everyone = everyones(comm.size, shape, dtype)
            started = [*_collectives_of_either(comm, everyone), *_messages_of_either(comm, everyone)]
            for root in {0, comm.size - 1}:
                started += _rooted_of_either(comm, everyone, root)
            expected = [form._replace(expected=[_either(comm, tensor) for tensor in form.expected]) for form in started]
            await expect_finished(expected, f"of {dtype}{shape} on some ranks, of its reals on others")
            expect_equal(everyone[comm.rank], sample(comm.rank, shape, dtype), f"{dtype}: an input")


def _either(comm: Comm, tensor: Tensor) -> Tensor:
    """A complex tensor, as real pairs on odd ranks."""
    return _pairs(tensor) if comm.rank % 2 else tensor


def _blank(comm: Comm, like: Tensor) -> Tensor:
    return _either(comm, sentinel(like.shape, like.dtype))


def _collectives_of_either(comm: Comm, everyone: list[Tensor]) -> Iterator[StartedOp]:
    size, rank = comm.size, comm.rank
    mine, whole = _either(comm, everyone[rank]), torch.cat(everyone)
    everything = _either(comm, whole)
    blanks = [_blank(comm, tensor) for tensor in everyone]
    yield StartedOp("all_gather", comm.all_gather(blanks, mine), everyone)
    yield StartedOp("all_gather, allocated", comm.all_gather(None, mine), everyone)
    yield StartedOp("all_gather_coalesced", comm.all_gather_coalesced(None, [mine]), everyone)
    yield StartedOp("all_gather_single", comm.all_gather_single(_blank(comm, whole), mine), [whole])
    along = comm.all_gather_single(None, mine.unsqueeze(1), 1)
    yield StartedOp("all_gather_single along 1", along, [torch.stack(everyone, 1)])
    longer = [torch.cat([tensor] * (r + 1)) for r, tensor in enumerate(everyone)]
    extents = [len(tensor) for tensor in longer]
    yield StartedOp("all_gather_v", comm.all_gather_v(None, _either(comm, longer[rank]), extents), [torch.cat(longer)])
    blanks = [_blank(comm, tensor) for tensor in longer]
    yield StartedOp("all_gather, uneven", comm.all_gather(blanks, _either(comm, longer[rank])), longer)
    came = [everyone[rank]] * size
    parts, splits = [_either(comm, tensor) for tensor in everyone], [len(mine)] * size
    yield StartedOp("all_to_all", comm.all_to_all([_blank(comm, tensor) for tensor in everyone], parts), came)
    yield StartedOp("all_to_all_single", comm.all_to_all_single(_blank(comm, whole), everything), [torch.cat(came)])
    exchanged = comm.all_to_all_v_single(None, everything, splits, splits)
    yield StartedOp("all_to_all_v_single", exchanged, [torch.cat(came)])


def _rooted_of_either(comm: Comm, everyone: list[Tensor], root: int) -> Iterator[StartedOp]:
    rank, at_root = comm.rank, comm.rank == root
    mine, whole = _either(comm, everyone[rank]), torch.cat(everyone)
    values = everyone[root]
    tensors = [mine if at_root else _blank(comm, values) for _ in range(2)]
    yield StartedOp("broadcast", comm.broadcast(tensors[0], root), [values])
    yield StartedOp("broadcast_coalesced", comm.broadcast_coalesced(tensors[1:], root), [values])
    inputs = [_either(comm, tensor) for tensor in everyone] if at_root else None
    yield StartedOp("scatter", comm.scatter(_blank(comm, values), inputs, root), [everyone[rank]])
    mixed = [tensor if r % 2 else _pairs(tensor) for r, tensor in enumerate(everyone)] if at_root else None
    yield StartedOp("scatter of both", comm.scatter(_blank(comm, values), mixed, root), [everyone[rank]])
    source = _either(comm, whole) if at_root else None
    yield StartedOp("scatter_single", comm.scatter_single(_blank(comm, values), source, root), [everyone[rank]])
    blanks = [_blank(comm, tensor) for tensor in everyone] if at_root else None
    yield StartedOp("gather", comm.gather(blanks, mine, root), everyone if at_root else [])
    yield StartedOp("gather_single", comm.gather_single(None, mine, root), [whole] if at_root else [])


def _messages_of_either(comm: Comm, everyone: list[Tensor]) -> Iterator[StartedOp]:
    rank, mine = comm.rank, _either(comm, everyone[comm.rank])
    following, previous = (rank + 1) % comm.size, (rank - 1) % comm.size
    yield StartedOp("recv", comm.recv(_blank(comm, everyone[previous]), previous), [everyone[previous]])
    yield StartedOp("send", comm.send(mine, following), [everyone[rank]])
    comm.send(everyone[rank] if rank % 2 else _pairs(everyone[rank]), rank, 1)  # of the kind that the receive is not
    yield StartedOp("recv of one's own", comm.recv(_blank(comm, everyone[rank]), rank, 1), [everyone[rank]])
    batch = comm.batch_op_create()
    batch.recv(_blank(comm, everyone[following]), following, 2)
    batch.send(mine, previous, 2)
    yield StartedOp("batch", batch.issue(), [everyone[following], everyone[rank]])


async def views_of_complex_tensors(comm: Comm) -> None:
    tensor = sample(comm.rank, (4, 3), torch.complex64)
    total = reduced(everyones(comm.size, (4, 3), torch.complex64), ReduceOp.SUM)
    await comm.all_reduce(tensor.real)  # every second element in memory
    expect_equal(tensor.real, total.real, "all_reduce of real parts")
    expect_equal(tensor.imag, sample(comm.rank, (4, 3), torch.complex64).imag, "imaginary parts beside them")
    await comm.all_reduce(tensor.t().imag)
    expect_equal(tensor, total, "all_reduce of imaginary parts, transposed")
    pairs = _pairs(sample(comm.rank, (4,), torch.complex128))
    await comm.all_reduce(torch.view_as_complex(pairs))
    expected = reduced(everyones(comm.size, (4,), torch.complex128), ReduceOp.SUM)
    expect_equal(pairs, _pairs(expected), "all_reduce of a complex view of pairs")
