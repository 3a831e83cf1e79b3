"""Memory for steps: that of the operation's tensors where it fits, else new memory."""

import torch

from asynccomm.backends.hierarchical.memory import cut, landing, room, stored_dtype


def test_tensors_that_adjoin_are_their_own_memory() -> None:
    whole = torch.zeros(6)
    memory, fill = landing(whole.split(2))
    assert fill is None
    assert memory.data_ptr() == whole.data_ptr()
    assert memory.numel() == 24


def test_other_tensors_are_filled_at_the_end() -> None:
    outputs = [torch.zeros(2, 2).t(), torch.zeros(1, dtype=torch.int64)]
    memory, fill = landing(outputs)
    memory[:16].view(torch.float32).copy_(torch.arange(4.0))
    memory[16:].view(torch.int64).fill_(7)
    assert fill is not None
    fill()
    assert outputs[0].flatten().tolist() == [0, 1, 2, 3]
    assert outputs[1].item() == 7


def test_tensors_of_inference_mode_are_filled_at_the_end() -> None:
    with torch.inference_mode():
        output = torch.zeros(2)
        memory = room(4)
    assert not memory.is_inference()
    found, fill = landing([output])
    found.view(torch.float32).fill_(3)
    assert fill is not None
    fill()
    assert output.tolist() == [3, 3]


def test_elements_are_stored_as_reals() -> None:
    assert stored_dtype(torch.complex64) == torch.float32
    assert stored_dtype(torch.bool) == torch.uint8
    assert stored_dtype(torch.uint64) == torch.int64
    assert stored_dtype(torch.float16) == torch.float16


def test_the_first_parts_are_larger() -> None:
    assert cut(7, 3) == [3, 2, 2]
    assert cut(1, 3) == [1, 0, 0]
