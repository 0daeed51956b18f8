"""What fillers are there for: without them ranks wait for each other, until their collectives give up.

Where ranks wait in collectives of unlike sizes, gloo says so and ends them; NCCL would go on waiting.
"""

from datetime import timedelta

import pytest
import torch.distributed as dist
from torch.distributed import distributed_c10d

pytest.importorskip("accelerate")

from omnibal.integrations.transformers import balance
from omnibal.packs.loading import Pack, PackSampler
from tests.engine.launch import launch
from tests.integrations.trainers import LIMITS, Case, accelerate_afresh, trainer_of

PATIENCE = timedelta(seconds=20)
"""How long a collective waits for the other ranks: many times as long as a step takes."""


class WithoutImages(PackSampler):
    """Packs without an image stay so."""

    def packs_of_all_ranks(self, step):
        return [Pack(pack) if pack else pack for pack in super().packs_of_all_ranks(step)]


class WithoutEmptyPacks(PackSampler):
    """Packs that hold nothing are left out, so ranks have unlike numbers of micro-batches."""

    def __iter__(self):
        return (pack for pack in super().__iter__() if pack)


def train(case, kind, folder):
    """On each process."""
    distributed_c10d._set_pg_timeout(PATIENCE)
    distributed_c10d._get_default_timeout = lambda _: PATIENCE  # of groups to come
    with accelerate_afresh():
        trainer = trainer_of(case, folder, num_train_epochs=2)
        sampler = balance(trainer, LIMITS[case.family])
        if kind is not None:
            sampler.__class__ = kind
        trainer.train()
    return dist.get_rank()


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("layout", ["zero3", "fsdp"])
@pytest.mark.parametrize(("kind", "samples"), [(WithoutImages, None), (WithoutEmptyPacks, 3)])
def test_ranks_wait_without_fillers_alone(layout, kind, samples, tmp_path):
    case, run = Case("internvl", layout, samples=samples), "tests.integrations.test_waiting:train"
    assert launch(2, run, case, None, tmp_path / "with", ends=True) == [0, 1]
    with pytest.raises(AssertionError, match=r"collective mismatch|[Tt]imed out"):
        launch(2, run, case, kind, tmp_path / "without", ends=True)
