"""What holds for the process that pytest runs in."""

import gc

import pytest
import torch

# The tensors of tests are small, and a second thread of torch's would take turns with rank processes, waiting busily.
torch.set_num_threads(1)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Leave what stays out of all collections: looking at torch and thousands of tests takes each half a second."""
    gc.collect()
    gc.freeze()
