"""Arguments of a reducer that are refused at the call."""

from __future__ import annotations

import math
import warnings

import pytest
import torch
from torch import distributed as dist
from torch import nn

from asynccomm import Comm, GradientReducer, ReduceOp
from asynccomm.gradients.checks import check_unchanged

from .ranks import on_ranks


def frozen() -> nn.Module:
    return nn.Linear(2, 2).requires_grad_(False)


def lazy() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # lazy modules are in development
        return nn.LazyLinear(2)


async def test_arguments_are_named() -> None:
    model = nn.Linear(2, 2)

    async def program(comm: Comm) -> None:
        for error, text, arguments in [
            (TypeError, r"model must be a torch.nn.Module, got 3 \(int\)", {"model": 3}),
            (ValueError, "model has no parameter that requires a gradient", {"model": frozen()}),
            (ValueError, "parameter 'weight' of model has no shape yet", {"model": lazy()}),
            (ValueError, "parameter 'weight' of model is on meta", {"model": nn.Linear(2, 2, device="meta")}),
            (TypeError, "comm must be a Comm, got None", {"comm": None}),
            (TypeError, "bucket_mb must be a number of MiB, got '25'", {"bucket_mb": "25"}),
            (ValueError, "bucket_mb must be positive and finite, got 0", {"bucket_mb": 0}),
            (ValueError, "bucket_mb must be positive and finite, got nan", {"bucket_mb": math.nan}),
            (ValueError, "op must be ReduceOp.AVG or ReduceOp.SUM, got MAX", {"op": ReduceOp.MAX}),
            (ValueError, "compress must be torch.bfloat16, torch.float16 or a", {"compress": torch.float32}),
        ]:
            with pytest.raises(error, match=text):
                GradientReducer(**{"model": model, "comm": comm, **arguments})  # type: ignore[arg-type]
        assert model.weight._post_accumulate_grad_hooks is None, "nothing is left behind"
        reducer = GradientReducer(model, comm, op=dist.ReduceOp.SUM)
        with pytest.raises(ValueError, match="parameter 'weight' of model has another GradientReducer"):
            GradientReducer(model, comm)
        reducer.close()
        reducer.close()
        GradientReducer(model, comm).close()

    await on_ranks(1, program)


def test_changed_models_are_noticed() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).requires_grad_(False))
    names, parameters = ["0.weight", "0.bias"], list(model[0].parameters())
    check_unchanged(model, names, parameters)
    model[0].bias.requires_grad_(False)
    with pytest.raises(RuntimeError, match=r"parameter '0.bias' required a gradient when .* and does not now"):
        check_unchanged(model, names, parameters)
    model[1].requires_grad_(True)
    with pytest.raises(RuntimeError, match=r"parameter '1.weight' of model requires a gradient, but did not when"):
        check_unchanged(model, names, parameters)
