"""Layers that balance frees from recomputation: what they keep, which they are, and that nothing else changes."""

from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForImageTextToText, TrainerCallback
from transformers.modeling_layers import GradientCheckpointingLayer

from omnibal.advise.changes import advise
from omnibal.advise.estimate import Recipe, Scenario
from omnibal.advise.memory import RankMemory, free_levels
from omnibal.cluster import OVERHEAD_BYTES, Cluster
from omnibal.cost import Load
from omnibal.data.limits import PackLimits, fullest_load
from omnibal.data.step_size import fit_step
from omnibal.device import DEVICES, usable_bytes
from omnibal.errors import ConfigError
from omnibal.integrations.trainer.memory import GIB, HeldBytes
from omnibal.integrations.trainer.recompute import (
    REMEDY,
    FillsMemory,
    LayerChoice,
    _requiring_hooks,
    flagged_layers,
)
from omnibal.integrations.trainer.steps import counted_profile, module_of
from omnibal.integrations.transformers import balance
from omnibal.memory.recompute import recompute_seconds
from omnibal.passes import kept_bytes
from tests.integrations.items import config_of, items_of
from tests.integrations.test_trainer_memory import fake_trainer, given_lengths, peaks_of
from tests.integrations.trainers import LIMITS, Case, Weights, trainer_of
from tests.vlm.families import plain_family_model, plain_inputs
from tools.gpu.models import config_of as public_config
from tools.gpu.models import made_lengths

CHECKPOINTS = {"gradient_checkpointing": True}


def sees(item):
    return item.get("pixel_values") is not None


def load_of(item):
    grid = item.get("image_grid_thw")
    squared = 0 if grid is None else int((grid.prod(-1) ** 2).sum())
    tokens = len(item["input_ids"])
    return Load(len(item["pixel_values"]), tokens, tokens**2, squared)


# On a CPU Qwen's ViT keeps the output of attention once more.
@pytest.mark.parametrize(("family", "more"), [("internvl", 0.03), ("qwen2_5_vl", 0.08)])
def test_a_layer_without_its_flag_keeps_what_is_counted(family, more):
    model = plain_family_model(config_of(family)).train()
    # Of one image: on a CPU the ViT attends image by image, and keeps a copy of the outputs of several.
    item = next(item for item in items_of(family) if len(item.get("image_grid_thw", [1])) == 1 and sees(item))
    profile, load = counted_profile(model, None, dtype="float32"), load_of(item)
    flagged = flagged_layers(model, profile)
    assert len(flagged) == sum(isinstance(module, GradientCheckpointingLayer) for module in model.modules())
    model.activation_checkpointing_enable()
    free = [*model.parameters(), *model.buffers()]

    def kept():
        return kept_bytes(lambda: model(**plain_inputs(item)).logits, free=free)

    kept()
    every = kept()
    for index, module in flagged.items():
        module.gradient_checkpointing = False
        saved = profile.layers[index].saved_bytes
        counted = float(saved["none"](load) - saved["full"](load))
        assert kept() - every == pytest.approx(counted, rel=more), profile.layers[index].name
        module.gradient_checkpointing = True


def fills_of(trainer):
    return next(each for each in trainer.callback_handler.callbacks if isinstance(each, FillsMemory))


def recomputing(fills):
    return [fills.levels[index] == "full" for index in fills._choice.flagged]


def flags_of(model):
    return [
        module.gradient_checkpointing for module in model.modules() if isinstance(module, GradientCheckpointingLayer)
    ]


class LastFlags(TrainerCallback):
    """Layers' flags at the end of training, before the model is as it was given."""

    def on_train_end(self, *_, model, **__):
        self.found = flags_of(model)


def room_for(trainer, sampler, share):
    """GiB between what packs hold if every layer recomputes and if none does."""
    fills = fills_of(trainer)
    memory, load = fills._memory, fullest_load(sampler.lengths, sampler.limits)
    full = memory.filled(load, recompute_seconds(memory.profile, load), ["full"] * len(memory.levels))
    most, least = (float(replace(memory, recompute=level).peak_bytes(load)) for level in ("none", full.recompute))
    return (least + share * (most - least)) / GIB


