"""transformers.Trainer on two gloo processes trains what plain transformers would, sample by sample."""

import logging
import os
import re
import signal
from copy import deepcopy
from dataclasses import fields
from functools import partial
from itertools import combinations_with_replacement, product
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

pytest.importorskip("accelerate")

from deepspeed import set_optimizer_flags
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.zero.muon.muon_optimizer import MuonWithAuxAdam
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast, Trainer, TrainerCallback, TrainingArguments
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.models.qwen3_vl_moe.modeling_qwen3_vl_moe import load_balancing_loss_func
from transformers.trainer_pt_utils import AcceleratorConfig

from omnibal.data.lengths import SampleLengths
from omnibal.data.limits import PackLimits
from omnibal.data.packs import Packs
from omnibal.errors import ConfigError, DataError
from omnibal.integrations.loops import balanced_loader, replace_loader
from omnibal.integrations.trainer.loss import StepLoss
from omnibal.integrations.trainer.settings import (
    RULES,
    TrainerSettings,
    batch_size_of,
    data_rank_of,
    refuse_settings,
    why_all_rows,
)
from omnibal.integrations.transformers import balance, rearrange
from omnibal.packs.losses import loss_per_target
from omnibal.processes import ENDS
from tests.engine.launch import launch
from tests.integrations.items import Collate, config_of, items_of
from tests.integrations.test_compare import check_compare
from tests.integrations.test_trainer_memory import check_held_by_deepspeed, check_unlike_devices
from tests.integrations.trainers import (
    LEARNING_RATE,
    LIMITS,
    Case,
    Weights,
    accelerate_afresh,
    assert_close,
    check_evaluation,
    mean_losses,
    samples_under_limits,
    trainer_of,
    weights_of,
)
from tests.vlm.families import plain_backward, plain_family_model, plain_inputs

RECOMPUTES, WORKERS = {"gradient_checkpointing": True}, {"dataloader_num_workers": 1}
HALF = {"vision": "full", "language": "none"}
EVERY = {"gradient_accumulation_steps": 1}
COMPILED = {"torch_compile": True, "torch_compile_backend": "eager"}
CASES = [
    Case("qwen2_5_vl", frozen_vision=True, options=WORKERS),
    Case("internvl", "zero1", recompute={"vision": "none"}, options=RECOMPUTES),
    Case("internvl", "zero2", frozen_vision=True, loss_reduction="square", padded=True, options=EVERY),
    Case("qwen3_vl_moe", "zero3", lora=True, router_factor=1.0, recompute=HALF, options=EVERY | RECOMPUTES),
    Case("internvl", "zero3", samples=3, zero={"zero_hpz_partition_size": 2}),
    Case("internvl", "fsdp", samples=3),
    Case("internvl", "tp"),
]
"""Every way to share the work meets packs without an image beside packs with one, and packs without a sample."""
MORE_CASES = [
    Case("internvl"),
    Case("qwen3_vl", lora=True, options=RECOMPUTES),
    Case("qwen2_5_vl", "zero2", lora=True),
    Case("internvl", "zero3", options=WORKERS),
    Case("qwen2_5_vl", "fsdp", lora=True, recompute=HALF, options=EVERY | RECOMPUTES),
]
PAIRED, MORE_PAIRED = [("qwen3_vl", "zero2"), ("qwen2_5_vl", "fsdp")], [("qwen3_vl", "ddp"), ("qwen2_5_vl", "zero3")]
NOTHING = "nothing"
HEARING = {"qwen2_audio": ("", "sound"), "qwen2_5_omni_thinker": ("", "image", "sound", "image+sound")}
UNLIKE = [("image", "sound"), ("sound", NOTHING)]
"""Pairs whose ranks would wait for each other under ZeRO 3."""
RESUMED = [
    Case("qwen2_5_vl", kinds=("video", "image", "", "image+video", "video+video", "") * 2),
    Case("internvl", "zero3", born_sharded=True),
]
MORE_RESUMED = [Case("internvl"), Case("internvl", "fsdp")]


def check_exact(case, folder, limits=None):
    """Three steps: gradients and weights of plain transformers on the same samples, one by one."""
    plain, items = case.plain(), items_of(case.family)
    trainer = trainer_of(case, folder, max_steps=3)
    weights = Weights(trainer)
    trainer.add_callback(weights)
    limits = limits or LIMITS[case.family]
    options = {"samples_per_step": samples_under_limits(trainer)}
    options |= {"loss_reduction": case.loss_reduction, "padded": case.padded, "recompute": case.recompute}
    sampler = balance(trainer, limits, **options)
    assert sampler.num_replicas == trainer.args.world_size // (2 if case.layout == "tp" else 1)
    if case.layout == "tp":
        assert sampler.rank == trainer.model._device_mesh["fsdp"].get_local_rank()
    trainer.train()

    backward = plain_backward if case.loss_reduction == "token" else square_backward
    optimizer = torch.optim.SGD([p for p in plain.parameters() if p.requires_grad], lr=LEARNING_RATE)
    assert len(weights.steps) == 4
    fillers = []
    for number in range(3):
        before, after = weights.steps[number : number + 2]
        sampler.set_epoch(number // sampler.num_steps)
        packs = sampler.packs_of_all_ranks(number % sampler.num_steps)
        fillers += [(len(pack) == 0, pack.fillers) for pack in packs if pack.fillers]
        backward(plain, [items[sample] for pack in packs for sample in pack])
        if case.router_factor:
            router_backward(plain, [[items[sample] for sample in pack] for pack in packs if pack], case.router_factor)
        gradients = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in plain.named_parameters()}
        found = {name: (before[name] - after[name]) / LEARNING_RATE for name in before}
        assert_close(found, gradients, atol=1e-5)
        optimizer.step()
        optimizer.zero_grad()
    assert_close(weights.steps[-1], weights_of(plain))
    if case.family == "internvl":
        assert fillers, "no rank would have waited for another"
        assert any(is_empty for is_empty, _ in fillers) == (case.samples is not None)


