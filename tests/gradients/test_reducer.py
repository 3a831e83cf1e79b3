"""Training with a reducer: the gradients are those of one process with the samples of all ranks."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import gc
import io
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import asynccomm
from asynccomm import Comm, GradientBucket, GradientReducer, PeerLostError, ReduceOp
from asynccomm.gradients import planning
from asynccomm.testing import loopback_world
from tests.interop.world import world
from tests.sampling import examples
from tests.waiting import until

from .ranks import gradients_of, on_ranks


class Net(nn.Module):
    """With a parameter that two layers share, a frozen one, one that no sample uses, and a branch."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(8, 64), nn.Linear(64, 64), nn.Linear(64, 4)
        self.tied = nn.Linear(64, 64)
        self.tied.weight = self.second.weight
        self.branch, self.unused = nn.Linear(64, 64), nn.Linear(3, 3)
        self.first.bias.requires_grad_(False)
        self.register_buffer("scale", torch.rand(4), persistent=False)

    def forward(self, x: Tensor, branch: bool = False) -> Tensor:
        x = torch.relu(self.first(x))
        x = torch.relu(self.branch(x) if branch else self.tied(self.second(x)))
        return self.third(x) * self.scale


def data(rank: int, step: int) -> Tensor:
    return torch.randn(6, 8, generator=torch.Generator().manual_seed(100 * step + rank))


async def backward(loss: Tensor, thread: bool) -> None:
    await asyncio.to_thread(loss.backward) if thread else loss.backward()


# -- the result -------------------------------------------------------------------------------------------------------


@pytest.mark.ranks(2, backend=["shm", "gloo"])
async def test_training_equals_one_process_and_ddp(comm: Comm) -> None:
    """Bit for bit DDP's gradients: branches that only some ranks take, accumulation, backward on both threads."""

    async def train(model: Any, reducer: GradientReducer | None) -> list[list[Tensor | None]]:
        net = model if reducer is not None else model.module
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        found = []
        for step in range(5):
            optimizer.zero_grad(set_to_none=step != 3)
            context = model if reducer is None else reducer
            if step % 2:
                with context.no_sync():
                    model(data(comm.rank, 2 * step)).square().sum().backward()
            loss = model(data(comm.rank, 2 * step + 1), branch=(step + comm.rank) % 3 == 0).square().sum()
            await backward(loss, thread=reducer is not None and step % 3 == 1)
            if reducer is not None:
                await reducer.finish()
            found.append(gradients_of(net))
            optimizer.step()
        return found

    with world("gloo") as group:
        torch.manual_seed(0)
        ddp = DistributedDataParallel(
            Net(), bucket_cap_mb=0.02, find_unused_parameters=True, process_group=group, gradient_as_bucket_view=True
        )
        expected = await train(ddp, None)
        del ddp
    torch.manual_seed(comm.rank)  # not 0 on all ranks: the weights of rank 0 are copied
    model = Net()
    async with GradientReducer(model, comm, bucket_mb=0.02) as reducer:
        found = await train(model, reducer)
    for one, other in zip(found, expected, strict=True):
        for mine, theirs in zip(one, other, strict=True):
            assert (mine is None) == (theirs is None)
            assert mine is None or theirs is None or torch.equal(mine, theirs)
    assert found[0][-1] is None, "the unused layer"


@pytest.mark.parametrize("ordering", ["program", "agreed"])
async def test_gradients_are_those_of_all_samples_together(ordering: str) -> None:
    torch.manual_seed(0)
    alone = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3)).to(
        memory_format=torch.channels_last
    )
    images, labels = torch.randn(3, 6, 1, 4, 4), torch.randint(3, (3, 6))

    async def program(comm: Comm) -> None:
        model = copy.deepcopy(alone)
        async with GradientReducer(model, comm, bucket_mb=1e-4) as reducer:
            for step in range(3):
                model.zero_grad()
                F.cross_entropy(model(images[comm.rank] * (step + 1)), labels[comm.rank]).backward()
                await reducer.finish()
                expected = copy.deepcopy(alone)
                F.cross_entropy(expected(images.flatten(0, 1) * (step + 1)), labels.flatten()).backward()
                for mine, theirs in zip(model.parameters(), expected.parameters(), strict=True):
                    torch.testing.assert_close(mine.grad, theirs.grad)

    await on_ranks(3, program, ordering)


