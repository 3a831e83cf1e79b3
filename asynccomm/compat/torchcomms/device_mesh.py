"""A torch DeviceMesh over TorchComms."""

from __future__ import annotations

from torch.distributed.device_mesh import DeviceMesh

from asynccomm.compat.torchcomms.comm import TorchComm
from asynccomm.compat.torchcomms.errors import refusing
from asynccomm.interop import mesh


def init_device_mesh(
    mesh_dim_comms: tuple[TorchComm, ...], mesh_dim_names: tuple[str, ...], _global_comm: TorchComm | None = None
) -> DeviceMesh:
    """Create a DeviceMesh that communicates over ``mesh_dim_comms``; see ``asynccomm.interop.mesh``.

    Raises: TypeError; RuntimeError for a mesh of several dimensions without ``_global_comm``, and for wrong values.
    """
    if not all(isinstance(comm, TorchComm) for comm in mesh_dim_comms):
        raise TypeError(f"mesh_dim_comms must be TorchComms, got {mesh_dim_comms!r}")
    with refusing():
        whole = None if _global_comm is None else _global_comm._comm
        return mesh.init_device_mesh(tuple(comm._comm for comm in mesh_dim_comms), mesh_dim_names, whole)
