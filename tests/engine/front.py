"""What the processes of the test of a frozen front run: steps, and what each stage keeps, runs and sends in them."""

from functools import partial

import pytest
import torch.distributed as dist
from torch.autograd.graph import saved_tensors_hooks

from omnibal.engine.engine import OmnibalEngine
from tests.engine.cases import several_steps


def watched_steps(cases):
    """As ``several_steps``, each case with what ``_watch`` sees of it."""
    results = []
    for case in cases:
        with pytest.MonkeyPatch.context() as patch:
            seen = _watch(patch)
            results += [seen | result for result in several_steps([case])]
    return results


def _watch(patch):
    """The most bytes that autograd kept of a forward pass, how many backward passes ran, tensors sent upwards."""
    seen = {"kept": 0, "backward": 0, "sent up": 0}

    def forward(engine, buffer_id, run=OmnibalEngine._exec_forward_pass):
        saved = []

        def save(tensor):
            saved.append(tensor.untyped_storage().nbytes())
            return tensor

        with saved_tensors_hooks(save, lambda tensor: tensor):
            run(engine, buffer_id)
        seen["kept"] = max(seen["kept"], sum(saved))

    def backward(engine, buffer_id, run=OmnibalEngine._exec_backward_pass):
        seen["backward"] += 1
        run(engine, buffer_id)

    def send(run, tensor, dst, *arguments, **options):
        seen["sent up"] += dst < dist.get_rank() and tensor.numel() > 1  # one number tries a link
        return run(tensor, dst, *arguments, **options)

    patch.setattr(OmnibalEngine, "_exec_forward_pass", forward)
    patch.setattr(OmnibalEngine, "_exec_backward_pass", backward)
    for name in ("send", "isend"):
        patch.setattr(dist, name, partial(send, getattr(dist, name)))
    return seen