class Random(nn.Module):
    """Parameters of several shapes and dtypes, of which each call uses some."""

    def __init__(self, shapes: list[tuple[list[int], torch.dtype]]) -> None:
        super().__init__()
        self.all = nn.ParameterList([torch.randn(shape).to(dtype) for shape, dtype in shapes])

    def forward(self, used: list[int], factor: int) -> Tensor:
        terms = [(self.all[number].abs() * factor).sum() for number in used]
        return sum(terms, torch.zeros((), requires_grad=True)).real  # type: ignore[return-value]


shapes = st.tuples(
    st.lists(st.integers(0, 5), max_size=3), st.sampled_from([torch.float32, torch.float64, torch.bfloat16])
)


@examples(60, 10)
@given(data=st.data(), shapes=st.lists(shapes, min_size=1, max_size=6), op=st.sampled_from(["AVG", "SUM"]))
def test_any_model_and_any_use(data: st.DataObject, shapes: list[tuple[list[int], torch.dtype]], op: str) -> None:
    """Each rank uses any parameters in any order, in any number of passes, and zeroes gradients in any way."""
    size = data.draw(st.integers(1, 3))
    use = st.lists(st.sampled_from(range(len(shapes))), unique=True)
    step = st.lists(use, min_size=1, max_size=2)  # passes, of which all but the last are local
    steps = data.draw(st.lists(st.tuples(st.lists(step, min_size=size, max_size=size), st.booleans()), max_size=3))
    limit = data.draw(st.sampled_from([1e-5, 1e-4, 1.0]))

    async def program(comm: Comm) -> None:
        model = Random(shapes)
        async with GradientReducer(model, comm, bucket_mb=limit, op=getattr(ReduceOp, op)) as reducer:
            for uses, to_none in steps:
                if not all(passes and any(passes) for passes in uses):
                    continue  # finish() asks for a backward on each rank
                model.zero_grad(set_to_none=to_none)
                stale = {number for number, each in enumerate(model.all) if each.grad is not None}
                *local, last = uses[comm.rank]
                with reducer.no_sync():
                    for used in local:
                        model(used, 1 + comm.rank).backward()
                model(last, 1 + comm.rank).backward()
                await reducer.finish()
                for number, each in enumerate(model.all):
                    total = sum((1 + rank) * sum(number in used for used in uses[rank]) for rank in range(size))
                    if not total and number not in stale:
                        assert each.grad is None
                        continue
                    sign = each.detach().sign()
                    torch.testing.assert_close(each.grad, sign * (total / (size if op == "AVG" else 1)))

    asyncio.run(on_ranks(size, program))


async def test_nan_stays_where_it_is() -> None:
    async def program(comm: Comm) -> list[float]:
        model = nn.ParameterDict({"a": torch.ones(2), "b": torch.ones(2), "c": torch.ones(2)})
        async with GradientReducer(model, comm) as reducer:
            loss = (model["a"] * torch.tensor([1.0, torch.nan])).sum() + model["b"].sum()
            loss.backward()
            await reducer.finish()
            assert model["c"].grad is None
        return [*model["a"].grad.tolist(), *model["b"].grad.tolist()]

    for found in await on_ranks(2, program):
        assert str(found) == "[1.0, nan, 1.0, 1.0]"


# -- what programs do with gradients ----------------------------------------------------------------------------------


