"""What is common to all training loops; tests/integrations/test_hosts.py trains in them."""

import os
import subprocess
import sys
from functools import partial

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset

from omnibal.data.lengths import SampleLengths
from omnibal.data.limits import PackLimits
from omnibal.errors import ConfigError, DataError
from omnibal.integrations import lengths as lengths_module
from omnibal.integrations.loops import TOKEN_WEIGHT, ItemCollator, balanced_loader, item_loads, pack_loss
from omnibal.packs.loading import PackItems, PaddedSampler, PlannedLoads
from tests.families.models import small_config
from tests.integrations.items import Collate, items_of
from tests.vlm.families import plain_backward, plain_family_model

LIMITS = PackLimits(7, 60)


def loader_of(**options):
    items = items_of("internvl")
    options = {"model": plain_family_model(small_config("internvl")), "micro_batches": 2, **options}
    return items, options["model"], balanced_loader(items, Collate("internvl"), LIMITS, **options)


def test_losses_of_a_step_add_up_to_the_mean_over_its_targets():
    items, model, loader = loader_of()
    packs = loader.pack_sampler.packs_of_all_ranks(0)
    expected = plain_backward(model, [items[sample] for pack in packs for sample in pack])[0]
    batches = iter(loader)
    assert sum(pack_loss(model, next(batches)).item() for _ in packs) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_state_counts_the_steps_taken_and_not_what_workers_prefetched(workers):
    _, _, loader = loader_of(num_workers=workers)
    loader.set_epoch(1)
    whole = [batch["input_ids"].tolist() for batch in loader]
    assert len(whole) == len(loader) > 4
    loader.set_epoch(0)
    loader.set_epoch(1)
    batches = iter(loader)
    for _ in range(3):  # a step and a half
        next(batches)
    _, _, again = loader_of(num_workers=workers)
    again.load_state_dict(loader.state_dict())
    assert again.epoch == 1
    again.set_epoch(1)  # as loops and trainers do
    assert [batch["input_ids"].tolist() for batch in again] == whole[2:]
    assert again.state_dict()["steps_done"] == len(whole) // 2


def test_a_loader_that_accelerate_makes_anew_weighs_tokens_alike():
    skip_first_batches = pytest.importorskip("accelerate").skip_first_batches
    _, _, loader = loader_of()
    weights = [batch[TOKEN_WEIGHT].item() for batch in loader]
    loader.set_epoch(1)
    loader.set_epoch(0)
    assert len({*weights}) > 1
    assert [batch[TOKEN_WEIGHT].item() for batch in skip_first_batches(loader, 3)] == weights[3:]


def test_hosts_that_count_targets_get_the_arguments_of_the_model_alone():
    _, model, loader = loader_of(weigh_tokens=False)
    batch = next(iter(loader))
    assert TOKEN_WEIGHT not in batch
    assert model(**batch).logits.shape[1] == batch["input_ids"].shape[1]


def test_parts_of_a_dataset_get_the_shares_that_are_asked():
    items = ConcatDataset([items_of("internvl"), items_of("internvl")])
    loader = balanced_loader(items, list, PackLimits(4, 40), weigh_tokens=False, mixture={"0": 3, "1": 1})
    sampler = loader.pack_sampler
    samples = np.concatenate([sampler.step(step).packs.samples for step in range(sampler.num_steps)])
    assert np.mean(samples < items.cumulative_sizes[0]) == pytest.approx(0.75, abs=0.01)
    assert sampler.lengths.source_names == ("0", "1")


def test_a_collator_of_many_items_gets_the_items_of_a_pack():
    items = items_of("internvl")
    loader = balanced_loader(items, list, PackLimits(4, 40), weigh_tokens=False)
    for pack, batch in zip(loader.pack_sampler, loader, strict=True):
        for sample, item in zip(pack, batch, strict=False):
            assert item is items[sample]
        if not pack.fillers:
            assert len(batch) == len(pack)
        else:
            assert not (batch[-1]["labels"] != -100).any()
            assert batch[-1]["input_ids"] is items[pack.fillers[0]]["input_ids"]
            assert (items[pack.fillers[0]]["labels"] != -100).any()
    assert any(pack.fillers for pack in loader.pack_sampler)


class Noting(list):
    """Notes how often this process reads."""

    read = 0

    def __getitem__(self, sample):
        self.read += 1
        return super().__getitem__(sample)


def test_workers_count_lengths_and_a_folder_keeps_them(tmp_path, monkeypatch):
    items, torch_state = Noting(items_of("internvl")), torch.get_rng_state()
    start = partial(balanced_loader, items, list, LIMITS, weigh_tokens=False)
    serial = start().pack_sampler.lengths
    assert items.read == 2 * len(items)  # counted, and compared
    counted = start(num_workers=1, lengths=tmp_path / "lengths").pack_sampler.lengths
    assert items.read == 3 * len(items)
    monkeypatch.setattr(lengths_module, "measured", None)
    kept = start(lengths=tmp_path / "lengths").pack_sampler.lengths
    assert serial.content_hash == counted.content_hash == kept.content_hash
    assert torch.equal(torch.get_rng_state(), torch_state)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_sample_that_cannot_be_read_is_named(workers):
    items = [*items_of("internvl")[:3], {"input_ids": None}]
    with pytest.raises(DataError, match=r"^rank 0: sample 3: KeyError: 'labels'$"):
        balanced_loader(items, list, LIMITS, weigh_tokens=False, num_workers=workers)


