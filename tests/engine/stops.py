"""What the processes of test_stops.py run: runs that are asked to end, stand still, or meet what is not finite."""

import os
import signal
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from omnibal.engine.checkpoint import newest_first
from omnibal.engine.initialize import initialize
from omnibal.errors import OmnibalError
from omnibal.train import train
from tests.engine.cases import SmallDataset, _refusal, changed, weights_of
from tests.engine.going_on import PoisonedDataset

UNREADABLE = [(2, 5), (5, 12)]
"""Numbers of samples that each rank cannot read."""
initialize_file = sys.modules[initialize.__module__]  # the package's attribute of that name is the function


class Signalled(SmallDataset):
    """The small samples; a process gets a signal when it reads the n-th of them."""

    def __init__(self, number, after):
        super().__init__()
        self._number, self._left = number, after

    def __getitem__(self, index):
        self._count()
        return super().__getitem__(index)

    def text(self, index):
        self._count()
        return super().text(index)

    def _count(self):
        self._left -= 1
        if self._left == 0:
            os.kill(os.getpid(), self._number)


def asked_to_end(config, output, rank, number):
    """A run of which one rank gets a signal, that run resumed, and one that nobody asks."""
    own = changed(config, "run", output=f"{output}/{number}")
    data = Signalled(number, 9) if dist.get_rank() == rank else SmallDataset()
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    stopped = train(own, dataset=data)
    after = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    checkpoints = [path.name for path in newest_first(stopped.resolved.section.run.files.checkpoints)]
    exported = stopped.resolved.section.run.files.model.exists()
    resumed = train(own, dataset=SmallDataset(), resume=True)
    whole = train(changed(config, "run", output=f"{output}/whole{number}"), dataset=SmallDataset())
    return {
        "steps": (stopped.global_steps, resumed.global_steps, whole.global_steps),
        "checkpoints": checkpoints,
        "exported": exported,
        "restored": before == after,
        "weights": (weights_of(resumed), weights_of(whole)),
    }


def stands_still(config, rank, folder):
    """Train without end; this rank is stopped when it has been heard of in many steps."""
    data = Signalled(signal.SIGSTOP, 50) if dist.get_rank() == rank else SmallDataset()
    engine, *_ = initialize(config=config, dataset=data)
    (Path(folder) / str(dist.get_rank())).write_text(str(os.getpid()))
    while True:
        engine.train_batch()


def fails_in_a_pass(config, rank):
    """Train without end; this rank raises in a forward pass of the second step."""
    engine, *_ = initialize(config=config, dataset=SmallDataset())
    engine.train_batch()

    def fail(*_):
        raise ValueError("my layer fails")

    if dist.get_rank() == rank:
        engine.module.forward_funcs[0].register_forward_hook(fail)
    engine.train_batch()


def dies_while_saving(config, rank, folder):
    """Save without end; this rank is killed in the second saving."""
    engine, *_ = initialize(config=config, dataset=SmallDataset())
    engine.train_batch()
    engine.save_checkpoint(folder)
    if dist.get_rank() == rank:
        engine.checkpoint_engine.save = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    engine.save_checkpoint(folder, "again")


def refused(config, skipping):
    """What this rank hears of a step that is not finite, and of ranks that differ; what it leaves out."""
    return refuses_what_is_not_finite(config), refuses_what_differs(config), [*map(leaves_out, skipping)]


class Unreadable(SmallDataset):
    """The small samples; on each rank others of `UNREADABLE` cannot be read."""

    def __getitem__(self, index):
        self._check(index)
        return super().__getitem__(index)

    def text(self, index):
        self._check(index)
        return super().text(index)

    def _check(self, index):
        if index in UNREADABLE[dist.get_rank()]:
            raise OSError(f"no picture {index}")


def leaves_out(config):
    """An epoch of samples of which some cannot be read, its held-out loss, and a dataset that cannot be read at all."""
    engine, _, loader, _ = initialize(config=config, dataset=Unreadable())
    steps = []
    for _ in range(loader.steps_per_epoch):
        loss = engine.train_batch().item()
        packs = loader.feed.sampler.step(engine.last_step.index).packs
        steps.append((loss, packs.samples.tolist(), engine.last_step))
    left_out = dict(loader.left_out)
    evaluation = engine.evaluate(engine.held_out_loader(Unreadable()))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys.modules[__name__], "UNREADABLE", [range(32)] * 2)
        said = _refusal(engine.train_batch)
    return steps, left_out, evaluation, said


def refuses_what_is_not_finite(config):
    """What a run says that is to end at the first such step."""
    engine, _, loader, _ = initialize(config=changed(config, "run", not_finite="error"), dataset=PoisonedDataset(13))
    with pytest.raises(OmnibalError) as caught:
        for _ in range(loader.steps_per_epoch):
            engine.train_batch()
    return str(caught.value)


def refuses_what_differs(config):
    """What ranks hear whose ds_configs differ, or whose versions do."""
    rank = dist.get_rank()
    configs = [changed(config, "run", save_every=rank), changed(config, "packing", seed=rank)]
    found = [_refusal(lambda other=other: initialize(config=other, dataset=SmallDataset())) for other in configs]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(initialize_file, "version", lambda package: f"{rank}.0")
        return [*found, _refusal(lambda: initialize(config=config, dataset=SmallDataset()))]