async def test_gradients_stay_in_the_buckets_through_a_training_loop() -> None:
    """Zeroing in both ways, clipping, scaling, accumulation over steps, optimizers with and without foreach."""

    async def program(comm: Comm, foreach: bool, to_none: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model, alone = nn.Linear(4, 3), nn.Linear(4, 3)
        alone.load_state_dict(model.state_dict())
        async with GradientReducer(model, comm) as reducer:
            views = None
            optimizers = [torch.optim.AdamW(each.parameters(), lr=0.1, foreach=foreach) for each in (model, alone)]
            for step in range(6):
                x = torch.randn(2, 5, 4, generator=torch.Generator().manual_seed(step))
                if step % 3 != 2:  # else the gradients add up
                    for each in optimizers:
                        each.zero_grad(set_to_none=to_none)
                (model(x[comm.rank]).square().mean()).backward()
                await reducer.finish()
                alone(x.flatten(0, 1)).square().mean().backward()
                for net, optimizer in zip((model, alone), optimizers, strict=True):
                    nn.utils.clip_grad_norm_(net.parameters(), 0.1)
                    optimizer.step()
                assert views is None or [each.grad.data_ptr() for each in model.parameters()] == views
                views = [each.grad.data_ptr() for each in model.parameters()]
        for mine, theirs in zip(model.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(mine, theirs)
        return [each.detach().clone() for each in model.parameters()]

    for foreach in (False, True):
        for to_none in (False, True):
            one, other = await on_ranks(2, lambda comm, f=foreach, t=to_none: program(comm, f, t))  # type: ignore[misc]
            assert all(torch.equal(*pair) for pair in zip(one, other, strict=True))


@pytest.mark.parametrize("compress", [None, torch.bfloat16])
async def test_a_reducer_in_inference_mode_leaves_ordinary_gradients(
    compress: torch.dtype | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planning, "FIRST_BYTES", 64)  # the buckets change after the first step
    model = Net()
    async with loopback_world(1) as comms:
        with torch.inference_mode():
            reducer = await GradientReducer(model, comms[0], bucket_mb=64 / 2**20, compress=compress)
        for step in range(3):
            model.zero_grad(set_to_none=step != 1)
            model(data(0, step)).sum().backward()
            with torch.inference_mode(step < 2):
                await reducer.finish()
        assert not any(parameter.grad.is_inference() for parameter in model.parameters() if parameter.grad is not None)
        reducer.close()


async def test_two_models_have_two_reducers() -> None:
    """As in adversarial training: the loss of one model passes through the other, whose gradients do not count."""

    async def program(comm: Comm) -> None:
        torch.manual_seed(0)
        generator, critic = nn.Linear(2, 4), nn.Linear(4, 1)
        other = await comm.dup()
        async with other, GradientReducer(generator, comm) as makes, GradientReducer(critic, other) as judges:
            for step in range(3):
                critic.zero_grad()
                made = generator(data(comm.rank, step)[:, :2])
                critic(made.detach()).mean().backward()
                generator.zero_grad()
                with judges.no_sync():
                    judged = asyncio.create_task(judges.finish())
                    await judged
                    kept = gradients_of(critic)
                    (-critic(made).mean()).backward()
                await makes.finish()
                for each, grad in zip(critic.parameters(), kept, strict=True):
                    each.grad = grad
                expected = torch.stack([data(rank, step)[:, :2].mean(0) for rank in range(2)]).mean(0)
                torch.testing.assert_close(generator.weight.grad, -critic.weight.T * expected)
                await asyncio.gather(comm.barrier(), other.barrier())
                critic.zero_grad()
                critic(made.detach()).mean().backward()
                await judges.finish()
                assert critic.bias.grad.item() == 1

    await on_ranks(2, program)


async def test_two_reducers_of_a_comm_take_turns() -> None:
    """Their order could differ between the ranks, and the buckets of two models have the same size."""

    async def program(comm: Comm) -> None:
        models = [nn.Linear(1, 1, bias=False) for _ in range(2)]
        async with GradientReducer(models[0], comm) as first, GradientReducer(models[1], comm) as second:
            for mine, theirs in ((0, 1), (1, 0)):
                reducers = first, second
                models[mine](torch.ones(1)).sum().backward()
                with pytest.raises(RuntimeError, match=r"another GradientReducer of comm .* between its backward"):
                    models[theirs](torch.ones(1)).sum().backward()
                await reducers[mine].finish()
                assert models[mine].weight.grad.item() == 1
                await reducers[theirs].rebind(comm)
                models[mine].zero_grad()

    await on_ranks(2, program)


# -- communication ----------------------------------------------------------------------------------------------------


async def test_buckets_follow_rank_0_after_the_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "FIRST_BYTES", 64)

    async def program(comm: Comm) -> list[list[list[int]]]:
        model = nn.ParameterList([torch.ones(8) * number for number in range(4)])
        plans = []
        async with GradientReducer(model, comm, bucket_mb=2**-14) as reducer:
            for step in range(3):
                model.zero_grad()
                # backward reaches the last factor first; the ranks multiply in different orders
                product = torch.ones(8)
                for number in [2, 0, 3, 1] if comm.rank == 0 else [0, 1, 2, 3]:
                    product = (product + model[number] * (comm.rank + step)).clone()
                product.sum().backward()
                await reducer.finish()
                plans.append(reducer._plan)
                assert all(torch.equal(each.grad, torch.full((8,), step + 0.5)) for each in model)
        return plans

    first, second = await on_ranks(2, program)
    assert first == second
    assert first == [[[1, 3], [0, 2]]] * 3


async def test_gradients_leave_while_backward_runs() -> None:
    async def program(comm: Comm) -> None:
        model = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(3)))
        sent: list[int] = []
        async with GradientReducer(model, comm, bucket_mb=2**-14) as reducer:
            for layer in model:
                layer.weight.register_hook(lambda _: sent.append(len(reducer.works)))
            model(torch.ones(1, 4)).sum().backward()
            assert sent == [0, 1, 2], "the gradient of a layer is computed after those of later layers have left"
            assert len(reducer.works) == 3
            await reducer.finish()
            assert not reducer.works

    await on_ranks(2, program)