class Runs:
    """How often each layer with a flag computes, per forward pass of the LLM."""

    def __init__(self, model):
        self.found = {}
        for name, module in model.named_modules():
            if isinstance(module, GradientCheckpointingLayer):
                inner = next(iter(module.children()))
                inner.register_forward_hook(lambda *_, name=name: self.count(name))

    def count(self, name):
        if torch.is_grad_enabled():
            self.found[name] = self.found.get(name, 0) + 1


def trained(folder, recompute="as_is", share=None, case=None, **options):
    """Weights of each step, with how often layers ran and what was printed."""
    case = case or Case("internvl", options=CHECKPOINTS)
    trainer = trainer_of(case, folder, max_steps=3, **options)
    limits, given = LIMITS[case.family], {"memory_gib": 100.0}
    if share is not None:
        sampler = balance(trainer, limits, recompute="fill", **given)
        given = {"memory_gib": room_for(trainer, sampler, share)}
        trainer = trainer_of(case, folder, max_steps=3, **options)
    weights = Weights(trainer)
    trainer.add_callback(weights)
    balance(trainer, limits, recompute=recompute, **given)
    runs, flags = Runs(trainer.model), LastFlags()
    trainer.add_callback(flags)
    trainer.train()
    return weights.steps, runs.found, trainer, flags.found


