"""The errors of queues."""

import pickle

from asynccomm import AsyncCommError, EndOfQueueError, ParticipantLostError, QueueError


def test_errors_survive_pickle_and_are_errors_of_the_package() -> None:
    for error in (ParticipantLostError("process 7 on a", "gone"), EndOfQueueError("over"), QueueError("failed")):
        copy = pickle.loads(pickle.dumps(error))
        assert type(copy) is type(error)
        assert str(copy) == str(error)
        assert isinstance(copy, AsyncCommError)
    assert str(ParticipantLostError("process 7 on a", "gone")) == "process 7 on a was lost: gone"