async def halves(bucket: GradientBucket) -> None:
    """The sum of all ranks, halved; the coroutine runs in finish()."""
    await bucket.comm.all_reduce(bucket.tensor)
    bucket.tensor.div_(2)


def in_float16(bucket: GradientBucket) -> Awaitable[Tensor]:
    return bucket.comm.all_reduce(bucket.tensor.to(torch.float16), ReduceOp.AVG)


@pytest.mark.parametrize("compress", [torch.bfloat16, torch.float16, halves, in_float16])
async def test_compression(compress: Any) -> None:
    dtype = {torch.bfloat16: torch.bfloat16, halves: torch.float32}.get(compress, torch.float16)

    async def program(comm: Comm) -> None:
        model = nn.ParameterList([torch.ones(40), torch.ones(3, 3), torch.ones(2)])
        factors = [(1 + 2**-6 * comm.rank + 2**-12) * torch.ones_like(each) for each in model]
        async with GradientReducer(model, comm, bucket_mb=1e-4, compress=compress) as reducer:
            for step in range(3):
                model.zero_grad()
                used = range(2) if comm.rank == step else range(1)
                torch.cat([(model[number] * factors[number]).flatten() for number in used]).sum().backward()
                await reducer.finish()
                there = [(1 + 2**-6 * rank + 2**-12) for rank in range(2)]
                mean = sum(torch.tensor(each).to(dtype).float() for each in there) / 2
                assert torch.equal(model[0].grad, mean.to(dtype).float().expand(40))
                if step < 2:
                    one = torch.tensor(there[step]).to(dtype).float() / 2
                    assert torch.equal(model[1].grad, one.to(dtype).float().expand(3, 3))
                else:
                    assert model[1].grad is None
                assert model[2].grad is None

    await on_ranks(2, program)


@pytest.mark.parametrize(
    ("compress", "error", "text"),
    [
        (lambda bucket: None, TypeError, "compress must return a Work or another awaitable, got None"),
        (lambda bucket: 1 / 0, ZeroDivisionError, "division"),
        (lambda bucket: bucket.comm.all_reduce(torch.ones(3)), ValueError, r"3 .*|elements, got float32\[3\] on cpu"),
    ],
)
async def test_a_compress_function_that_fails(compress: Any, error: type[Exception], text: str) -> None:
    async def program(comm: Comm) -> None:
        model = nn.Linear(2, 2)
        async with GradientReducer(model, comm, compress=compress) as reducer:
            with pytest.raises(error, match=text):
                model(torch.ones(2)).sum().backward()
                await reducer.finish()
            with pytest.raises(error, match=text):
                await reducer.finish()
            assert model.weight.grad is None

    await on_ranks(2, program)