@torch.compiler.set_stance("force_eager")  # DeepSpeed compiles Muon's products, in seconds
def check_muon(folder):
    """DeepSpeed's Muon on two ranks that share its state takes the steps that it takes alone."""
    muon = {"type": "Muon", "params": {"lr": LEARNING_RATE, "weight_decay": 0.0, "torch_adam": True}}
    case = Case("internvl", "zero2", optimizer=muon)
    trainer = trainer_of(case, folder, max_steps=3)
    sampler = balance(trainer, LIMITS["internvl"], samples_per_step=samples_under_limits(trainer))
    trainer.train()

    plain, items = case.plain(), items_of(case.family)
    before = weights_of(plain)
    set_optimizer_flags(SimpleNamespace(optimizer_name="muon", optimizer_params={}), plain)
    groups = DeepSpeedEngine._muon_param_groups(list(plain.parameters()), muon["params"])
    optimizer = MuonWithAuxAdam(groups)
    for number in range(3):
        sampler.set_epoch(number // sampler.num_steps)
        packs = sampler.packs_of_all_ranks(number % sampler.num_steps)
        plain_backward(plain, [items[sample] for pack in packs for sample in pack])
        optimizer.step()
        optimizer.zero_grad()
    now = weights_of(plain)
    moved = max(float((now[name] - before[name]).abs().max()) for name in now)
    assert_close(weights_of(trainer.model), now, atol=0.02 * moved)  # Muon iterates in 16 bits, unlike on each CPU


def check_pairs(family, layout, folder, pairs=None):
    """Steps whose two ranks hold pairs of kinds, by default all, after which weights are those of transformers."""
    kinds = HEARING.get(family, ("", "image", "video", "image+video"))
    if pairs is None:
        pairs = [*combinations_with_replacement(kinds, 2), *((kind, NOTHING) for kind in kinds if family in HEARING)]
    case = Case(family, layout, kinds=tuple(kind for pair in pairs for kind in pair), options=EVERY)
    trainer = trainer_of(case, folder, max_steps=len(pairs), per_device_eval_batch_size=1)
    items = trainer.train_dataset.items
    sampler = balance(trainer, PackLimits(400, 200), samples_per_step=2)

    def packs_of_step(step):
        return Packs(*held[(sampler.epoch * sampler.num_steps + step) % len(pairs)])

    # A rank with nothing has an empty pack.
    held = [
        (np.array([2 * pair, 2 * pair + 1][: 2 - kinds.count(NOTHING)]), np.array([0, 1, 2 - kinds.count(NOTHING)]))
        for pair, kinds in enumerate(pairs)
    ]
    sampler.packs_of_step = packs_of_step
    trainer.train()
    plain = case.plain()
    optimizer = torch.optim.SGD(plain.parameters(), lr=LEARNING_RATE)
    for number in range(len(pairs)):
        plain_backward(plain, [items[sample] for sample in held[number][0]])
        optimizer.step()
        optimizer.zero_grad()
    assert_close(weights_of(trainer.model), weights_of(plain), atol=1e-5)
    evaluated = [items[sample] for samples, _ in held if len(samples) == 2 for sample in samples]
    check_evaluation(trainer, plain, evaluated, family)


def square_backward(plain, samples):
    """As InternVL's scripts: a sample of n target tokens weighs the root of n."""
    roots = [int((sample["labels"] != -100).sum()) ** 0.5 for sample in samples]
    for sample, root in zip(samples, roots, strict=True):
        logits = plain(**plain_inputs(sample)).logits[0, :-1]
        (torch.nn.functional.cross_entropy(logits, sample["labels"][1:]) * root / sum(roots)).backward()


def router_backward(plain, packs, factor):
    """transformers' loss of the routers on each pack's samples, run one by one, by its share of the tokens."""
    total = sum(len(sample["input_ids"]) for pack in packs for sample in pack)
    for pack in packs:
        runs = [plain(**plain_inputs(sample), output_router_logits=True).router_logits for sample in pack]
        layers = tuple(torch.cat(layer) for layer in zip(*runs, strict=True))
        (factor * len(layers[0]) / total * load_balancing_loss_func(layers, layers[0].shape[1], 2)).backward()


def check_epochs_and_resume(case, folder):
    """Every sample once an epoch, in another order each; resumed within epoch 1, a run ends as it would have."""
    options = {"num_train_epochs": 2, "save_strategy": "steps", "gradient_accumulation_steps": 1}
    trainer = trainer_of(case, folder, **options)
    asked = samples_under_limits(trainer)
    sampler = balance(trainer, LIMITS[case.family], samples_per_step=asked)
    assert sampler.num_steps > 2
    trainer.args.save_steps = trainer.state.save_steps = sampler.num_steps + 1
    dataset = trainer.train_dataset
    orders = []
    for epoch in range(2):
        sampler.set_epoch(epoch)
        orders.append([sampler.packs_of_all_ranks(step) for step in range(sampler.num_steps)])
    sampler.set_epoch(0)
    dataset.read.clear()
    trainer.train()
    own = [[sample for step in order for sample in with_filler(step[sampler.rank])] for order in orders]
    assert dataset.read[-sum(map(len, own)) :] == own[0] + own[1]
    assert orders[0] != orders[1]
    for order in orders:
        assert sorted(sample for step in order for pack in step for sample in pack) == list(range(len(dataset)))

    again = trainer_of(case, folder, **options, save_steps=trainer.args.save_steps)
    balance(again, LIMITS[case.family], samples_per_step=asked)
    again.train(resume_from_checkpoint=str(folder / f"checkpoint-{sampler.num_steps + 1}"))
    rest = [sample for step in orders[1][1:] for sample in with_filler(step[sampler.rank])]
    assert again.train_dataset.read[-len(rest) :] == rest
    assert_close(weights_of(again.model), weights_of(trainer.model))


def check_mixture(case, folder):
    """Two parts of the dataset get the shares that were asked for, logged, and a resumed run goes on with them."""
    found = []
    for resumes in (False, True):
        trainer = trainer_of(
            case, folder, max_steps=8, save_strategy="steps", save_steps=4, logging_steps=8, logging_strategy="steps"
        )
        dataset = trainer.train_dataset
        source = [int(sample >= 4) for sample in range(len(dataset))]
        lengths = balance(trainer_of(case, folder, max_steps=8), LIMITS[case.family]).lengths
        lengths = SampleLengths(**lengths.columns(), source=source, source_names=["first", "others"])
        options = {"samples_per_step": samples_under_limits(trainer), "mixture": {"first": 3, "others": 1}}
        sampler = balance(trainer, LIMITS[case.family], lengths=lengths, **options)
        dataset.read.clear()
        trainer.train(resume_from_checkpoint=str(folder / "checkpoint-4") if resumes else None)
        packs = [sampler.packs_of_all_ranks(step) for step in range(8)]
        own = [sample for step in packs[4 * resumes :] for sample in own_packs(sampler, step)]
        assert dataset.read[-len(own) :] == own
        found.append(weights_of(trainer.model))
        drawn = np.bincount([source[sample] for step in packs for pack in step for sample in pack])
        assert 0.55 < drawn[0] / drawn.sum() < 0.95
        logged = [record["share_first"] for record in trainer.state.log_history if "share_first" in record]
        assert 0.55 < logged[-1] < 0.95
    assert_close(*found)


def own_packs(sampler, step):
    first = sampler.rank * sampler.micro_batches
    return [sample for pack in step[first : first + sampler.micro_batches] for sample in with_filler(pack)]


def with_filler(pack):
    return [*pack, *pack.fillers]


def check_unlike_data(folder):
    """What is wrong on one rank ends all of them, none waits."""
    trainer = trainer_of("internvl", folder)
    lengths = SampleLengths([1] * 11, [20 + trainer.args.process_index] * 11)
    with pytest.raises(ConfigError, match=r"rank 1: .* must be the same on all ranks"):
        balance(trainer, LIMITS["internvl"], lengths=lengths)
    if trainer.args.process_index:
        trainer.train_dataset.items[3] = None
    with pytest.raises(DataError, match="rank 1: sample 3: TypeError: 'NoneType' object"):
        balance(trainer, LIMITS["internvl"])
    if trainer.args.process_index:
        trainer.train_dataset.items.pop()
    with pytest.raises(DataError, match="the dataset must have as many samples on all ranks"):
        balance(trainer, LIMITS["internvl"])


def train_cases(folder, cases, paired, resumed):
    """On each process."""
    with accelerate_afresh():
        for number, case in enumerate(cases):
            check_exact(case, folder / f"case{number}")
        for family, layout in paired:
            check_pairs(family, layout, folder / f"{family}-{layout}")
        for number, case in enumerate(resumed):
            check_epochs_and_resume(case, folder / f"resumed{number}")
    return True


def train_others(folder):
    with accelerate_afresh():
        check_pairs("qwen2_5_omni_thinker", "zero3", folder / "omni", UNLIKE)
        check_muon(folder / "muon")
        check_mixture(Case("internvl"), folder / "mixture")
        for family in ("qwen2_5_vl", "internvl", "qwen2_audio"):
            check_held_out(family, folder / f"held-out-{family}")
        for family in ("qwen2_5_vl", "internvl"):
            check_replaced_loader(family, folder / f"replaced-{family}")
        check_split_batches(folder / "split")
        check_unlike_data(folder / "unlike")
        check_texts_alone(folder / "texts")
        check_compare(folder / "compared")
        for layout in ("ddp", "zero2", "zero3", "fsdp"):
            check_unlike_devices(folder / f"devices-{layout}", layout)
        for layout in ("zero1", "zero2", "zero3"):
            check_held_by_deepspeed(folder / f"held-{layout}", layout)
    return True


def check_held_out(family, folder):
    """Held-out losses, of sets that divide by ranks times batch and of others, are plain Trainer's or exact."""
    items = items_of(family)
    sets = {"whole": items[:8], "uneven": items[:11], "one": items[:1], "three": items[:3]}
    options = {"per_device_eval_batch_size": 2, "eval_dataset": sets, "max_steps": 1, "logging_strategy": "steps"}
    trains = options | {"eval_on_start": True, "eval_strategy": "steps", "eval_steps": 1}
    other, trainer = trainer_of(family, folder, **options), trainer_of(family, folder, **trains)
    balance(trainer, LIMITS[family])

    def losses_of(evaluated):
        found = evaluated.evaluate()
        return {name: found[f"eval_{name}_loss"] for name in sets}

    expected, found = losses_of(other), losses_of(trainer)
    if trainer.model_accepts_loss_kwargs:
        plain = Case(family).plain()
        expected = {name: mean_losses(plain, held_out, family)[0] for name, held_out in sets.items()}
    assert found == pytest.approx(expected, rel=1e-5 if trainer.model_accepts_loss_kwargs else 0)
    trainer.args.prediction_loss_only = True  # predict gathers all that a model returns, and images differ by rank
    assert trainer.predict(sets["uneven"]).metrics["test_loss"] == found["uneven"]
    trainer.train()
    assert trainer.model_wrapped is not trainer.model  # DDP, though the model was evaluated before
    logged = [entry["eval_uneven_loss"] for entry in trainer.state.log_history if "eval_uneven_loss" in entry]
    assert logged[-2:] == [found["uneven"], losses_of(trainer)["uneven"]]
    assert logged[-1] < logged[-2]


def check_replaced_loader(family, folder):
    """A trainer whose loader alone is replaced trains the samples of its steps, exactly if it is asked to."""
    options = {"per_device_train_batch_size": 2, "per_device_eval_batch_size": 2, "logging_strategy": "steps"}
    trainer = trainer_of(family, folder, max_steps=3, logging_steps=1, **options)
    loader = replace_loader(trainer, PackLimits(2000, 900), model=trainer.model, exact_loss=True)
    sampler, found = loader.pack_sampler, weights_of(trainer.model)
    assert trainer.args.gradient_accumulation_steps == sampler.micro_batches
    assert (sampler.num_steps, sampler.num_replicas) == (2, 2)  # 11 samples, of which a step asks 8
    trainer.train()
    plain, items, losses = Case(family).plain(), items_of(family), []
    assert_close(found, weights_of(plain))
    optimizer = torch.optim.SGD(plain.parameters(), lr=LEARNING_RATE)
    for number in range(3):
        sampler.set_epoch(number // sampler.num_steps)
        packs = sampler.packs_of_all_ranks(number % sampler.num_steps)
        losses.append(plain_backward(plain, [items[sample] for pack in packs for sample in pack])[0])
        optimizer.step()
        optimizer.zero_grad()
    assert_close(weights_of(trainer.model), weights_of(plain), atol=1e-5)
    assert [entry["loss"] for entry in trainer.state.log_history if "loss" in entry] == pytest.approx(losses, rel=1e-4)


def check_texts_alone(folder):
    """DDP that looks for no unused parameters would fail in the second step."""
    trainer = trainer_of(Case("internvl", options=RECOMPUTES), folder)
    trainer.train_dataset.items = [item for item in items_of("internvl") if item["pixel_values"] is None]
    with pytest.raises(ConfigError, match=r"got none of vision for model.vision_tower.\S+; .*freeze it"):
        balance(trainer, LIMITS["internvl"])
    trainer.model.model.vision_tower.requires_grad_(False)
    trainer.model.model.multi_modal_projector.requires_grad_(False)
    balance(trainer, LIMITS["internvl"])


@pytest.mark.distributed
@pytest.mark.parametrize(
    "cases",
    [
        pytest.param((CASES, PAIRED, RESUMED), id="covering"),
        pytest.param((MORE_CASES, MORE_PAIRED, MORE_RESUMED), id="others", marks=pytest.mark.slow),
    ],
)
def test_two_processes_train_what_plain_transformers_would(cases, tmp_path):
    assert launch(2, "tests.integrations.test_trainer:train_cases", tmp_path, *cases) == [True, True]


@pytest.mark.distributed
def test_two_processes_of_unlike_data_train_or_end_together(tmp_path):
    assert launch(2, "tests.integrations.test_trainer:train_others", tmp_path) == [True, True]


def train_hearing(folder):
    with accelerate_afresh():
        for family, layout in product(HEARING, ("ddp", "zero2", "zero3", "fsdp")):
            check_pairs(family, layout, folder / f"{family}-{layout}")
    return True


@pytest.mark.slow
@pytest.mark.distributed
def test_two_processes_of_which_one_hears_train_what_plain_transformers_would(tmp_path):
    assert launch(2, "tests.integrations.test_trainer:train_hearing", tmp_path) == [True, True]


def train_on_a_mesh(folder):
    with accelerate_afresh():
        check_exact(Case("internvl", "tp"), folder)
    return True


@pytest.mark.slow
@pytest.mark.distributed
def test_four_processes_of_two_replicas_train_the_same(tmp_path):
    assert launch(4, "tests.integrations.test_trainer:train_on_a_mesh", tmp_path) == [True] * 4


def train_compiled(folder):
    with accelerate_afresh():
        check_exact(Case("internvl", options=COMPILED), folder)
    return True


@pytest.mark.slow
@pytest.mark.distributed
def test_a_compiled_model_trains_the_same(tmp_path):
    assert launch(2, "tests.integrations.test_trainer:train_compiled", tmp_path) == [True, True]


def test_lines_say_what_is_expected_and_what_came(tmp_path, capsys):
    options = {"per_device_train_batch_size": 3, "logging_strategy": "steps", "logging_steps": 2}
    options["include_num_input_tokens_seen"] = "non_padding"
    trainer = trainer_of("internvl", tmp_path, num_train_epochs=2, **options)
    args = trainer.args
    sampler = balance(trainer, LIMITS["internvl"])
    steps = sampler.num_steps
    assert any(pack.fillers for step in range(steps) for pack in sampler.packs_of_all_ranks(step))
    line = capsys.readouterr().out
    assert line.startswith("omnibal: 11 samples in packs of at most 7 vision units and 60 tokens, 1.1 samples each\n")
    told = "2 steps an epoch, 6 samples a step requested, 5.5 on average (gradient_accumulation_steps is 5, was 2)"
    assert f"{told}\n         random batches of 3: " in line
    assert "Dist Ratio" not in line  # one rank waits for nobody
    assert (trainer.args.gradient_accumulation_steps, args.gradient_accumulation_steps) == (5, 2)
    assert re.search(r"random batches of 3: \d\d% of tokens are padding", line)
    assert " hardly any sample shares a pack: more samples a step (samples_per_step=) or larger limits pack\n" in line
    # What packs bring is the head's: hardly any sample shares one.
    assert re.search(r" expected 1\.\d\dx the samples a second .* \(packing 1\.00x, balance \d\.\d\dx, head on", line)
    trainer.train()
    assert "computed for A100-80GB, not measured" in line
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert len(logged) == steps
    assert {"dist_ratio_vision", "dist_ratio_tokens", "waited_seconds"} <= logged[0].keys()
    assert "dist_ratio_sound" not in logged[0]
    # Fillers are no samples, and no padding either.
    assert trainer.state.num_input_tokens_seen == 2 * sum(len(item["input_ids"]) for item in items_of("internvl"))
    assert logged[-1]["num_input_tokens_seen"] == trainer.state.num_input_tokens_seen
    assert "peak_gib_fullest_rank" not in logged[0]


@pytest.mark.parametrize(("lora", "reduction", "padded"), [(False, "token", False), (True, "square", True)])
def test_the_head_works_on_target_rows_alone(tmp_path, lora, reduction, padded):
    eval_dataset, seen = items_of("internvl")[:1], []
    trainer = trainer_of(Case("internvl", lora=lora), tmp_path, eval_dataset=eval_dataset, max_steps=3)
    base = trainer.model.get_base_model() if lora else trainer.model
    base.lm_head.register_forward_hook(
        lambda module, args, logits: seen.append((torch.is_grad_enabled(), tuple(logits.shape)))
    )
    balance(trainer, LIMITS["internvl"], loss_reduction=reduction, padded=padded)
    trainer.train()
    # Before the first step a pack is compared with its samples, without gradients.
    assert {shape for trains, shape in seen if trains} == {(1, 1, 1)}
    seen.clear()
    trainer.evaluate()
    assert [(trains, shape[-1]) for trains, shape in seen] == [(False, base.config.get_text_config().vocab_size)]


class BetweenPasses(TrainerCallback):
    """Evaluates within a step, copies the model, and ends the run as Ctrl-C does."""

    def __init__(self, trainer):
        self.trainer, self.loss, self.copy = trainer, None, None

    def on_substep_end(self, *arguments, **others):
        self.loss, self.copy = self.trainer.evaluate()["eval_loss"], deepcopy(self.trainer.model)
        raise KeyboardInterrupt


def test_between_passes_the_model_is_as_ever(tmp_path):
    trainer = trainer_of("internvl", tmp_path, max_steps=1, eval_dataset=items_of("internvl")[:3])
    balance(trainer, LIMITS["internvl"])
    expected, within = trainer.evaluate()["eval_loss"], BetweenPasses(trainer)
    trainer.add_callback(within)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert within.loss == trainer.evaluate()["eval_loss"] == pytest.approx(expected)
    assert "forward" not in vars(within.copy.lm_head)
    assert not within.copy._forward_hooks
    assert trainer.model.train()(**plain_inputs(items_of("internvl")[0])).logits.dim() == 3
    trainer.remove_callback(BetweenPasses)
    assert trainer.train().global_step == 1


def test_a_model_that_is_made_as_training_begins_has_its_head_on_target_rows(tmp_path):
    seen, first = [], trainer_of("internvl", tmp_path, max_steps=1)

    def made():
        model = Case("internvl").plain()
        model.lm_head.register_forward_hook(lambda *given: seen.append((torch.is_grad_enabled(), given[-1].shape)))
        return model

    data = {"data_collator": first.data_collator, "train_dataset": first.train_dataset}
    trainer = Trainer(args=first.args, model_init=made, **data)
    balance(trainer, LIMITS["internvl"])
    trainer.train()
    assert {shape for trains, shape in seen if trains} == {(1, 1, 1)}


def test_what_steps_were_planned_for_must_stay(tmp_path):
    trainer = trainer_of("internvl", tmp_path, max_steps=1)
    balance(trainer, LIMITS["internvl"])
    trainer.args.gradient_accumulation_steps = 3
    with pytest.raises(ConfigError, match="gradient_accumulation_steps must stay as balance found it, 2, got 3; set"):
        trainer.train()
    trainer.args.gradient_accumulation_steps = 2
    trainer.train_dataset = items_of("internvl")[:5]
    with pytest.raises(ConfigError, match="train_dataset must stay the one that balance has planned, got another"):
        trainer.train()


def test_the_line_says_where_there_is_no_gain(tmp_path, capsys):
    sampler = balance(trainer_of("internvl", tmp_path, max_steps=5), head="all")
    line = capsys.readouterr().out
    assert f" {sampler.num_steps} steps an epoch, 2 samples a step requested, {11 / sampler.num_steps:.1f} on" in line
    assert re.search(r" no gain here: (0.\d|1.0)\dx the samples a second of random batches is expected", line)


def test_a_checkpoint_of_other_packs_is_refused(tmp_path):
    options = {"max_steps": 1, "save_strategy": "steps", "save_steps": 1}
    trainer = trainer_of("internvl", tmp_path, **options)
    balance(trainer, LIMITS["internvl"], samples_per_step=3)
    trainer.train()
    again = partial(trainer_of, "internvl", tmp_path, max_steps=2)
    resumed = {"resume_from_checkpoint": str(tmp_path / "checkpoint-1")}
    for options, limits, samples, message in [
        (
            {},
            PackLimits(7, 65),
            3,
            r"limits of a pack must be as in the checkpoint, PackLimits\(vision_units=7, "
            r"llm_tokens=60, .* got PackLimits\(vision_units=7, llm_tokens=65, .*; balance\(trainer, PackLimits\("
            r"vision_units=7, llm_tokens=60, [^;]*\)\) goes on with the checkpoint's packs, ignore_data_skip=True",
        ),
        (
            {"seed": 7},
            LIMITS["internvl"],
            3,
            r"seed must be .*, 42, got 7; TrainingArguments\(data_seed=42\)",
        ),
        (
            {},
            LIMITS["internvl"],
            6,
            "gradient_accumulation_steps must be .*, 2, got 5; .*samples_per_step",
        ),
    ]:
        other = again(**options)
        balance(other, limits, samples_per_step=samples)
        with pytest.raises(ConfigError, match=message):
            other.train(**resumed)
    for options in ({"seed": 7, "ignore_data_skip": True}, {"restore_callback_states_from_checkpoint": True}):
        anew = again(**options)
        balance(anew, LIMITS["internvl"], samples_per_step=3)
        anew.train(**resumed)
        assert anew.state.global_step == 2


class Fails(TrainerCallback):
    def on_step_end(self, args, state, control, **others):
        raise ArithmeticError


class Terminates(TrainerCallback):
    """The process gets SIGTERM in the second step."""

    def on_step_begin(self, args, state, control, **others):
        if state.global_step == 1:
            os.kill(os.getpid(), signal.SIGTERM)


def test_a_trainer_that_is_asked_to_end_saves_and_goes_on_exactly(tmp_path):
    before, found = signal.getsignal(signal.SIGTERM), []
    for callbacks, folder, resumed in (
        ([Terminates()], tmp_path / "asked", None),
        ([], tmp_path / "asked", str(tmp_path / "asked" / "checkpoint-2")),
        ([], tmp_path / "whole", None),
    ):
        trainer = trainer_of("internvl", folder, max_steps=3, optim="adamw_torch")
        balance(trainer, LIMITS["internvl"], samples_per_step=3)
        for callback in callbacks:
            trainer.add_callback(callback)
        trainer.train(resume_from_checkpoint=resumed)
        assert signal.getsignal(signal.SIGTERM) == before
        assert trainer.state.global_step == (2 if callbacks else 3)
        found.append(weights_of(trainer.model))
    _, went_on, whole = found
    assert all(torch.equal(weight, whole[name]) for name, weight in went_on.items())


def test_signals_mean_what_they_meant_behind_a_training_that_failed(tmp_path):
    before = [signal.getsignal(each) for each in ENDS]
    trainer = trainer_of("internvl", tmp_path, max_steps=1)
    balance(trainer, LIMITS["internvl"])
    trainer.add_callback(Fails())
    with pytest.raises(ArithmeticError):
        trainer.train()
    assert [signal.getsignal(each) for each in ENDS] == before


def test_a_checkpoint_of_other_batches_is_refused(tmp_path):
    options = {"max_steps": 1, "save_strategy": "steps", "save_steps": 1}
    trainer_of("internvl", tmp_path, **options).train()
    trainer = trainer_of("internvl", tmp_path, max_steps=2)
    balance(trainer, LIMITS["internvl"])
    with pytest.raises(ConfigError, match="the checkpoint must have been saved under balance as it is called now"):
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))


