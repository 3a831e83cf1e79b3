"""Async version of ``torch.distributed``: the same names and arguments, with results to await.

::

    import asynccomm.compat.c10d as dist

    await dist.init_process_group("auto")
    await dist.all_reduce(tensor)
    work = dist.all_gather_into_tensor(output, tensor, async_op=True)
    ...
    await work
    await dist.destroy_process_group()

A call submits its operation at once, as everywhere in asynccomm. ``await`` on the returned object gives the output,
where torch gives None. ``async_op=True`` returns a handle with the methods of torch's Work. The rules are torch's: one
default group; global ranks, unless ``group_dst`` or ``group_src`` is given; a warning and None if this rank is not in
the group. Transports and errors are asynccomm's.
"""

from asynccomm.compat.c10d import backends as _backends_module
from asynccomm.compat.c10d import coalescing as _coalescing_module
from asynccomm.compat.c10d import collectives as _moves_module
from asynccomm.compat.c10d import destroy as _ending_module
from asynccomm.compat.c10d import groups as _groups_module
from asynccomm.compat.c10d import init as _init_module
from asynccomm.compat.c10d import logs as _logs_module
from asynccomm.compat.c10d import objects as _objects_module
from asynccomm.compat.c10d import p2p as _messages_module
from asynccomm.compat.c10d import private as _internals_module
from asynccomm.compat.c10d import ranks as _ranks_module
from asynccomm.compat.c10d import reductions as _reductions_module
from asynccomm.compat.c10d import rendezvous_handlers as _meeting_module
from asynccomm.compat.c10d import shrinking as _shrinking_module
from asynccomm.compat.c10d import types as _types_module
from asynccomm.compat.c10d import validation as _checks_module
from asynccomm.compat.c10d import world as _world_module
from asynccomm.compat.c10d.backends import Backend as Backend
from asynccomm.compat.c10d.backends import BackendConfig as BackendConfig
from asynccomm.compat.c10d.backends import get_default_backend_for_device as get_default_backend_for_device
from asynccomm.compat.c10d.backends import is_backend_available as is_backend_available
from asynccomm.compat.c10d.backends import is_gloo_available as is_gloo_available
from asynccomm.compat.c10d.backends import is_mpi_available as is_mpi_available
from asynccomm.compat.c10d.backends import is_nccl_available as is_nccl_available
from asynccomm.compat.c10d.backends import is_ucc_available as is_ucc_available
from asynccomm.compat.c10d.backends import is_xccl_available as is_xccl_available
from asynccomm.compat.c10d.collectives import all_gather as all_gather
from asynccomm.compat.c10d.collectives import all_gather_coalesced as all_gather_coalesced
from asynccomm.compat.c10d.collectives import all_gather_into_tensor as all_gather_into_tensor
from asynccomm.compat.c10d.collectives import all_gather_single as all_gather_single
from asynccomm.compat.c10d.collectives import all_to_all as all_to_all
from asynccomm.compat.c10d.collectives import all_to_all_single as all_to_all_single
from asynccomm.compat.c10d.collectives import barrier as barrier
from asynccomm.compat.c10d.collectives import broadcast as broadcast
from asynccomm.compat.c10d.collectives import gather as gather
from asynccomm.compat.c10d.collectives import gather_into_tensor as gather_into_tensor
from asynccomm.compat.c10d.collectives import gather_single as gather_single
from asynccomm.compat.c10d.collectives import monitored_barrier as monitored_barrier
from asynccomm.compat.c10d.collectives import scatter as scatter
from asynccomm.compat.c10d.destroy import destroy_process_group as destroy_process_group
from asynccomm.compat.c10d.destroy import set_timeout as set_timeout
from asynccomm.compat.c10d.groups import new_group as new_group
from asynccomm.compat.c10d.groups import new_subgroups as new_subgroups
from asynccomm.compat.c10d.groups import new_subgroups_by_enumeration as new_subgroups_by_enumeration
from asynccomm.compat.c10d.groups import split_group as split_group
from asynccomm.compat.c10d.init import init_process_group as init_process_group
from asynccomm.compat.c10d.objects import all_gather_object as all_gather_object
from asynccomm.compat.c10d.objects import broadcast_object_list as broadcast_object_list
from asynccomm.compat.c10d.objects import gather_object as gather_object
from asynccomm.compat.c10d.objects import recv_object_list as recv_object_list
from asynccomm.compat.c10d.objects import scatter_object_list as scatter_object_list
from asynccomm.compat.c10d.objects import send_object_list as send_object_list
from asynccomm.compat.c10d.p2p import P2POp as P2POp
from asynccomm.compat.c10d.p2p import batch_isend_irecv as batch_isend_irecv
from asynccomm.compat.c10d.p2p import irecv as irecv
from asynccomm.compat.c10d.p2p import isend as isend
from asynccomm.compat.c10d.p2p import recv as recv
from asynccomm.compat.c10d.p2p import send as send
from asynccomm.compat.c10d.private import get_backend_impl as get_backend_impl
from asynccomm.compat.c10d.process_group import ProcessGroup as ProcessGroup
from asynccomm.compat.c10d.ranks import get_backend as get_backend
from asynccomm.compat.c10d.ranks import get_backend_config as get_backend_config
from asynccomm.compat.c10d.ranks import get_global_rank as get_global_rank
from asynccomm.compat.c10d.ranks import get_group_rank as get_group_rank
from asynccomm.compat.c10d.ranks import get_node_local_rank as get_node_local_rank
from asynccomm.compat.c10d.ranks import get_pg_count as get_pg_count
from asynccomm.compat.c10d.ranks import get_process_group_ranks as get_process_group_ranks
from asynccomm.compat.c10d.ranks import get_rank as get_rank
from asynccomm.compat.c10d.ranks import get_world_size as get_world_size
from asynccomm.compat.c10d.ranks import is_torchelastic_launched as is_torchelastic_launched
from asynccomm.compat.c10d.reductions import all_reduce as all_reduce
from asynccomm.compat.c10d.reductions import all_reduce_coalesced as all_reduce_coalesced
from asynccomm.compat.c10d.reductions import reduce as reduce
from asynccomm.compat.c10d.reductions import reduce_scatter as reduce_scatter
from asynccomm.compat.c10d.reductions import reduce_scatter_single as reduce_scatter_single
from asynccomm.compat.c10d.reductions import reduce_scatter_tensor as reduce_scatter_tensor
from asynccomm.compat.c10d.rendezvous_handlers import register_rendezvous_handler as register_rendezvous_handler
from asynccomm.compat.c10d.rendezvous_handlers import rendezvous as rendezvous
from asynccomm.compat.c10d.shrinking import shrink_group as shrink_group
from asynccomm.compat.c10d.types import PG_WRAPPER_STORE_PREFIX as PG_WRAPPER_STORE_PREFIX
from asynccomm.compat.c10d.types import SHRINK_ABORT as SHRINK_ABORT
from asynccomm.compat.c10d.types import SHRINK_DEFAULT as SHRINK_DEFAULT
from asynccomm.compat.c10d.types import STORE_BASED_BARRIER_PREFIX as STORE_BASED_BARRIER_PREFIX
from asynccomm.compat.c10d.types import AllgatherOptions as AllgatherOptions
from asynccomm.compat.c10d.types import AllreduceCoalescedOptions as AllreduceCoalescedOptions
from asynccomm.compat.c10d.types import AllreduceOptions as AllreduceOptions
from asynccomm.compat.c10d.types import AllToAllOptions as AllToAllOptions
from asynccomm.compat.c10d.types import BarrierOptions as BarrierOptions
from asynccomm.compat.c10d.types import BroadcastOptions as BroadcastOptions
from asynccomm.compat.c10d.types import DebugLevel as DebugLevel
from asynccomm.compat.c10d.types import DistBackendError as DistBackendError
from asynccomm.compat.c10d.types import DistError as DistError
from asynccomm.compat.c10d.types import DistNetworkError as DistNetworkError
from asynccomm.compat.c10d.types import DistStoreError as DistStoreError
from asynccomm.compat.c10d.types import FileStore as FileStore
from asynccomm.compat.c10d.types import GatherOptions as GatherOptions
from asynccomm.compat.c10d.types import GroupName as GroupName
from asynccomm.compat.c10d.types import HashStore as HashStore
from asynccomm.compat.c10d.types import PrefixStore as PrefixStore
from asynccomm.compat.c10d.types import ReduceOp as ReduceOp
from asynccomm.compat.c10d.types import ReduceOptions as ReduceOptions
from asynccomm.compat.c10d.types import ReduceScatterOptions as ReduceScatterOptions
from asynccomm.compat.c10d.types import ScatterOptions as ScatterOptions
from asynccomm.compat.c10d.types import Store as Store
from asynccomm.compat.c10d.types import TCPStore as TCPStore
from asynccomm.compat.c10d.types import default_pg_nccl_timeout as default_pg_nccl_timeout
from asynccomm.compat.c10d.types import default_pg_timeout as default_pg_timeout
from asynccomm.compat.c10d.types import get_debug_level as get_debug_level
from asynccomm.compat.c10d.types import is_available as is_available
from asynccomm.compat.c10d.types import reduce_op as reduce_op
from asynccomm.compat.c10d.types import supports_complex as supports_complex
from asynccomm.compat.c10d.work import Work as Work
from asynccomm.compat.c10d.world import GroupMember as GroupMember
from asynccomm.compat.c10d.world import World as World
from asynccomm.compat.c10d.world import group as group
from asynccomm.compat.c10d.world import is_initialized as is_initialized
from asynccomm.compat.c10d.world import use_world as use_world
from asynccomm.observe.profiling import record_comm as record_comm