def same(found, expected):
    return all(
        torch.equal(step[name], other[name]) for step, other in zip(found, expected, strict=True) for name in step
    )


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("frozen", [False, True])
def test_training_is_bit_equal_whatever_recomputes(lora, frozen, tmp_path):
    case = Case("internvl", lora=lora, frozen_vision=frozen, options=CHECKPOINTS)
    expected, every, *_ = trained(tmp_path, case=case)
    assert len(set(every.values())) == 1  # the same number of times, twice a pack
    found, runs, trainer, _ = trained(tmp_path, "fill", case=case)
    # Adapters in the ViT are not counted: its layers go on as they did.
    flags = [lora, lora, False, False]
    assert recomputing(fills_of(trainer)) == flags
    assert {name: count * (2 - flag) for (name, count), flag in zip(runs.items(), flags, strict=True)} == every
    assert same(found, expected)
    found, runs, trainer, flags = trained(tmp_path, "fill", 0.8 if lora else 0.5, case=case)
    assert 0 < sum(recomputing(fills_of(trainer))) < 4
    assert same(found, expected)
    assert flags == recomputing(fills_of(trainer))
    ran = [runs[name] for name in every]
    assert sorted(ran) == sorted(runs_of * (1 + flag) // 2 for runs_of, flag in zip(every.values(), flags, strict=True))


def test_a_frozen_encoder_runs_no_backward_pass(tmp_path):
    case, seen = Case("internvl", frozen_vision=True, options=CHECKPOINTS), []
    trainer = trainer_of(case, tmp_path, max_steps=1)
    balance(trainer, LIMITS["internvl"], memory_gib=8.0)
    for name, module in trainer.model.named_modules():
        if module_of(name) == "vision" and isinstance(module, GradientCheckpointingLayer):
            module.register_forward_hook(lambda module, inputs, output: seen.append(output.requires_grad))
    trainer.train()
    assert seen
    assert not any(seen)


@pytest.mark.parametrize("ends", [True, False])
def test_a_model_is_left_with_the_flags_and_hooks_that_it_was_given_with(ends, tmp_path, monkeypatch):
    trainer = trainer_of(Case("internvl", frozen_vision=True, options=CHECKPOINTS), tmp_path, max_steps=1)
    model = trainer.model
    model.gradient_checkpointing_enable()
    model.enable_input_require_grads()
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    layers[0].gradient_checkpointing = layers[-1].gradient_checkpointing = False
    given, hooks = flags_of(model), _requiring_hooks(model)
    assert len(set(given)) == 2 and hooks
    balance(trainer, LIMITS["internvl"], memory_gib=100.0)
    seen, plain = [], model.forward

    def watched(**inputs):
        seen.append((flags_of(model), _requiring_hooks(model)))
        if ends:
            return plain(**inputs)
        raise RuntimeError("stopped")

    monkeypatch.setattr(model, "forward", watched)
    monkeypatch.setattr("omnibal.integrations.transformers.check_model", lambda *_: None)
    with nullcontext() if ends else pytest.raises(RuntimeError, match="stopped"):
        trainer.train()
    assert seen[-1] == ([False] * 4, [])
    assert (flags_of(model), _requiring_hooks(model)) == (given, hooks)


def test_parts_keep_their_word(tmp_path):
    _, every, *_ = trained(tmp_path)
    for words, expected in (({"vision": "none"}, (1, 2)), ({"language": "none", "vision": "full"}, (2, 1))):
        trainer = trainer_of(Case("internvl", options=CHECKPOINTS), tmp_path, max_steps=3)
        balance(trainer, LIMITS["internvl"], recompute=words)  # on a CPU whose memory is not known
        runs = Runs(trainer.model)
        trainer.train()
        for name, count in runs.found.items():
            assert 2 * count == every[name] * expected[module_of(name) == "language"]


@pytest.mark.parametrize("seed", range(3))
def test_no_pack_of_an_epoch_exceeds_the_device(seed, tmp_path, capsys):
    trainer = trainer_of(Case("internvl", options=CHECKPOINTS), tmp_path)
    given = {"lengths": given_lengths(seed, len(trainer.train_dataset)), "check_lengths": False}
    limits = PackLimits(1, 12)  # some samples exceed them
    sampler = balance(trainer, limits, memory_gib=100.0, **given)
    assert len(limits.oversized(sampler.lengths))
    for share in (0.3, 0.5, 0.8):
        room = room_for(trainer, sampler, share)
        other = trainer_of(Case("internvl", options=CHECKPOINTS), tmp_path)
        other_sampler = balance(other, limits, memory_gib=room, **given)
        fills = fills_of(other)
        assert max(peaks_of(other, other_sampler, fills._memory)) <= room * GIB
        again = sum(recomputing(fills))
        assert 0 < again < 4
        assert f"{again} of 4 layers recompute; " in capsys.readouterr().out


def test_a_checkpoint_keeps_the_choice_and_another_device_makes_its_own(tmp_path, capsys):
    options = {"save_strategy": "steps", "save_steps": 2}
    expected, _, trainer, _ = trained(tmp_path, "fill", 0.5, **options)
    kept = recomputing(fills_of(trainer))

    def resumed(memory_gib):
        again = trainer_of(Case("internvl", options=CHECKPOINTS), tmp_path, max_steps=3, **options)
        balance(again, LIMITS["internvl"], memory_gib=memory_gib)
        weights = Weights(again)
        again.add_callback(weights)
        again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
        assert same(weights.steps[-1:], expected[-1:])
        return recomputing(fills_of(again))

    assert resumed(100.0) == kept
    assert "does not fit" not in capsys.readouterr().out
    least = fills_of(trainer)._memory.state_bytes / GIB
    assert resumed(least) == [True] * 4
    assert "omnibal: the checkpoint's recomputation does not fit: 4 of 4 layers recompute" in capsys.readouterr().out


def test_autocast_gets_a_margin(tmp_path):
    peaks = []
    for options in ({}, {"bf16": True}):
        trainer = trainer_of(Case("internvl", options=CHECKPOINTS | options), tmp_path)
        sampler = balance(trainer, LIMITS["internvl"], memory_gib=100.0)
        memory, load = fills_of(trainer)._memory, fullest_load(sampler.lengths, sampler.limits)
        peaks.append(float(memory.peak_bytes(load)) - memory.state_bytes)
    # In float32, and twice what is counted in 16 bits.
    assert peaks[1] == pytest.approx(peaks[0], rel=0.25)


@pytest.mark.parametrize("measured", ["as counted", "less", "more"])
def test_the_choice_is_corrected_once_by_what_is_measured(measured, tmp_path, monkeypatch, capsys):
    asked = []

    def peak(device):
        asked.append(device)
        memory = fills._memory
        loads = fills._packs.held(trainer.state)[0][0]
        counted, state = float(memory.peak_bytes(loads).max()), memory.state_bytes
        return {"as counted": counted, "less": state / 2, "more": state + 1.5 * (counted - state)}[
            measured
        ] - OVERHEAD_BYTES

    monkeypatch.setattr("omnibal.integrations.trainer.recompute.peak_of", peak)
    trainer = trainer_of(Case("internvl", options=CHECKPOINTS), tmp_path)
    sampler = balance(trainer, LIMITS["internvl"], memory_gib=100.0)
    room = room_for(trainer, sampler, 0.8)
    trainer = trainer_of(Case("internvl", options=CHECKPOINTS), tmp_path, max_steps=4)
    sampler = balance(trainer, LIMITS["internvl"], memory_gib=room)
    fills = fills_of(trainer)
    before, predicted, flags = sum(recomputing(fills)), fills._memory, LastFlags()
    trainer.add_callback(flags)
    trainer.train()
    assert len(asked) == 1
    after, told = sum(recomputing(fills)), capsys.readouterr().out
    load = fullest_load(sampler.lengths, sampler.limits)
    if measured == "as counted":
        assert after == before
        assert "to spare" not in told
    elif measured == "less":
        assert after < before
        assert "GiB more to spare than counted: " in told
    else:
        assert after > before
        assert "GiB less to spare than counted: " in told
        # Even with half as much again for activations the fullest pack fits.
        activations = float(fills._memory.peak_bytes(load)) - predicted.state_bytes
        assert after == 4 or predicted.state_bytes + 1.5 * activations <= predicted.budget_bytes
    assert flags.found == recomputing(fills)


@pytest.mark.parametrize(
    ("recompute", "options", "message"),
    [
        ("all", CHECKPOINTS, 'recompute must be "fill", "as_is" or a word for each part, got \'all\''),
        ({"text": "none"}, CHECKPOINTS, "recompute must name parts of vision, sound, language, got 'text'"),
        ({"vision": "as_is"}, CHECKPOINTS, r"recompute\['vision'\] must be one of fill, none, full, got 'as_is'"),
        ({"sound": "none"}, CHECKPOINTS, "recompute must name parts whose layers have a flag, got 'sound'"),
        ({"vision": "none"}, {}, "gradient_checkpointing must be True to choose what recomputes, got False"),
    ],
)
def test_unknown_words_are_refused(recompute, options, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        balance(trainer_of("internvl", tmp_path, **options), LIMITS["internvl"], recompute=recompute)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("tried"), RuntimeError("CUBLAS_STATUS_ALLOC_FAILED when …")])
def test_memory_that_runs_out_says_how_to_free_fewer_layers(error, tmp_path, monkeypatch):
    trainer = trainer_of(Case("internvl", options=CHECKPOINTS), tmp_path)
    balance(trainer, LIMITS["internvl"], memory_gib=100.0)

    def runs_out(*_, **__):
        raise error

    monkeypatch.setattr(trainer.model, "forward", runs_out)
    monkeypatch.setattr("omnibal.integrations.transformers.check_model", lambda *_: None)
    with pytest.raises(type(error)) as found:
        trainer.train()
    assert found.value.__notes__ == [REMEDY]