def test_a_checkpoint_that_lacks_weights_is_refused(tmp_path):
    trainer = trainer_of("internvl", tmp_path, max_steps=1, save_strategy="steps", save_steps=1)
    balance(trainer, LIMITS["internvl"])
    trainer.train()
    saved = tmp_path / "checkpoint-1" / "model.safetensors"
    weights = load_file(saved)
    del weights["language_model.model.norm.weight"]
    save_file(weights, saved, metadata={"format": "pt"})
    again = trainer_of("internvl", tmp_path, max_steps=2)
    balance(again, LIMITS["internvl"])
    with pytest.raises(ConfigError, match=r"checkpoint-1 must hold all weights of the model, got no .*norm\.weight"):
        again.train(resume_from_checkpoint=str(saved.parent))


def test_weights_are_read_in_the_bits_of_those_that_are_trained(tmp_path):
    trainer = trainer_of("internvl", tmp_path)
    trainer.model.model.vision_tower.bfloat16()
    expected, saved = weights_of(trainer.model), str(tmp_path / "saved")
    trainer.save_model(saved)
    balance(trainer, LIMITS["internvl"])
    for parameter in trainer.model.parameters():
        parameter.data.zero_()
    trainer._load_from_checkpoint(saved)
    assert_close(weights_of(trainer.model), expected, rtol=0, atol=0)