_NOT_EXPORTED = {  # by torch, either
    "AllgatherOptions",
    "DistBackendError",
    "DistError",
    "DistNetworkError",
    "DistStoreError",
    "FileStore",
    "HashStore",
    "PG_WRAPPER_STORE_PREFIX",
    "SHRINK_ABORT",
    "SHRINK_DEFAULT",
    "STORE_BASED_BARRIER_PREFIX",
    "TCPStore",
    "World",
    "default_pg_nccl_timeout",
    "is_available",
    "register_rendezvous_handler",
    "rendezvous",
    "use_world",
}
_Module = type(_types_module)
__all__ = [
    name
    for name, value in vars().items()
    if name[0] != "_" and name not in _NOT_EXPORTED and type(value) is not _Module
]

# private names of torch's module that programs use
_abort_process_group = _ending_module.abort_process_group
_add_ephemeral_timeout_for_all_pgs = _ending_module.add_ephemeral_timeout
_all_gather_base = _moves_module.all_gather_base
_as_iterable = _internals_module.as_iterable
_canonicalize_group_rank = _ranks_module.canonical_rank
_check_not_self_rank = _internals_module.check_not_self_rank
_check_op = _internals_module.check_op
_check_single_backend_availability = _backends_module.is_single_available
_check_p2p_op_list = _messages_module.check_p2p_ops
_check_single_tensor = _internals_module.check_single_tensor
_check_tensor_list = _internals_module.check_tensor_list
_check_valid_timeout = _types_module.check_valid_timeout
_coalescing_manager = _coalescing_module.coalescing_manager
_CoalescingManager = _coalescing_module.CoalescingManager
_cleanup_original_group = _shrinking_module.cleanup_original_group
_cleanup_process_group_global_state = _shrinking_module.cleanup_process_group_global_state
_CollOp = _coalescing_module.CollOp
_create_process_group_wrapper = _internals_module.process_group_wrapper
_create_shrunk_process_group = _shrinking_module.create_shrunk_process_group
_destroy_all_other_groups = _shrinking_module.destroy_all_other_groups
_device_capability = _objects_module.device_capability
_dump_fr_trace = _internals_module.dump_fr_trace
_dump_fr_trace_json = _internals_module.dump_fr_trace_json
_ensure_all_tensors_same_dtype = _checks_module.check_same_dtype
_export_c_types = _types_module.export_c_types
_extract_group_metadata = _shrinking_module.extract_group_metadata
_exception_logger = _logs_module.logged
_finalize_shrunk_group = _shrinking_module.finalize_shrunk_group
_find_or_create_pg_by_ranks_and_tag = _groups_module.find_or_create_group
_find_pg_by_ranks_and_tag = _internals_module.find_group
_get_all_pg_configs = _internals_module.all_pg_configs
_get_backend_from_str = _internals_module.backend_from_str
_get_default_group = _world_module.default_group
_get_default_store = _internals_module.default_store
_get_default_timeout = _types_module.default_timeout
_get_global_rank = _internals_module.deprecated_global_rank
_get_group_size = _internals_module.group_size
_get_group_size_by_name = _internals_module.group_size_by_name
_get_group_tag = _internals_module.group_tag
_get_object_coll_device = _objects_module.object_device
_get_pg_config = _internals_module.pg_config
_get_pg_default_device = _objects_module.pg_default_device
_get_process_group_name = _internals_module.name_of
_get_process_group_store = _internals_module.group_store
_get_process_group_uid = _internals_module.group_uid
_get_split_source = _internals_module.split_source
_GLOO_AVAILABLE = _backends_module._GLOO_AVAILABLE
_group_or_default_group = _world_module.group_or_default
_hash_ranks_to_str = _internals_module.hash_ranks
_GroupMetadata = _shrinking_module.GroupMetadata
_IllegalWork = _coalescing_module.IllegalWork
_is_barrier_after_init = _init_module.barrier_after_init
_is_safe_to_split = _groups_module.is_safe_to_split
_MPI_AVAILABLE = _backends_module._MPI_AVAILABLE
_NCCL_AVAILABLE = _backends_module._NCCL_AVAILABLE
_new_process_group_helper = _groups_module.new_process_group_helper
_new_group_with_tag = _groups_module.new_group_with_tag
_object_to_tensor = _objects_module.object_to_tensor
_prepare_shrink_target_group = _shrinking_module.prepare_shrink_target_group
_process_group_color = _groups_module.process_group_color
_process_group_name = _internals_module.process_group_name
_rank_not_in_group = _internals_module.is_not_in_group
_reduce_scatter_base = _reductions_module.reduce_scatter_base
_reset_fr_trace = _internals_module.reset_fr_trace
_resolve_group_name_by_ranks_and_tag = _internals_module.resolve_name
_resolve_process_group = _internals_module.resolve_group
_set_pg_timeout = _ending_module.set_timeout
_ShrinkGroupInfo = _shrinking_module.ShrinkGroupInfo
_store_based_barrier = _meeting_module.store_based_barrier
_tensor_to_object = _objects_module.tensor_to_object
_time_estimator = _coalescing_module.time_estimator
_time_logger = _logs_module.timed
_TimeEstimator = _coalescing_module.TimeEstimator
_UCC_AVAILABLE = _backends_module._UCC_AVAILABLE
_update_default_pg = _init_module.update_default_pg
_validate_and_process_excluded_ranks = _shrinking_module.validate_and_process_excluded_ranks
_validate_output_list_for_rank = _internals_module.validate_output_list
_validate_shrink_backend_requirements = _shrinking_module.validate_shrink_backend_requirements
_validate_shrink_inputs = _shrinking_module.validate_shrink_inputs
_warn_not_in_group = _internals_module.warn_not_in_group
_World = _world_module.World
_WorldMeta = _world_module._WorldMeta
_XCCL_AVAILABLE = _backends_module._XCCL_AVAILABLE


def __getattr__(name: str) -> object:
    if name == "_world":
        return _world_module.world()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
