"""While a step runs the next one is read, whole and no further; a resumed run goes on exactly all the same."""

import multiprocessing
from types import SimpleNamespace

import pytest
import torch

from omnibal.data.lengths import SampleLengths
from omnibal.data.limits import PackLimits
from omnibal.engine.initialize import warn_of_float32
from omnibal.engine.loader import Loader, warn_of_added_end, warn_of_long_samples, warn_of_other_data
from omnibal.engine.reading import PackReader
from omnibal.errors import DataError
from omnibal.feeds.feed import PacksFromHere
from omnibal.feeds.sampler import BalancedBatchSampler
from omnibal.pipeline.partition import Partition
from omnibal.plan import Plan
from tests.engine.cases import SmallDataset
from tests.engine.small import PIXEL_SHAPE

MICRO_BATCHES = 8  # more than the two packs that a worker reads ahead by itself


class CountedDataset(SmallDataset):
    """Counts the samples that workers have read, and lets others wait for them."""

    def __init__(self, broken=None):
        super().__init__(copies=8)
        self._broken = broken
        self.read = multiprocessing.Value("i", 0)
        self.more = multiprocessing.Condition(self.read.get_lock())

    def __getitem__(self, index):
        if index == self._broken:
            raise DataError(f"image must be decodable, got picture.png (sample {index})")
        sample = super().__getitem__(index)
        with self.more:
            self.read.value += 1
            self.more.notify_all()
        return sample

    def text(self, index):
        return self[index] | {"pixel_values": None}

    def wait_for(self, samples):
        """How many are read once these are, or when workers have been idle for long."""
        with self.more:
            self.more.wait_for(lambda: self.read.value >= samples, timeout=20)
            return self.read.value


def sampler_of(dataset, micro_batches=MICRO_BATCHES):
    limits = PackLimits(4, 48)
    return BalancedBatchSampler(
        dataset.lengths(), limits, num_replicas=1, rank=0, micro_batches=micro_batches, method="isf"
    )


def loader_of(dataset, *, view="images", workers=1, **options):
    reader = PackReader(view=view, pixel_shape=PIXEL_SHAPE, workers=workers, **options)
    return Loader(reader.feed(dataset, sampler_of(dataset)), reader)


def steps_of(loader, count):
    return [loader.next_step() for _ in range(count)]


def is_same(one, other):
    return all(
        step == expected
        and all(torch.equal(batch[key], value) for batch, pack in zip(a, b, strict=True) for key, value in pack.items())
        for (step, a), (expected, b) in zip(one, other, strict=True)
    )


@pytest.mark.parametrize(("view", "workers"), [("images", 1), ("images", 3), ("text", 2)])
def test_the_next_step_is_read_whole_while_a_step_runs(view, workers):
    dataset = CountedDataset()
    loader = loader_of(dataset, view=view, workers=workers)
    plan = sampler_of(dataset)
    sizes = [plan.step(index).num_samples for index in range(plan.num_steps)]
    assert len(sizes) >= 3
    for step in range(2):
        loader.next_step()  # and nothing else is asked for: what follows is read by itself
        assert dataset.wait_for(sum(sizes[: step + 2])) >= sum(sizes[: step + 2])
    packs_ahead = loader.feed._reader._iterator._tasks_outstanding
    assert MICRO_BATCHES <= packs_ahead < MICRO_BATCHES + workers


def test_the_first_step_of_the_next_epoch_is_read_during_the_last_one():
    dataset = CountedDataset()
    loader = loader_of(dataset)
    steps_of(loader, loader.steps_per_epoch)
    assert loader.feed.sampler.epoch == 0
    later = sampler_of(dataset)
    later.set_epoch(1)
    expected = len(dataset) + later.step(0).num_samples
    assert dataset.wait_for(expected) >= expected


@pytest.mark.parametrize("workers", [0, 2])
def test_epochs_go_on_and_a_resumed_loader_gives_the_same_steps(workers):
    dataset = SmallDataset(copies=8)
    loader = loader_of(dataset, workers=workers)
    before = loader.steps_per_epoch - 1
    steps_of(loader, before)
    state = loader.state_dict()
    expected = steps_of(loader, 3)  # across the end of an epoch
    assert [step.epoch for step, _ in expected] == [0, 1, 1]
    loader.load_state_dict(state)
    assert is_same(steps_of(loader, 3), expected)
    resumed = loader_of(dataset, workers=2 - workers)
    resumed.load_state_dict(state)
    assert is_same(steps_of(resumed, 3), expected)
    assert resumed.state_dict() == loader.state_dict()


