import pytest

from omnibal.data.lengths import SampleLengths
from omnibal.data.limits import PackLimits
from omnibal.feeds.sampler import BalancedBatchSampler
from tools.synthetic import tiled_lengths

torch_data = pytest.importorskip("torch.utils.data")

LENGTHS = tiled_lengths(120, seed=2)


class Indices(torch_data.Dataset):
    def __len__(self):
        return len(LENGTHS)

    def __getitem__(self, index):
        return index


def as_list(items):
    return list(items)


def sampler(rank=0, **options):
    return BalancedBatchSampler(LENGTHS, PackLimits(9, 4096), **{"num_replicas": 2, "rank": rank, **options})


def loader(batch_sampler, **options):
    return torch_data.DataLoader(Indices(), batch_sampler=batch_sampler, collate_fn=as_list, **options)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_workers": 2},
        {"num_workers": 2, "persistent_workers": True, "prefetch_factor": 4},
    ],
    ids=["in process", "workers", "persistent workers"],
)
def test_a_loader_gives_the_packs_of_every_epoch(options):
    own, expected = sampler(), sampler()
    batches = loader(own, **options)
    for epoch in range(3):
        own.set_epoch(epoch)
        expected.set_epoch(epoch)
        assert len(batches) == len(expected)
        assert list(batches) == list(expected)


@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true")
def test_pinned_batches_are_the_same():
    assert list(loader(sampler(), num_workers=1, pin_memory=True)) == list(sampler())


@pytest.mark.parametrize("workers_after", [0, 1])
def test_resume_counts_what_was_trained_not_what_was_prefetched(workers_after):
    own = sampler(micro_batches=2)
    batches = iter(loader(own, num_workers=2, prefetch_factor=4))
    trained = [next(batches) for _ in range(2 * 2)]
    state = own.state_dict(2)
    assert own.state_dict()["steps_done"] > 2  # the loader has asked for more
    del batches

    again = sampler(micro_batches=2)
    again.load_state_dict(state)
    rest = list(loader(again, num_workers=workers_after))
    assert trained + rest == list(sampler(micro_batches=2))


def test_resume_in_a_loader_whose_workers_persist():
    own = sampler()
    batches = loader(own, num_workers=1, persistent_workers=True)
    whole = list(batches)
    own.load_state_dict(own.state_dict(5))
    own.set_epoch(0)
    assert list(batches) == whole[5:]
    own.set_epoch(1)
    assert len(list(batches)) == len(whole)


def test_a_state_that_torch_has_saved(tmp_path):
    torch = pytest.importorskip("torch")
    torch.save(sampler().state_dict(4), tmp_path / "state.pt")
    again = sampler()
    again.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert list(again) == list(sampler())[4:]


def test_a_micro_batch_without_a_sample_reaches_the_collation_as_an_empty_list():
    few = SampleLengths([1], [10])
    ranks = [BalancedBatchSampler(few, PackLimits(9, 4096), num_replicas=2, rank=rank) for rank in range(2)]
    assert sorted(batch for own in ranks for batch in loader(own)) == [[], [0]]


def run_lightning(batches, epochs):
    lightning = pytest.importorskip("lightning")
    torch = pytest.importorskip("torch")

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.weight, self.epochs = torch.nn.Parameter(torch.ones(())), [[] for _ in range(epochs)]

        def training_step(self, batch, _):
            self.epochs[self.current_epoch].append(batch)
            return self.weight * 0

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 1e-3)

    module, quiet = Module(), ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    trainer = lightning.Trainer(accelerator="cpu", devices=1, max_epochs=epochs, **dict.fromkeys(quiet, False))
    trainer.fit(module, batches)
    return module.epochs


def run_fabric(batches, epochs):
    fabric = pytest.importorskip("lightning").Fabric(accelerator="cpu", devices=1)
    found = fabric.setup_dataloaders(batches)
    return [list(found) for _ in range(epochs)]


def run_accelerate(batches, epochs):
    pytest.importorskip("accelerate")
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    try:
        found = Accelerator(cpu=True).prepare(batches)
        return [list(found) for _ in range(epochs)]
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)  # it is kept for the process


def run_ignite(batches, epochs):
    # As its distributed examples do where an epoch begins; ignite itself tells nobody.
    found = []
    for epoch in range(epochs):
        batches.batch_sampler.sampler.set_epoch(epoch)
        found.append(list(batches))
    return found


@pytest.mark.parametrize("run", [run_lightning, run_fabric, run_accelerate, run_ignite])
def test_hosts_tell_a_batch_sampler_the_epoch(run, recwarn):
    found = run(loader(sampler(num_replicas=1)), 3)
    expected = sampler(num_replicas=1)
    for epoch, batches in enumerate(found):
        expected.set_epoch(epoch)
        assert [[int(sample) for sample in batch] for batch in batches] == list(expected)
    assert found[0] != found[1] != found[2]
    assert not [warning for warning in recwarn if "set_epoch" in str(warning.message)]


def test_a_pass_that_nobody_asked_for_repeats_the_epoch_and_warns_once():
    own = sampler()
    first = list(loader(own))
    with pytest.warns(UserWarning, match=r"another pass over epoch 0 without it: .*set_epoch\(1\)") as warned:
        assert list(loader(own)) == first
        assert list(loader(own)) == first
    assert len(warned) == 1
    assert own.epoch == 0
    counted = sampler()
    batches = iter(counted)
    for _ in range(len(counted)):  # a loop over steps, which never asks for a batch too many
        next(batches)
    with pytest.warns(UserWarning, match="another pass over epoch 0"):
        assert list(counted) == first


def test_a_pass_that_was_asked_for_warns_of_nothing(recwarn):
    own = sampler()
    whole = list(own)
    own.set_epoch(0)  # the same epoch, on purpose
    assert list(own) == whole
    own.set_epoch(3)
    list(own)
    again = sampler()
    again.load_state_dict(own.state_dict(4))
    list(again)
    next(iter(sampler()))  # a look at the first pack is no pass
    assert not recwarn.list
