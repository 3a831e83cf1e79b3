"""Collective communication for PyTorch tensors that you can await.

``new_comm`` makes a Comm, its methods return Works, ``run`` runs a program. See the README for the contract.
"""

from asynccomm.backends.registry import backend_names as backend_names
from asynccomm.comm import Comm as Comm
from asynccomm.comm import CommStatistics as CommStatistics
from asynccomm.connect import new_comm as new_comm
from asynccomm.errors import AbortedError as AbortedError
from asynccomm.errors import AsyncCommError as AsyncCommError
from asynccomm.errors import BackendError as BackendError
from asynccomm.errors import BrokenError as BrokenError
from asynccomm.errors import ClosedError as ClosedError
from asynccomm.errors import CollectiveMismatchError as CollectiveMismatchError
from asynccomm.errors import CollectiveTimeoutError as CollectiveTimeoutError
from asynccomm.errors import PeerLostError as PeerLostError
from asynccomm.errors import RendezvousError as RendezvousError
from asynccomm.errors import StoreError as StoreError
from asynccomm.errors import StoreProtocolError as StoreProtocolError
from asynccomm.errors import StoreTimeoutError as StoreTimeoutError
from asynccomm.errors import WouldBlockError as WouldBlockError
from asynccomm.options import CommOptions as CommOptions
from asynccomm.reduce_op import RedOpType as RedOpType
from asynccomm.reduce_op import ReduceOp as ReduceOp
from asynccomm.runner import run as run
from asynccomm.store.base import PrefixStore as PrefixStore
from asynccomm.store.base import Store as Store
from asynccomm.store.client import StoreClient as StoreClient
from asynccomm.store.memory import MemoryStore as MemoryStore
from asynccomm.store.torch_store import TorchStore as TorchStore
from asynccomm.version import __version__ as __version__
from asynccomm.work import Work as Work
