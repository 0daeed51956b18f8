"""A trainer's first steps correct what was counted, and the next run promises by it."""

import itertools
from dataclasses import asdict

import pytest
import torch.distributed as dist

pytest.importorskip("accelerate")

from omnibal.advise.wait import phase_costs
from omnibal.cost import Load
from omnibal.integrations.trainer import calibration as trainer_calibration
from omnibal.integrations.trainer import hooks as trainer_hooks
from omnibal.integrations.trainer.calibration import FILE
from omnibal.integrations.trainer.hooks import PacksCallback
from omnibal.integrations.trainer.steps import counted_profile
from omnibal.integrations.transformers import balance
from omnibal.packs.apart import SampleBounds, _give_bounds
from omnibal.packs.collator import language_of
from omnibal.passes import device_name
from omnibal.profile.calibration import PARTS, STEPS, Calibration, TimedPass, calibrate, sizes_of
from omnibal.profile.records import every_layer
from tests.engine.launch import launch
from tests.integrations.trainers import LIMITS, Case, trainer_of


def balanced(case, folder, **options):
    trainer = trainer_of(case, folder, **options)
    return trainer, balance(trainer, LIMITS[Case(case).family if isinstance(case, str) else case.family])


def hooks_of(trainer):
    """Hooks of the model and its LLM, but those for a pack's bounds; transformers leaves its own in the ViT."""
    modules = trainer.model, language_of(trainer.model)
    hooks = [getattr(module, kind).values() for module in modules for kind in ("_forward_hooks", "_forward_pre_hooks")]
    of_bounds = SampleBounds._note.__qualname__, _give_bounds.__qualname__
    names = [[getattr(getattr(hook, "func", hook), "__qualname__", "") for hook in each] for each in hooks]
    return [[name for name in each if name not in of_bounds] for each in names]


def tick():
    """A clock whose every mark is a second behind the one before."""
    seconds = itertools.count()
    return lambda device: float(next(seconds))


def test_each_part_of_a_pass_is_timed_and_promises_are_corrected(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(trainer_calibration, "mark", tick())
    trainer, _ = balanced("internvl", tmp_path, max_steps=STEPS)
    before = hooks_of(trainer)
    trainer.train()
    assert hooks_of(trainer) == before
    told = capfd.readouterr().out
    assert "omnibal: steps 3 to 20 measured: vision " in told
    assert " the samples a second of random batches, computed; now " in told
    found = Calibration.load(tmp_path / FILE)
    assert found.counted_for == "A100-80GB"
    costs = phase_costs(found.apply(counted_profile(trainer.model, None)))
    for part in PARTS:  # each part of every pack takes a second
        assert float(costs[part](Load(7, 40, 400))) == pytest.approx(1, rel=0.4), part


@pytest.mark.parametrize(
    ("place", "name"),
    [(trainer_calibration, "PassTimer"), (trainer_calibration, "calibrate"), (trainer_hooks.Waiting, "of")],
)
def test_what_cannot_be_measured_ends_no_training(tmp_path, monkeypatch, place, name):
    def fails(*_, **__):
        raise RuntimeError("no such measure")

    trainer, _ = balanced("internvl", tmp_path, max_steps=STEPS + 1)
    monkeypatch.setattr(place, name, fails)
    trainer.train()
    assert trainer.state.global_step == STEPS + 1
    assert not (tmp_path / FILE).exists() or name == "of"


def known_costs(trainer, folder):
    """Leave costs in a trainer's folder as if an earlier run had measured them."""
    profile = counted_profile(trainer.model, None)
    passes = [TimedPass((0, len(profile.layers)), False, sizes_of(Load([4], [30], [300]))[0], 1.0)]
    device = device_name(trainer.args.device)
    found = calibrate(profile, passes, every_layer("none", len(profile.layers)), device=device)
    (folder / FILE).write_text(found.line())
    return found


def test_the_next_run_promises_by_measured_costs_and_packs_alike(tmp_path, capfd):
    trainer, first = balanced("internvl", tmp_path, max_steps=2)
    known_costs(trainer, tmp_path)
    capfd.readouterr()
    _, sampler = balanced("internvl", tmp_path, max_steps=4)
    assert "(by costs that an earlier run measured)" in capfd.readouterr().out
    packs = [sampler.packs_of_all_ranks(step) for step in range(sampler.num_steps)]
    assert packs == [first.packs_of_all_ranks(step) for step in range(first.num_steps)]


def test_costs_of_another_device_or_model_are_left_alone(tmp_path, capfd):
    trainer, _ = balanced("internvl", tmp_path)
    found = known_costs(trainer, tmp_path)
    for changed, reason in (
        ({"device": "NVIDIA H100"}, "device must be NVIDIA H100, got"),
        ({"layers": "others"}, "measured costs must be of the model's layers"),
    ):
        (tmp_path / FILE).write_text(found.model_copy(update=changed).line())
        capfd.readouterr()
        balanced("internvl", tmp_path)
        told = capfd.readouterr().out
        assert f"{FILE} is left alone: {reason}" in told
        assert "(computed for A100-80GB, not measured)" in told


def calibrated_on_ranks(folder):
    """What this rank makes of the passes of both, under ways to share in which ranks meet at other times."""
    trainer_calibration.mark, real = tick(), trainer_calibration.mark
    found = {}
    for layout in ("ddp", "zero3"):
        trainer, _ = balanced(Case("internvl", layout), folder / layout, max_steps=STEPS)
        trainer.train()
        packs = next(each for each in trainer.callback_handler.callbacks if hasattr(each, "made_from"))
        found[layout] = {part: asdict(cost) for part, cost in packs.costs.items()}
        dist.barrier()
        found[layout]["written"] = Calibration.load(folder / layout / FILE).passes
    trainer_calibration.mark = real
    return found


@pytest.mark.distributed
def test_ranks_agree_on_measured_costs(tmp_path):
    first, second = launch(2, "tests.integrations.test_trainer_calibration:calibrated_on_ranks", tmp_path)
    assert first == second
    # Where ranks begin and end a phase together, a pass of one of them counts.
    assert 0 < first["zero3"]["written"] < first["ddp"]["written"]


def test_steps_that_were_logged_leave_nothing(tmp_path):
    trainer, _ = balanced("internvl", tmp_path, max_steps=5, logging_strategy="steps", logging_steps=2)
    trainer.train()
    (callback,) = (each for each in trainer.callback_handler.callbacks if isinstance(each, PacksCallback))
    assert len(callback._unlogged) == 1
    assert callback.logged() and callback.logged() == {}