def test_the_best_model_is_loaded_by_its_names_on_disk(tmp_path):
    options = {"max_steps": 2, "eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1}
    options |= {"load_best_model_at_end": True, "greater_is_better": True, "eval_dataset": items_of("internvl")[:3]}
    options |= {"learning_rate": 0.005}  # so that the loss falls in both steps
    trainer = trainer_of("internvl", tmp_path, **options)
    balance(trainer, LIMITS["internvl"])
    weights = Weights(trainer)
    trainer.add_callback(weights)
    trainer.train()
    assert trainer.state.best_global_step == 1
    assert_close(weights_of(trainer.model), weights.steps[1])


def test_a_padded_batch_trains_what_its_samples_alone_would(tmp_path):
    trainer = trainer_of("idefics3", tmp_path, max_steps=2)
    weights = Weights(trainer)
    trainer.add_callback(weights)
    sampler = balance(trainer, PackLimits(8, 60), padded=True)
    trainer.train()
    plain, items, collate = plain_family_model(config_of("idefics3")), items_of("idefics3"), Collate("idefics3")
    optimizer = torch.optim.SGD(plain.parameters(), lr=LEARNING_RATE)
    steps = [sampler.packs_of_all_ranks(step) for step in range(2)]
    assert max(len(pack) for packs in steps for pack in packs) > 1
    for packs in steps:
        batches = [dict(collate([items[sample]])) for pack in packs for sample in pack]
        labels = [batch.pop("labels") for batch in batches]
        targets = sum(int((row[:, 1:] != -100).sum()) for row in labels)
        for batch, row in zip(batches, labels, strict=True):
            loss_per_target(plain(**batch), row, num_items_in_batch=targets).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert_close(weights.steps[2], weights_of(plain))


@pytest.mark.parametrize(("reduction", "padded"), [("square", False), ("sample", True)])
def test_tokens_weigh_as_the_host_says(reduction, padded, tmp_path):
    trainer = trainer_of("internvl", tmp_path, max_steps=1, eval_dataset=items_of("internvl")[:3])
    sampler = balance(trainer, PackLimits(8, 70), padded=padded, loss_reduction=reduction)
    trained = trainer.train().training_loss
    items, plain = items_of("internvl"), plain_family_model(config_of("internvl"))
    samples = [items[sample] for pack in sampler.packs_of_all_ranks(0) for sample in pack]
    losses = [plain_backward(plain, [sample])[0] for sample in samples]  # means over their tokens
    counts = torch.tensor([int((sample["labels"] != -100).sum()) for sample in samples], dtype=torch.float64)
    weights = counts ** (0.5 if reduction == "square" else 0.0)
    assert trained == pytest.approx(float((torch.tensor(losses) * weights).sum() / weights.sum()), rel=1e-5)
    expected = plain_backward(trainer.model, items[:3])[0]
    assert trainer.evaluate()["eval_loss"] == pytest.approx(expected, rel=1e-5)


def test_ranks_that_share_tensors_share_their_packs():
    arguments = SimpleNamespace(process_index=5, world_size=8)
    assert data_rank_of(SimpleNamespace(get_tp_size=lambda: 2, args=arguments)) == (2, 4)
    assert data_rank_of(SimpleNamespace(get_tp_size=lambda: 1, args=arguments)) == (5, 8)


@pytest.mark.parametrize(
    ("options", "of_model", "recomputes", "wants_all"),
    [
        ({}, False, "none", False),
        ({}, True, "full", True),
        (RECOMPUTES, False, "full", True),
        (RECOMPUTES | {"ddp_find_unused_parameters": True}, False, "full", False),
        ({"ddp_find_unused_parameters": False}, False, "none", True),
        ({"ddp_static_graph": True}, False, "none", True),
    ],
)
def test_ddp_awaits_gradients_that_it_does_not_look_for(options, of_model, recomputes, wants_all, tmp_path):
    trainer = trainer_of("internvl", tmp_path, **options)
    if of_model:
        trainer.model.gradient_checkpointing_enable()
        data = {"data_collator": trainer.data_collator, "train_dataset": trainer.train_dataset}
        trainer = Trainer(trainer.model, trainer.args, **data)
    settings = TrainerSettings.of(trainer)
    assert (settings.recompute, settings.all_gradients) == (recomputes, wants_all)


def test_unknown_reductions_and_memory_of_uncounted_models_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="loss_reduction must be one of token, sample, square, got 'mean'"):
        balance(trainer_of("internvl", tmp_path), PackLimits(8, 70), loss_reduction="mean")
    for memory in (0.5, float("nan")):
        with pytest.raises(ConfigError, match=rf"memory_gib must be more than the \d\.\d GiB .*, got {memory}"):
            balance(trainer_of("internvl", tmp_path), memory_gib=memory)
    with pytest.raises(ConfigError, match="memory_gib must be None for a model whose layers are not counted, got 8"):
        balance(trainer_of("idefics3", tmp_path), memory_gib=8)


