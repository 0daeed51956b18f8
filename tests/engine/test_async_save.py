"""A checkpoint that threads write while training goes on is the one that training would have waited for."""

from concurrent.futures import wait
from pathlib import Path
from threading import Event

import pytest
import torch
import torch.distributed as dist

from omnibal.engine.checkpoint import MANIFEST, latest_checkpoint, read_manifest
from omnibal.engine.initialize import initialize
from omnibal.errors import OmnibalError
from omnibal.train import train
from tests.engine.cases import SmallDataset, changed, settings, weights_of
from tests.engine.launch import launch
from tests.engine.small import save_small_model

pytestmark = [pytest.mark.distributed, pytest.mark.cluster(2, together=True)]


def saves_both_ways(config, folder):
    """Save a step twice, and train on before threads may write; what is there then."""
    engine, *_ = initialize(config=config, dataset=SmallDataset())
    engine.train_batch()
    engine.save_checkpoint(folder, "waited for")
    save, may_write = engine.checkpoint_engine.save, Event()

    def late(state_dict, path):
        assert may_write.wait(60)
        save(state_dict, path)

    engine.checkpoint_engine.save = late
    engine.save_checkpoint(folder, "beside", async_save=True)
    before = weights_of(engine)
    engine.train_batch()
    found = sorted(path.name for path in folder.iterdir() if path.is_dir())
    assert any(not weight.equal(before[name]) for name, weight in weights_of(engine).items()), "weights move on"
    may_write.set()
    wait(engine._saving.files.values())
    dist.barrier()
    engine.train_batch()
    assert (folder / "beside" / MANIFEST).exists(), "it is whole at the first step behind"
    engine.load_checkpoint(folder, "beside")
    assert all(weight.equal(before[name]) for name, weight in weights_of(engine).items())
    return found


def fails_beside(config, folder):
    """What this rank hears of a thread of rank 1 that cannot write; what is left, and whether saving goes on."""
    engine, *_ = initialize(config=config, dataset=SmallDataset())
    engine.train_batch()
    engine.save_checkpoint(folder, "a")
    save = engine.checkpoint_engine.save

    def broken(state_dict, path):
        if dist.get_rank() == 1:
            raise OSError("No space left on device")
        save(state_dict, path)

    engine.checkpoint_engine.save = broken
    engine.save_checkpoint(folder, "b", async_save=True)
    engine.checkpoint_engine.save = save
    wait(engine._saving.files.values())
    dist.barrier()
    with pytest.raises(OmnibalError) as caught:
        engine.train_batch()
    dist.barrier()
    left = sorted(path.name for path in folder.iterdir() if path.is_dir())
    engine.save_checkpoint(folder, "c", async_save=True)
    engine.save_checkpoint(folder, "d", keep=2)
    return str(caught.value), left, sorted(path.name for path in folder.iterdir() if path.is_dir())


def goes_on(config):
    """Weights behind a run that saves beside each step, and behind one that goes on from its second step."""
    whole = weights_of(train(config, dataset=SmallDataset()))
    return whole, weights_of(train(config, dataset=SmallDataset(), resume="global_step2"))


def all_at_once(configs, folder):
    folders = [folder / str(number) for number in range(len(configs))]
    found = [saves_both_ways(config, own) for config, own in zip(configs, folders, strict=True)]
    return found, fails_beside(configs[0], folder / "fails"), goes_on(configs[0])


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    """What two processes saw, and the folder that they wrote to."""
    model, folder = tmp_path_factory.mktemp("model"), tmp_path_factory.mktemp("written")
    save_small_model(model)
    bfloat16 = {"bf16": {"enabled": True}}
    configs = [settings(model, num_stages=2, zero_stage=1), settings(model, num_stages=1, extra=bfloat16)]
    for config in configs:
        del config["scheduler"]  # whose first steps change no weight
    run = {"output": str(folder / "run"), "epochs": 1, "max_steps": 4, "save_every": 1, "keep": 4, "async_save": True}
    configs[0] = changed(configs[0], "run", **run)
    return launch(2, "tests.engine.test_async_save:all_at_once", configs, folder), folder


def test_nothing_is_there_by_its_name_before_all_is_written(seen):
    for found, *_ in seen[0]:
        assert found == [["beside.unfinished", "waited for"]] * 2


def test_it_holds_what_a_checkpoint_holds_that_is_waited_for(seen):
    _, folder = seen
    for number in range(2):
        waited, beside = (folder / str(number) / name for name in ("waited for", "beside"))
        files = read_manifest(waited)["files"]
        assert [*read_manifest(beside)["files"]] == [*files]
        for name in files:
            if name.endswith(".pt"):
                states = [torch.load(of / name, weights_only=False) for of in (waited, beside)]
                assert is_same(*states), name


def is_same(one, other):
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return [*one] == [*other] and all(is_same(value, other[key]) for key, value in one.items())
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(is_same, one, other))
    if hasattr(one, "__dict__"):
        return is_same(vars(one), vars(other))
    return one == other


def test_what_a_thread_cannot_write_ends_all_ranks_and_leaves_nothing(seen):
    by_rank, folder = seen
    for _, (said, left, behind), _ in by_rank:
        assert said.startswith("rank 1, stage 1: checkpoint b must be written completely, got OSError: No space left")
        assert left == ["a"]
        assert behind == ["c", "d"]
    assert latest_checkpoint(folder / "fails").name == "d"


def test_a_run_goes_on_from_it_bit_by_bit(seen):
    by_rank, folder = seen
    assert {path.name for path in (Path(folder) / "run/checkpoints").glob("global_step*")} == {
        f"global_step{step}" for step in range(1, 5)
    }
    for *_, (whole, again) in by_rank:
        assert all(weight.equal(again[name]) for name, weight in whole.items())
