"""The ring of a sender: what it takes, it gives back."""

import pytest
import torch

from dflash_ray.transport import channel as transport
from dflash_ray.transport.peer import PeerError


def test_buffers_taken_before_the_memory_ended_are_given_back(monkeypatch):
    held = set()

    class Buffer:
        """A GPU with room for one."""

        def __init__(self, _nbytes, _device):
            if held:
                raise PeerError("cuMemAlloc_v2: out of memory")
            held.add(self)

        def free(self):
            held.remove(self)

    monkeypatch.setattr(transport, "SharedBuffer", Buffer)
    sender = transport.Sender(torch.device("cpu"))
    with pytest.raises(PeerError, match="out of memory"):
        sender.offer(3, 1024)
    assert len(held) == 1
    sender.close_direct()
    assert not held