@pytest.mark.parametrize("options", [{}, COMPILED])
def test_memory_has_the_logits_that_the_head_makes(options, tmp_path):
    trainer = trainer_of("internvl", tmp_path, **options)
    vars(trainer)["compute_loss"] = lambda model, inputs: "forward" in vars(model.lm_head)
    settings = TrainerSettings.of(trainer)
    loss = StepLoss(trainer, settings, "token")
    loss._weights.append(torch.ones(1, 1))
    has_changed_head = loss.compute(trainer.model, {"labels": torch.zeros(1, 2)})
    assert settings.memory(8.0).target_rows == has_changed_head == (not options)


@pytest.mark.parametrize("head", ["targets", "all"])
def test_ligers_fused_loss_stays_away(head, tmp_path, monkeypatch, capsys):
    """Its forward is as in liger-kernel 0.8.5: it asks the head without labels, which Trainer keeps for packs' loss."""
    rows, plain = [], Case("internvl").plain()

    def forward(self, input_ids=None, labels=None, skip_logits=None, logits_to_keep=0, **others):
        assert not (self.training and labels is not None), "the fused loss would be used"
        rows.append(input_ids.shape[1])
        outputs = self.model(input_ids=input_ids, **others)
        return CausalLMOutputWithPast(logits=self.lm_head(outputs[0]))

    options = {"max_steps": 2, "logging_steps": 1, "logging_strategy": "steps"}
    trainer = trainer_of("internvl", tmp_path, use_liger_kernel=True, **options)
    seen = trainer.model.lm_head.register_forward_hook(lambda module, args, output: rows.append(output.numel()))
    patch = partial(monkeypatch.setattr, type(plain), "forward", forward)
    monkeypatch.setattr("transformers.trainer.apply_liger_kernel", lambda model, settings: patch())
    balance(trainer, LIMITS["internvl"], samples_per_step=3, head=head)
    trainer.train()
    seen.remove()
    told = "target rows" if head == "targets" else "all rows (head='all')"
    assert f"; the head works on {told}; Liger's fused loss is not used\n" in capsys.readouterr().out
    assert (rows[-1] == 1) == (head == "targets")
    other = trainer_of("internvl", tmp_path / "plain", **options)
    monkeypatch.undo()
    balance(other, LIMITS["internvl"], samples_per_step=3)
    other.train()
    losses = [[entry["loss"] for entry in each.state.log_history if "loss" in entry] for each in (trainer, other)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


def test_logits_that_a_model_bounds_are_all_made(tmp_path):
    trainer = trainer_of("gemma4", tmp_path)
    assert why_all_rows(trainer) is None
    trainer.model.config.text_config.final_logit_softcapping = 30.0
    assert why_all_rows(trainer) == "final_logit_softcapping"


def test_an_older_transformers_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("transformers.__version__", "5.12.1")
    with pytest.raises(ConfigError, match=r"transformers must be 5.23 or newer, got 5.12.1; .*replace_loader"):
        balance(trainer_of("internvl", tmp_path), LIMITS["internvl"])


def test_sixteen_bits_are_checked_as_such(tmp_path):
    trainer = trainer_of("internvl", tmp_path, max_steps=1, bf16=True)
    balance(trainer, LIMITS["internvl"])
    trainer.train()
    assert trainer.state.global_step == 1


@pytest.mark.parametrize("padded", [False, True])
def test_a_router_is_trained_as_plain_transformers_would(padded, tmp_path):
    limits = PackLimits(600, 130) if padded else LIMITS["qwen3_vl_moe"]
    case = Case("qwen3_vl_moe", router_factor=2.0, padded=padded, options={"gradient_accumulation_steps": 3})
    check_exact(case, tmp_path, limits)
    trainer = trainer_of(case, tmp_path, eval_dataset=items_of(case.family)[:3])
    balance(trainer, limits, padded=padded)
    (batch,) = trainer.get_eval_dataloader()
    with torch.no_grad():
        assert trainer.evaluate()["eval_loss"] == pytest.approx(trainer.model(**batch).loss.item(), rel=1e-5)


def test_a_router_whose_loss_nobody_knows_is_refused(tmp_path):
    trainer = trainer_of("internvl", tmp_path)
    trainer.model.config.text_config.output_router_logits = True
    with pytest.raises(ConfigError, match="output_router_logits must be False for a model_type other than qwen3_vl_"):
        balance(trainer, LIMITS["internvl"])
    with pytest.raises(ConfigError, match="output_router_logits must be False to rearrange samples, got True"):
        rearrange(trainer_of(Case("qwen3_vl_moe", router_factor=1.0), tmp_path))


def test_evaluation_keeps_its_batches(tmp_path):
    trainer = trainer_of("internvl", tmp_path, per_device_eval_batch_size=3)
    items = items_of("internvl")
    trainer.eval_dataset = items[:3]
    balance(trainer, LIMITS["internvl"])
    (batch,) = trainer.get_eval_dataloader()
    assert batch["input_ids"].shape[0] == 3
    expected = plain_backward(plain_family_model(config_of("internvl")), items[:3])[0]
    assert trainer.evaluate()["eval_loss"] == pytest.approx(expected, rel=1e-5)


HARMLESS = (
    # Optimizer and schedule, over the steps that packs make.
    "learning_rate", "lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps", "optim", "optim_args",
    "optim_target_modules", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon", "max_grad_norm",
    # How a micro-batch is computed.
    "bf16", "fp16", "tf32", "activation_checkpointing", "activation_checkpointing_kwargs",
    "gradient_checkpointing", "gradient_checkpointing_kwargs", "torch_compile_backend", "torch_compile_mode",
    "use_liger_kernel", "liger_kernel_config", "use_cache", "torch_empty_cache_steps", "full_determinism",
    # Evaluation is Trainer's own.
    "eval_strategy", "eval_steps", "eval_delay", "per_device_eval_batch_size", "prediction_loss_only",
    "eval_on_start", "eval_do_concat_batches", "eval_use_gather_object", "eval_accumulation_steps",
    "include_for_metrics", "batch_eval_metrics", "bf16_full_eval", "fp16_full_eval", "label_names",
    "load_best_model_at_end", "metric_for_best_model", "greater_is_better",
    # What is logged, saved and sent.
    "output_dir", "logging_strategy", "logging_steps", "logging_first_step", "log_on_each_node",
    "logging_nan_inf_filter", "include_num_input_tokens_seen", "log_level", "log_level_replica", "disable_tqdm",
    "report_to", "run_name", "project", "trackio_space_id", "trackio_bucket_id", "trackio_static_space_id",
    "save_only_model", "save_strategy", "save_steps", "save_on_each_node", "save_total_limit",
    "enable_jit_checkpoint", "push_to_hub", "hub_token", "hub_private_repo", "hub_model_id", "hub_strategy",
    "hub_always_push", "hub_revision", "skip_memory_metrics", "debug",
    # Which ranks there are, and how they talk.
    "use_cpu", "local_rank", "ddp_bucket_cap_mb", "ddp_broadcast_buffers", "ddp_backend", "ddp_timeout",
    # Read by scripts, not by Trainer.
    "do_train", "do_eval", "do_predict", "resume_from_checkpoint",
    # Of batches that packs take the place of: packs are drawn by their own seeded order, each sample once.
    "length_column_name", "accelerator_config.use_seedable_sampler", "accelerator_config.even_batches",
    "accelerator_config.non_blocking", "accelerator_config.use_configured_state",
)  # fmt: skip
HONOURED = (
    "per_device_train_batch_size", "accelerator_config", "accelerator_config.split_batches",
    "gradient_accumulation_steps", "accelerator_config.gradient_accumulation_kwargs",  # Trainer reads num_steps
    "num_train_epochs", "max_steps", "seed", "data_seed", "ignore_data_skip",
    "restore_callback_states_from_checkpoint", "dataloader_num_workers", "dataloader_pin_memory",
    "dataloader_persistent_workers", "dataloader_prefetch_factor", "dataloader_multiprocessing_context",
    "torch_compile", "ddp_find_unused_parameters", "ddp_static_graph", "fsdp", "fsdp_config", "deepspeed",
    "parallelism_config",  # context and sequence parallel ranks are refused by their numbers
)  # fmt: skip


def test_every_setting_is_refused_honoured_or_harmless():
    config = ["accelerator_config." + field.name for field in fields(AcceleratorConfig)]
    of_trl = {"packing", "padding_free"}
    assert {field.name for field in fields(TrainingArguments)} | {*config} | of_trl == {*HARMLESS, *HONOURED, *RULES}


def test_a_batch_that_ranks_split_is_one_of_all_ranks():
    def trainer(size, splits):
        arguments = SimpleNamespace(per_device_train_batch_size=size)
        return SimpleNamespace(args=arguments, accelerator=SimpleNamespace(split_batches=splits))

    assert (batch_size_of(trainer(8, True), 2), batch_size_of(trainer(8, False), 2)) == (4, 8)
    with pytest.raises(ConfigError, match="per_device_train_batch_size must be a multiple of the 2 data-parallel ra"):
        batch_size_of(trainer(7, True), 2)


def check_split_batches(folder):
    """Steps hold what plain Trainer's hold, where ranks split a batch and where Accelerate counts micro-batches."""
    for config, options, steps in (
        ({"split_batches": True}, {"gradient_accumulation_steps": 2}, 3),
        ({"gradient_accumulation_kwargs": {"num_steps": 3}}, {"gradient_accumulation_steps": 1}, 1),
        ({"even_batches": False, "use_seedable_sampler": False}, {"gradient_accumulation_steps": 1}, 3),
    ):
        trainer = trainer_of(
            "internvl", folder, per_device_train_batch_size=2, accelerator_config=config, data_seed=7, **options
        )
        sampler = balance(trainer)
        assert (sampler.num_steps, sampler.state_dict(0)["made_from"]["seed"]) == (steps, 7)


def test_a_replaced_loader_keeps_the_samples_of_a_step_and_says_what_it_changes(tmp_path, capsys):
    trainer = trainer_of("qwen2_5_vl", tmp_path, per_device_train_batch_size=2, data_seed=7, num_train_epochs=1)
    sampler = replace_loader(trainer, PackLimits(2000, 900), model=trainer.model).pack_sampler
    line, loss = capsys.readouterr().out.rsplit("omnibal: ", 1)
    assert line.startswith("omnibal: 11 samples in packs of at most ")
    assert "smaller than the given 2000 vision units and 900 LLM tokens: a larger samples_per_step=" in line
    assert " 3 steps an epoch, 4 samples a step requested, 3.7 on average" in line
    means = f"a step now has the mean of {sampler.micro_batches} packs' means, and not that of its target tokens"
    assert loss.startswith("Trainer.compute_loss stays; where it takes the mean over a batch, as outputs.loss is,")
    assert f"{means}: replace_loader(..., exact_loss=True) takes this one" in loss
    assert (trainer.args.gradient_accumulation_steps, sampler.state_dict(0)["made_from"]["seed"]) == (
        sampler.micro_batches,
        7,
    )
    assert trainer.train().global_step == 3
    asked = replace_loader(trainer_of("qwen2_5_vl", tmp_path), PackLimits(2000, 900), samples_per_step=11)
    assert asked.pack_sampler.num_steps == 1
    with pytest.raises(ConfigError, match="dataloader_drop_last must be False to train on packs, got True"):
        replace_loader(trainer_of("internvl", tmp_path, dataloader_drop_last=True), LIMITS["internvl"])


def own(method):
    """A kind of Trainer with a method of its own."""
    return type("Own", (Trainer,), {method: lambda *_: None})


def with_video(items):
    return Collate("internvl")(items) | {"video_grid_thw": torch.ones(1, 3)}


@pytest.mark.parametrize(
    ("options", "change", "error", "message"),
    [
        *[
            (
                {"train_sampling_strategy": name},
                {},
                ConfigError,
                f"train_sampling_strategy must be random .* got {name}",
            )
            for name in ("group_by_length", "batch_rebalance")
        ],
        ({"remove_unused_columns": True}, {}, ConfigError, "remove_unused_columns must be False"),
        ({"label_smoothing_factor": 0.1}, {}, ConfigError, r"label_smoothing_factor must be 0.0 .* got 0.1"),
        ({"auto_find_batch_size": True}, {}, ConfigError, "auto_find_batch_size must be False"),
        ({"dataloader_drop_last": True}, {}, ConfigError, "dataloader_drop_last must be False .* each sample is train"),
        (WORKERS | {"dataloader_in_order": False}, {}, ConfigError, "dataloader_in_order must be True .* got False"),
        (
            {"accelerator_config": {"dispatch_batches": True}},
            {},
            ConfigError,
            "accelerator_config.dispatch_batches must be None .* got True; each rank reads its own packs",
        ),
        *[
            ({}, {f"get_{short}_size": lambda: 2}, ConfigError, rf"{name}-parallel ranks must be 1 .* got 2; .*\(mesh=")
            for short, name in (("cp", "context"), ("sp", "sequence"))
        ],
        ({"neftune_noise_alpha": 5.0}, {}, ConfigError, "neftune_noise_alpha must be None"),
        ({}, {"get_train_dataloader": min}, ConfigError, "balance must be called once for a trainer"),
        ({}, {"compute_loss_func": min}, ConfigError, "compute_loss_func must be None"),
        *[
            (
                {},
                {"__class__": own(method)},
                ConfigError,
                f"trainer must have Trainer's own {method}, got that of Own; .*replace_loader",
            )
            for method in ("get_train_dataloader", "_get_train_sampler", "compute_loss", "training_step")
        ],
        (
            {},
            {"data_collator": with_video},
            DataError,
            "rank 0: sample 0: data_collator must leave out video_grid_thw .* got .*video_grid_thw",
        ),
        ({}, {"train_dataset": None}, DataError, "the dataset must be read by index .*, got NoneType"),
        ({}, {"train_dataset": []}, DataError, "the dataset must hold at least one sample, got none"),
    ],
)
def test_what_packs_would_break_is_refused(options, change, error, message, tmp_path):
    trainer = trainer_of("internvl", tmp_path, **options)
    for name, value in change.items():
        setattr(trainer, name, value)
    with pytest.raises(error, match=message):
        balance(trainer, PackLimits(7, 60))


def test_limits_that_nothing_keeps_are_refused(tmp_path):
    with pytest.raises(DataError, match=r"limits must hold at least one sample, got 0 vision units and 4 LLM tokens"):
        balance(trainer_of("internvl", tmp_path), PackLimits(0, 4))
    with pytest.raises(DataError, match=r"limits must hold at least one sample, got 0 vision units and 4 LLM tokens"):
        balanced_loader(items_of("internvl"), Collate("internvl"), PackLimits(0, 4), weigh_tokens=False)
    with pytest.raises(DataError, match="dataset must hold at least one sample, got none"):
        balanced_loader([], Collate("internvl"), PackLimits(7, 60), weigh_tokens=False)


def test_samples_of_a_step_are_at_least_one_of_each_rank(tmp_path):
    with pytest.raises(ConfigError, match="samples_per_step must be at least 1, got 0"):
        balance(trainer_of("internvl", tmp_path), samples_per_step=0)


@pytest.mark.parametrize("family", ["internvl", "qwen2_5_vl"])
def test_an_sft_trainer_keeps_its_loss_and_counts_its_tokens(family, tmp_path):
    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
    items, words = items_of(family), Tokenizer(WordLevel({"a": 0, "</s>": 1}, unk_token="a"))
    config = trl.SFTConfig(
        str(tmp_path),
        **{"max_steps": 3, "gradient_accumulation_steps": 2, "per_device_train_batch_size": 3, "optim": "sgd"},
        **{"learning_rate": LEARNING_RATE, "max_grad_norm": 0, "lr_scheduler_type": "constant", "logging_steps": 1},
        **{"use_cpu": True, "bf16": False, "gradient_checkpointing": False, "report_to": [], "disable_tqdm": True},
        **{"save_strategy": "no", "remove_unused_columns": False, "dataset_kwargs": {"skip_prepare_dataset": True}},
    )

    def sft():
        return trl.SFTTrainer(
            model=Case(family).plain(),
            args=config,
            train_dataset=datasets.Dataset.from_dict({"number": range(len(items))}),
            data_collator=lambda rows: Collate(family)([items[row["number"]] for row in rows]),
            processing_class=PreTrainedTokenizerFast(tokenizer_object=words, eos_token="</s>", pad_token="a"),
        )

    trainer = sft()
    sampler = balance(trainer, LIMITS[family])
    trainer.train()
    plain, tokens = Case(family).plain(), 0
    optimizer = torch.optim.SGD(plain.parameters(), lr=LEARNING_RATE)
    for number in range(3):
        sampler.set_epoch(number // sampler.num_steps)
        packs = sampler.packs_of_all_ranks(number % sampler.num_steps)
        tokens += sum(len(items[sample]["input_ids"]) for pack in packs for sample in with_filler(pack))
        plain_backward(plain, [items[sample] for pack in packs for sample in pack])
        optimizer.step()
        optimizer.zero_grad()
    assert_close(weights_of(trainer.model), weights_of(plain))
    assert [entry["num_tokens"] for entry in trainer.state.log_history if "num_tokens" in entry][-1] == tokens
    with pytest.raises(ConfigError, match="loss_reduction must be 'token' for an SFTTrainer, which keeps its own loss"):
        balance(sft(), LIMITS[family], loss_reduction="square")
    with pytest.raises(
        ConfigError, match="trainer must be a Trainer with its own loss to rearrange samples, got SFTTrainer"
    ):
        rearrange(sft())


@pytest.mark.slow
def test_packs_of_unlike_lengths_are_compiled_once(tmp_path):
    trainer = trainer_of(Case("internvl", options=COMPILED), tmp_path, max_steps=12)
    balance(trainer, LIMITS["internvl"], samples_per_step=3)
    found, handler = [], logging.Handler()
    handler.emit = lambda record: found.append(record.getMessage())
    log = logging.getLogger("torch._dynamo")
    log.addHandler(handler)
    try:
        trainer.train()
    finally:
        log.removeHandler(handler)
        torch._dynamo.reset()
    assert not [message for message in found if "recompile_limit" in message]


def test_lengths_are_counted_once_for_a_dataset(tmp_path):
    def lengths_of(replaced=None):
        trainer = trainer_of("internvl", tmp_path)
        if replaced is not None:
            trainer.train_dataset.items[replaced] = trainer.train_dataset.items[replaced + 1]
        sampler = balance(trainer, LIMITS["internvl"])
        return sampler.lengths.content_hash, len(trainer.train_dataset.read)

    first, read = lengths_of()
    again, read_again = lengths_of()
    assert again == first
    assert (read, read_again) == (11 + 11, 11)  # counted and compared on every rank; or compared
    other, read_other = lengths_of(replaced=4)
    assert other != first
    assert read_other == 3 * 11
    assert lengths_of(replaced=4)[0] == other


@pytest.mark.parametrize("padded", [False, True])
def test_a_dataset_that_replaces_a_sample_ends_the_run_or_warns(padded, tmp_path):
    for check, outcome in [
        (True, pytest.raises(DataError, match="must have")),
        (False, pytest.warns(match="as it is")),
    ]:
        trainer = trainer_of("internvl", tmp_path, num_train_epochs=1)
        balance(trainer, LIMITS["internvl"], check_lengths=check, padded=padded)
        trainer.train_dataset.items[4] = trainer.train_dataset.items[1]
        with outcome:
            trainer.train()
    assert trainer.state.epoch == 1


def test_lengths_of_another_dataset_are_refused(tmp_path):
    balanced = partial(balance, trainer_of("internvl", tmp_path), PackLimits(7, 60))
    with pytest.raises(DataError, match="lengths must be those of the dataset's 11 samples, got 2"):
        balanced(lengths=SampleLengths([1, 1], [9, 9]))
    with pytest.raises(DataError, match="rank 0: sample 0 must have the planned vision units"):
        balanced(lengths=SampleLengths([1] * 11, [9] * 11))


def test_ranks_that_deepspeed_lets_share_layers_are_refused(tmp_path):
    trainer = trainer_of("internvl", tmp_path)
    plugin = SimpleNamespace(deepspeed_config={"tensor_parallel": {"autotp_size": 2}})
    trainer.is_deepspeed_enabled = True
    trainer.accelerator = SimpleNamespace(state=SimpleNamespace(deepspeed_plugin=plugin))
    with pytest.raises(
        ConfigError, match=r"tensor_parallel\.autotp_size must be 1 to train on packs, got 2; ranks that"
    ):
        refuse_settings(trainer)
