"""The checks of a reducer's arguments, and of a model that may have changed since."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from asynccomm.comm.comm import Comm
from asynccomm.ops.reduce_op import RedOpType, ReduceOp
from asynccomm.ops.validation import CommInfo, check_rank, check_tensor


def check_root(comm: Comm, root: object) -> int:
    """``root`` as a rank of ``comm``. Raises: TypeError, ValueError."""
    return check_rank(_info(comm), "root", root)


def check_reduction(op: object) -> ReduceOp:
    """``op`` as a reduction that gradients can have. Raises: TypeError, ValueError."""
    checked = ReduceOp.of(op)
    if checked.type not in (RedOpType.AVG, RedOpType.SUM):
        raise ValueError(f"op must be ReduceOp.AVG or ReduceOp.SUM, got {checked}")
    return checked


def bucket_bytes(bucket_mb: object) -> int:
    """The limit of a bucket in bytes, from MiB. Raises: TypeError, ValueError."""
    if isinstance(bucket_mb, bool) or not isinstance(bucket_mb, (int, float)):
        raise TypeError(f"bucket_mb must be a number of MiB, got {bucket_mb!r}")
    if not (math.isfinite(bucket_mb) and bucket_mb > 0):
        raise ValueError(f"bucket_mb must be positive and finite, got {bucket_mb!r}")
    return max(1, int(bucket_mb * 2**20))


def trained_parameters(model: object, comm: Comm, op: ReduceOp) -> dict[str, nn.Parameter]:
    """The parameters of ``model`` that require a gradient, by name.

    Raises: TypeError, ValueError naming the parameter or buffer that cannot be reduced or sent.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {model!r} ({type(model).__name__})")
    group = _info(comm)
    trained = {}
    for name, parameter in model.named_parameters():
        label = f"parameter {name!r} of model"
        if is_lazy(parameter):
            raise ValueError(f"{label} has no shape yet: run a forward pass first")
        if type(parameter.data) is not Tensor:
            raise TypeError(f"{label} must be a plain tensor, got a {type(parameter.data).__name__}")
        check_tensor(group, label, parameter, written=True)
        if parameter.requires_grad:
            op.check(parameter.dtype)
            trained[name] = parameter
    for name, buffer in model.named_buffers():
        check_tensor(group, f"buffer {name!r} of model", buffer, written=True)
    if not trained:
        raise ValueError("model has no parameter that requires a gradient")
    return trained


def check_unchanged(model: nn.Module, names: Sequence[str], parameters: Sequence[nn.Parameter]) -> None:
    """Raise RuntimeError if other parameters than ``parameters`` require a gradient now."""
    now = {id(each) for each in model.parameters() if each.requires_grad}
    if len(now) == len(parameters) and all(id(each) in now for each in parameters):
        return
    known = {id(each) for each in parameters}
    advice = "close() the reducer and make another one"
    for name, each in model.named_parameters():
        if id(each) in now and id(each) not in known:
            raise RuntimeError(
                f"parameter {name!r} of model requires a gradient, but did not when the reducer was made: {advice}"
            )
    gone = next(name for name, each in zip(names, parameters, strict=True) if id(each) not in now)
    raise RuntimeError(
        f"parameter {gone!r} required a gradient when the reducer was made, and does not now or was removed: {advice}"
    )


def _info(comm: Comm) -> CommInfo:
    return CommInfo(comm.name, comm.rank, comm.size, comm.device)