def test_what_cannot_be_freed_is_left_alone_and_said(tmp_path, capsys, monkeypatch):
    trainer = trainer_of("idefics3", tmp_path, **CHECKPOINTS)
    balance(trainer)
    assert "recomputation stays as it is: layers of Idefics3" in capsys.readouterr().out
    trainer = trainer_of("internvl", tmp_path, **CHECKPOINTS)
    trainer.model.set_attn_implementation("eager")
    balance(trainer, LIMITS["internvl"], memory_gib=100.0)
    assert "recomputation stays as it is: eager attention keeps scores" in capsys.readouterr().out
    with monkeypatch.context() as patch:
        patch.setattr("omnibal.integrations.trainer.recompute.GradientCheckpointingLayer", type("Unused", (), {}))
        balance(trainer_of("internvl", tmp_path, **CHECKPOINTS), LIMITS["internvl"], memory_gib=100.0)
    assert "recomputation stays as it is: the model's layers have no flag of their own" in capsys.readouterr().out
    trainer = trainer_of("internvl", tmp_path, **CHECKPOINTS)
    balance(trainer, LIMITS["internvl"], recompute="as_is", memory_gib=100.0)
    balance(trainer_of("internvl", tmp_path), LIMITS["internvl"], memory_gib=100.0)
    assert "layers recompute" not in capsys.readouterr().out
    plugin = SimpleNamespace(activation_checkpointing=True)
    wraps = SimpleNamespace(
        is_fsdp_enabled=True, accelerator=SimpleNamespace(state=SimpleNamespace(fsdp_plugin=plugin))
    )
    found = LayerChoice.of(wraps, SimpleNamespace(recompute="full", model=None, counted=None), "fill", None, None)
    assert found == (None, ["recomputation stays as it is: FSDP's own activation_checkpointing wraps layers"])