class Deadly(list):
    """Ends the worker that reads it, as the system does where memory does not suffice."""

    def __getitem__(self, sample):
        os._exit(1)


def test_a_worker_that_is_killed_ends_the_start():
    with pytest.raises(DataError, match=r"^rank 0: BrokenProcessPool: "):
        balanced_loader(Deadly(items_of("internvl")), list, LIMITS, weigh_tokens=False, num_workers=1)


class Replacing(list):
    """Puts its neighbour in the place of a sample that it can read no more."""

    broken = ()

    def __getitem__(self, sample):
        return super().__getitem__(sample + (sample in self.broken))


def replaced(broken, **options):
    """Draw an epoch of a dataset that breaks after it was measured."""
    dataset = Replacing(items_of("internvl"))
    loader = balanced_loader(dataset, list, LIMITS, weigh_tokens=False, **options)
    dataset.broken = broken
    return [item for batch in loader for item in batch]


def test_a_dataset_that_replaces_samples_is_refused_or_absorbed():
    with pytest.raises(
        DataError, match=r"sample 6 must have the planned .* got .*put another sample in .*absorb_other_lengths=True"
    ):
        replaced({6})
    with pytest.warns(UserWarning, match="sample .* must have .* trained as it is") as warned:
        drawn = replaced({4, 9}, absorb_other_lengths=True)
    assert len([warning for warning in warned if "trained as it is" in str(warning.message)]) == 1
    assert len(drawn) >= 11


def test_a_pack_that_lost_its_only_image_is_never_absorbed():
    planned = PlannedLoads(SampleLengths([2, 0], [30, 20]), absorb=True)
    with pytest.warns(UserWarning, match="sample 0 must have"):
        planned.check([0, 1], [(1, 20, 3), (0, 21, 3)])
    with pytest.raises(DataError, match="samples 0, 1 must have an image among them, as planned, got none"):
        planned.check([0, 1], [(0, 30, 3), (0, 20, 3)])


def test_targets_are_compared_where_they_are_known():
    planned = PlannedLoads(SampleLengths([2], [30], target_tokens=[7]))
    planned.check([0], [(2, 30, 7)])
    with pytest.raises(DataError, match=r"sample 0 must have .* \(2, 30, 7\), got \(2, 30, 8\)"):
        planned.check([0], [(2, 30, 8)])


def test_a_filler_of_items_keeps_all_but_its_targets():
    item = {"input_ids": torch.arange(4), "labels": torch.arange(4), "pixel_values": torch.ones(2, 3)}
    (kept, filler) = ItemCollator(list, item_loads)(PackItems((0, 0), (item, item), num_fillers=1))
    assert kept is item
    assert item_loads(filler) == (2, 4, 0)
    assert item_loads(item) == (2, 4, 3)


def test_lengths_without_targets_cannot_weigh_tokens():
    with pytest.raises(ConfigError, match="lengths must have target_tokens for an exact loss, got none"):
        loader_of(lengths=SampleLengths([1] * 11, [9] * 11))


def test_padded_batches_are_not_checked_as_packs():
    with pytest.raises(ConfigError, match="model must be None where batches are padded, got one"):
        loader_of(padded=True)


def test_padded_batches_are_planned_with_their_padding():
    loader = balanced_loader(items_of("internvl"), Collate("internvl"), PackLimits(24, 96), padded=True)
    assert isinstance(loader.pack_sampler, PaddedSampler)
    assert sum(len(batch["input_ids"]) for batch in loader) >= 11
    assert sorted(sample for pack in loader.pack_sampler for sample in pack) == list(range(11))


def test_neither_transformers_nor_deepspeed_is_needed():
    """Hosts pin transformers of their own, 4.37 and newer."""
    code = """
import sys
for name in ("transformers", "deepspeed", "accelerate"):
    sys.modules[name] = None  # as if it were not installed
import torch
from torch.utils.data import ConcatDataset, DataLoader
from omnibal import PackLimits
from omnibal.integrations.loops import balanced_loader
items = [{"input_ids": torch.arange(9), "labels": torch.arange(9), "pixel_values": None}] * 8
print(len(list(balanced_loader(items, list, PackLimits(4, 30), micro_batches=2, weigh_tokens=False))))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.stdout.strip(), done.stderr) == ("4", "")


def test_what_a_loader_refuses_ends_a_script_in_one_line(monkeypatch, capsys):
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    with pytest.raises(ConfigError, match="model must be None") as refused:
        balanced_loader([], list, LIMITS, model=torch.nn.Linear(1, 1), padded=True)
    sys.excepthook(refused.type, refused.value, refused.tb)
    lines = capsys.readouterr().err.splitlines()
    assert lines == [f"omnibal.errors.ConfigError: {refused.value}"]