def test_a_loader_reads_what_the_sampler_plans():
    dataset = SmallDataset(copies=8)
    loader, plan = loader_of(dataset, workers=2), sampler_of(dataset)
    for epoch in range(3):
        plan.set_epoch(epoch)
        for index, pack in enumerate(plan):
            if index % MICRO_BATCHES == 0:
                step, batches = loader.next_step()
                assert (step.epoch, step.index) == (epoch, index // MICRO_BATCHES)
            ids = [dataset.text(sample)["input_ids"] for sample in pack] or [torch.tensor([0])]
            assert torch.equal(batches[index % MICRO_BATCHES]["input_ids"][0], torch.cat(ids))


def test_an_epoch_that_is_read_ahead_is_planned_once():
    sampler = sampler_of(SmallDataset(copies=8))
    ahead = iter(PacksFromHere(sampler))
    for _ in range(len(sampler) + 1):
        next(ahead)
    sampler.set_epoch(1)
    assert sampler._epoch is sampler._begin(1)
    assert sampler._epoch._windows  # planned by the one who read ahead


def test_a_broken_sample_is_told_in_the_step_that_has_it_and_not_before():
    dataset = CountedDataset()
    plan = sampler_of(dataset)
    broken = int(plan.step(1).pack(0, 0)[0])
    loader = loader_of(CountedDataset(broken=broken), workers=2)
    loader.next_step()
    with pytest.raises(DataError) as caught:
        loader.next_step()
    assert str(caught.value) == f"image must be decodable, got picture.png (sample {broken})"


def test_pixels_come_in_the_dtype_of_the_model():
    _, batches = loader_of(SmallDataset(), pixel_dtype=torch.bfloat16, workers=0).next_step()
    assert {batch["pixel_values"].dtype for batch in batches} == {torch.bfloat16}


@pytest.mark.parametrize(
    ("cores", "view", "expected"), [(9, "images", MICRO_BATCHES), (4, "images", 3), (9, "text", 1)]
)
def test_workers_are_as_many_as_cores_but_no_more_than_packs(monkeypatch, cores, view, expected):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(8 * cores))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    training = loader_of(SmallDataset(), view=view, workers=None)
    held_out = training.over(SmallDataset(), training.feed.sampler)
    assert [found.feed._reader.num_workers for found in (training, held_out)] == [expected] * 2


@pytest.mark.parametrize(
    ("device", "dtype", "warns"), [("cuda", "float32", True), ("cuda", "bfloat16", False), ("cpu", "float32", False)]
)
def test_float32_on_a_gpu_is_warned_of(caplog, device, dtype, warns):
    warn_of_float32(device, dtype)
    assert ("bf16.enabled should be true on a GPU" in caplog.text) == warns


@pytest.mark.parametrize(
    ("samples", "warns"),
    [
        (SimpleNamespace(added_end="</s>"), True),
        ({"a": SimpleNamespace(added_end="</s>"), "b": SimpleNamespace(added_end="</s>")}, True),
        (SimpleNamespace(added_end=""), False),
        ({"a": object()}, False),
        (SmallDataset(), False),
    ],
)
def test_an_end_that_the_template_does_not_write_is_told(caplog, samples, warns):
    warn_of_added_end(samples)
    assert caplog.text.count("each answer is trained with '</s>' behind it") == warns


@pytest.mark.parametrize(("made_from", "warns"), [({"lengths": "f00"}, True), ({}, False), (None, False)])
def test_a_plan_for_other_data_is_told(caplog, made_from, warns):
    lengths = SmallDataset().lengths()
    made_from = {"lengths": lengths.content_hash} if made_from is None else made_from
    plan = Plan(PackLimits(4, 48), 2, Partition((0, 1)), ("none",), made_from=made_from)
    warn_of_other_data(plan, lengths)
    assert ("omnibal.pipeline.plan should be made for this run's data" in caplog.text) == warns


@pytest.mark.parametrize(("positions", "warns"), [(16, True), (17, False), (None, False)])
def test_samples_beyond_the_models_positions_are_told(caplog, positions, warns):
    config = SimpleNamespace(text_config=SimpleNamespace(max_position_embeddings=positions))
    warn_of_long_samples(config, SampleLengths([1, 0], [17, 3]), PackLimits(4, 48))
    assert ("at most the model's 16 positions, got one of 17 tokens" in caplog.text) == warns