# -- mistakes ---------------------------------------------------------------------------------------------------------


async def with_reducer(body: Callable[[nn.Sequential, GradientReducer], Awaitable[None]]) -> None:
    """Run ``body`` on two ranks."""

    async def program(comm: Comm) -> None:
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        async with GradientReducer(model, comm) as reducer:
            await body(model, reducer)

    await on_ranks(2, program)


def loss_of(model: nn.Module) -> Tensor:
    return model(torch.ones(3, 2)).sum()


async def test_finish_without_backward() -> None:
    async def body(model: nn.Sequential, reducer: GradientReducer) -> None:
        for _ in range(2):
            with pytest.raises(RuntimeError, match=r"finish\(\) without backward\(\): no gradient was computed"):
                await reducer.finish()
            loss_of(model).backward()
            await reducer.finish()

    await with_reducer(body)


async def test_backward_of_other_parameters_before_finish() -> None:
    async def body(model: nn.Sequential, reducer: GradientReducer) -> None:
        for context in (contextlib.nullcontext, reducer.no_sync):
            model.zero_grad()
            loss_of(model[0]).backward()
            with context():
                loss_of(model[1]).backward()
            await reducer.finish()
            assert [each.grad is None or each.grad.tolist() for each in model.parameters()] == [
                [[3, 3]] * 2,
                [3, 3],
            ] * 2

    await with_reducer(body)


async def test_a_second_backward() -> None:
    async def body(model: nn.Sequential, reducer: GradientReducer) -> None:
        for context in (contextlib.nullcontext, reducer.no_sync):
            loss_of(model).backward()
            text = r"parameter '\d.\w+' got another gradient .* `with reducer.no_sync\(\):` .* but the last$"
            with pytest.raises(RuntimeError, match=text), context():
                loss_of(model).backward()
            with pytest.raises(RuntimeError, match="got another gradient"):
                await reducer.finish()
            assert all(each.grad is None for each in model.parameters()), "they were not the ranks' result"
            await reducer.rebind(reducer.comm)

    await with_reducer(body)


async def test_backward_on_a_thread_with_another_event_loop() -> None:
    async def body(model: nn.Sequential, reducer: GradientReducer) -> None:
        async def elsewhere() -> None:
            loss_of(model).backward()

        with pytest.raises(RuntimeError, match="belongs to another event loop than the running one"):
            await asyncio.to_thread(asyncio.run, elsewhere())
        with pytest.raises(RuntimeError, match="belongs to another event loop"):
            await reducer.finish()

    await with_reducer(body)


async def test_backward_before_the_begin_and_after_the_end() -> None:
    async def program(comm: Comm) -> None:
        model = nn.Linear(2, 2)
        reducer = GradientReducer(model, comm)
        with pytest.raises(RuntimeError, match="the GradientReducer has not begun: `await` it"):
            loss_of(model).backward()
        with pytest.raises(RuntimeError, match=r"finish\(\) without backward"):
            await reducer.finish()
        model.zero_grad()
        async with await reducer:
            loss_of(model).backward()
            await reducer.finish()
        model.zero_grad()
        (loss_of(model) * (1 + comm.rank)).backward()
        assert model.bias.grad[0] == 3 * (1 + comm.rank), "a closed reducer reduces nothing"
        for call in (reducer.finish(), reducer.rebind(comm)):
            with pytest.raises(RuntimeError, match="this GradientReducer was closed"):
                await call

    await on_ranks(2, program)