@cache
def choice_on(name, device):
    """Of a public model's shapes in 16 bits, on a device less its margin."""
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(public_config(name), dtype=torch.bfloat16)
    profile, held = counted_profile(model, device), HeldBytes.of(fake_trainer(optim="adamw_torch_fused"), model, "ddp")
    cluster = Cluster(1, 1, DEVICES[device], memory_bytes=usable_bytes(DEVICES[device].memory_bytes))
    flagged = flagged_layers(model, profile)
    given = free_levels(profile, flagged)
    memory = RankMemory(profile, "ddp", cluster, tuple(level or "full" for level in given), True, (), held.precision)
    return LayerChoice(given, memory, profile, tuple(flagged))


@pytest.mark.parametrize(
    ("name", "device", "batch_size", "again", "gain", "micro_batches"),
    [
        ("8B", "H200-141GB", 4, (0, 0), 1.32, 4),
        ("8B", "H200-141GB", 16, (0, 0), 1.32, 4),  # 16 samples a pack: 23 and 17 layers recompute, 1.08
        ("8B", "H100-80GB", 4, (23, 22), 1.05, 4),
        ("2B", "H200-141GB", 16, (0, 6), 1.27, 1),
    ],
)
def test_smaller_packs_that_recompute_less_are_taken(name, device, batch_size, again, gain, micro_batches):
    choice, lengths = choice_on(name, device), made_lengths(name, 3800)

    def fit(batch_size):
        return fit_step(lengths, 16, batch_size=batch_size, num_replicas=1, memory=choice.memory)

    size = choice.best_size(lengths, fit(batch_size), batch_size, fit)
    chosen = choice.chosen(lengths, size.limits)
    parts = [choice.costs.layers[index].module for index in choice.flagged if chosen.levels[index] == "full"]
    assert size.micro_batches == micro_batches
    assert (parts.count("vision"), parts.count("language")) == again
    full, now = (choice.seconds(lengths, memory.levels) for memory in (choice.memory, chosen))
    assert full / now == pytest.approx(gain, abs=0.01)


def on_one(name, device):
    """What balance and what advise are asked of a model on one device, under plain gradient checkpointing."""
    choice, lengths = choice_on(name, device), made_lengths(name, 3800)
    options = {"spares_rows": True, "fills": True, "precision": choice.memory.precision, "is_whole": True}
    return choice, lengths, Scenario(lengths, choice.costs, Cluster(1, 1, DEVICES[device]), 16, **options)


@pytest.mark.parametrize("batch_size", [4, 16])
@pytest.mark.parametrize("device", ["H200-141GB", "H100-80GB"])
def test_advise_makes_the_packs_and_frees_the_layers_that_balance_does(device, batch_size):
    choice, lengths, held = on_one("8B", device)

    def fit(batch_size):
        return fit_step(lengths, 16, batch_size=batch_size, num_replicas=1, memory=choice.memory)

    size = choice.best_size(lengths, fit(batch_size), batch_size, fit)
    chosen, planned = choice.chosen(lengths, size.limits), fullest_load(lengths, size.limits)
    asked = Recipe("ddp", "random", batch_size, 16 // batch_size, "full", target_rows=True)
    advised = held.estimate(held.packed(asked)).filled()
    assert free_levels(choice.costs) == choice.given
    assert (advised.recipe.limits, advised.recipe.micro_batches) == (size.limits, size.micro_batches)
    assert advised.memory.levels == chosen.levels
    assert advised.fits and advised.peaks[0] == pytest.approx(float(chosen.peak_bytes(planned)))


def test_packs_of_a_batch_that_does_not_fit_are_several_in_advise_too():
    *_, held = on_one("8B", "H200-141GB")
    for batch, packs in ((4, 4), (16, 3)):
        found = advise(held, Recipe("ddp", "random", batch, 16 // batch), must_fit=False).after
        assert (found.recipe.batching, found.recipe.micro_batches, found.recipe.recompute) == ("even", packs, "none")