async def test_a_backward_that_has_not_ended() -> None:
    async def body(model: nn.Sequential, reducer: GradientReducer) -> None:
        inner = model[0](torch.ones(3, 2))
        inner.register_hook(lambda grad: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model[1](inner).sum().backward()
        text = r"finish\(\) before the end of backward\(\): it runs in another thread, .* all of them call rebind"
        with pytest.raises(RuntimeError, match=text):
            await reducer.finish()
        model.zero_grad()
        with pytest.raises(RuntimeError, match=r"got another gradient .* all of them call rebind\(\)"):
            loss_of(model).backward()
        await reducer.rebind(reducer.comm)  # on all ranks
        loss_of(model).backward()
        await reducer.finish()

    await with_reducer(body)


async def test_models_that_change() -> None:
    async def body(model: nn.Sequential, reducer: GradientReducer) -> None:
        loss_of(model).backward()
        model.append(nn.Linear(2, 2))
        with pytest.raises(RuntimeError, match=r"parameter '2.weight' of model requires a gradient, but did not"):
            await reducer.finish()
        del model[2]
        await reducer.finish()
        model[0].weight.requires_grad_(False)
        loss_of(model).backward()
        with pytest.raises(RuntimeError, match=r"parameter '0.weight' required a gradient when the reducer was made"):
            await reducer.finish()
        model[0].weight.requires_grad_(True)
        await reducer.finish()
        model.zero_grad()
        model.double()
        with pytest.raises(RuntimeError, match=r"has changed: its gradient was float32\[2\] on cpu .* float64"):
            model(torch.ones(3, 2).double()).sum().backward()

    await with_reducer(body)


async def test_gradients_that_cannot_be_reduced() -> None:
    async def program(comm: Comm) -> None:
        with torch.sparse.check_sparse_tensor_invariants(False):
            model = nn.Embedding(4, 2, sparse=True)
            async with GradientReducer(model, comm) as reducer:
                with pytest.raises(RuntimeError, match="gradient of parameter 'weight' is sparse"):
                    model(torch.tensor([1])).sum().backward()
                with pytest.raises(RuntimeError, match="is sparse"):
                    await reducer.finish()
        stepped = nn.Linear(2, 2)  # as an optimizer that steps within backward leaves it
        handle = stepped.bias.register_post_accumulate_grad_hook(lambda bias: setattr(bias, "grad", None))
        async with GradientReducer(stepped, comm) as reducer:
            with pytest.raises(RuntimeError, match=r"^the gradient of parameter 'bias' was removed .* another hook"):
                loss_of(stepped).backward()
            with pytest.raises(RuntimeError, match="was removed"):
                await reducer.finish()
            handle.remove()
            await reducer.rebind(comm)
            loss_of(stepped).backward()
            await reducer.finish()
            assert stepped.bias.grad is not None
        linear = nn.Linear(2, 2)
        async with GradientReducer(linear, comm):
            with (
                pytest.warns(UserWarning, match="create_graph=True"),
                pytest.raises(RuntimeError, match=r"gradient of parameter '\w+' has a graph of its own"),
            ):
                linear(torch.ones(2)).square().sum().backward(create_graph=True)

    await on_ranks(1, program)


async def test_a_dropped_reducer_and_copies_of_its_model() -> None:
    async def program(comm: Comm) -> None:
        model = nn.Linear(2, 2)
        model.reducer = await GradientReducer(model, comm)
        loss_of(model).backward()
        await model.reducer.finish()
        twin = copy.deepcopy(model)
        assert twin.reducer is model.reducer
        loss_of(twin).backward()
        with pytest.raises(RuntimeError, match="without backward"):
            await model.reducer.finish()
        del model.reducer, twin
        gc.collect()
        torch.save(model, io.BytesIO())
        loss_of(model).backward()
        assert model.weight._post_accumulate_grad_hooks == {}

    await on_ranks(1, program)


# -- cancellation and loss --------------------------------------------------------------------------------------------


def die(comm: Comm) -> None:
    """End a rank as seen by the others: its connections end without a word."""
    channel = comm._session.identity.job.channel
    assert channel is not None
    channel.call(channel._begin_closing)


async def test_finish_may_be_cancelled_and_called_again() -> None:
    async with loopback_world(2) as (first, second):
        models = [nn.Linear(2, 2), nn.Linear(2, 2)]
        reducers = await asyncio.gather(
            *(GradientReducer(model, comm)._begin() for model, comm in zip(models, (first, second), strict=True))
        )
        for compress in (None, halves):
            for reducer in reducers:
                reducer._compress = compress
                await asyncio.sleep(0)
            await asyncio.gather(*(reducer.rebind(reducer.comm) for reducer in reducers))
            loss_of(models[0]).backward()
            waiting = asyncio.create_task(reducers[0].finish())
            await until(lambda: reducers[0]._step is not None and reducers[0]._step.finishing)
            with pytest.raises(RuntimeError, match="waits in another task already"):
                await reducers[0].finish()
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            loss_of(models[1]).backward()
            await asyncio.gather(*(reducer.finish() for reducer in reducers))
            for model in models:
                assert model.bias.grad.tolist() == [3, 3]
        for reducer in reducers:
            reducer.close()


async def test_training_goes_on_without_a_lost_rank() -> None:
    """Rank 1 is lost before its backward; the others shrink, rebind and train, with the weights of rank 2."""

    async def program(old: Comm) -> None:
        model = nn.Sequential(nn.Linear(2, 64), nn.Linear(64, 2))
        reducer = await GradientReducer(model, old, bucket_mb=1e-4)
        for _ in range(2):
            await backward(loss_of(model), thread=True)
            await reducer.finish()
        if old.rank == 1:
            return die(old)
        loss_of(model).backward()
        with pytest.raises(PeerLostError, match="rank 1 was lost"):
            await reducer.finish()
        assert all(each.grad is None for each in model.parameters())
        loss_of(model).backward()  # of no use, and without an error of its own
        with pytest.raises(PeerLostError):
            await reducer.finish()
        with torch.no_grad():
            model[0].bias.fill_(old.rank)
        async with old.shrink() as comm:
            await reducer.rebind(comm, root=1)
            assert reducer.comm is comm
            assert model[0].bias.tolist() == [2] * 64
            (model[1].bias.sum() * (1 + comm.rank)).backward()
            await reducer.finish()
            assert model[1].bias.grad.tolist() == [1.5] * 2
            assert model[0].bias.grad is None
        reducer.close()

    await on_ranks(3, program)


async def test_a_loss_during_backward_is_raised_by_finish() -> None:
    async def program(comm: Comm) -> None:
        model = nn.Linear(2, 2)
        reducer = await GradientReducer(model, comm)
        await comm.barrier()
        if comm.rank == 1:
            return die(comm)
        await until(lambda: comm._session.error is not None)
        loss_of(model).backward()  # its hook cannot send
        with pytest.raises(PeerLostError, match="rank 1 was lost"):
            await reducer.finish()
        assert model.weight.grad is None
        reducer.close()

    await on_ranks(2, program)


async def test_abort_makes_every_gradient_none() -> None:
    async with loopback_world(2) as (comm, other):
        models = [nn.Linear(2, 2), nn.Linear(2, 2)]
        reducer, second = await asyncio.gather(
            GradientReducer(models[0], comm)._begin(), GradientReducer(models[1], other)._begin()
        )
        loss_of(models[0]).backward()
        waiting = asyncio.create_task(reducer.finish())
        await until(lambda: reducer._step is not None and reducer._step.finishing)
        other.abort("enough")
        with pytest.raises(asynccomm.AbortedError, match="enough"):
            await waiting
        assert models[0].weight.grad is None
        reducer.close()
        second.close()


@pytest.mark.parametrize("bad", [3, "x"])
async def test_rebind_checks_its_arguments(bad: Any) -> None:
    async def body(model: nn.Sequential, reducer: GradientReducer) -> None:
        with pytest.raises((ValueError, TypeError), match="root"):
            await reducer.rebind(reducer.comm, root=bad)
        with pytest.raises(TypeError, match="comm must be a Comm"):
            await reducer.rebind(bad)

    await with_reducer(body)


async def test_any_difference_of_the_limits_shows() -> None:
    async def program(comm: Comm) -> None:
        with pytest.raises(ValueError, match=r"settings differ between ranks: rank 1 has bucket_mb=24\.999999"):
            await GradientReducer(nn.Linear(2, 1), comm, bucket_mb=25 - comm.rank * 2**-20)

    await on_ranks(2, program)
