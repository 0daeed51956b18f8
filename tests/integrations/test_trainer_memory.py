"""What balance counts of memory: dtypes as trainers hold them, and packs that fit a device it was not told of."""

from dataclasses import replace
from functools import partial
from itertools import chain
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
from accelerate.utils import DistributedDataParallelKwargs
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForImageTextToText, TrainerCallback

from omnibal.advise.memory import OPTIMIZERS, SHARED, RankMemory
from omnibal.cluster import OVERHEAD_BYTES, Cluster
from omnibal.cost import Load
from omnibal.data.lengths import SampleLengths
from omnibal.data.limits import PackLimits, largest_load
from omnibal.data.step_size import fit_step
from omnibal.device import DEVICES, MOST_MARGIN_SHARE
from omnibal.errors import InfeasibleError
from omnibal.integrations.trainer.memory import GIB, HeldBytes, device_gib
from omnibal.integrations.trainer.recompute import FillsMemory
from omnibal.integrations.trainer.settings import TrainerSettings
from omnibal.integrations.trainer.steps import counted_profile
from omnibal.integrations.transformers import balance
from omnibal.profile.records import ELEMENT_BYTES
from omnibal.ranks import gather
from tests.integrations.items import config_of
from tests.integrations.trainers import LIMITS, Case, trainer_of, zero_config
from tests.vlm.families import plain_family_model
from tools.gpu.models import config_of as public_config
from tools.gpu.models import made_lengths

ZERO2 = {"zero_optimization": {"stage": 2}}
BUCKETS = {"reduce_bucket_size": "auto", "overlap_comm": True}
OFFLOADED = {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}


def fake_trainer(mixed="no", config=None, fsdp=None, optim="adamw_torch", optimizer=None, ranks=1):
    plugins = {"deepspeed_plugin": SimpleNamespace(deepspeed_config=config), "fsdp_plugin": fsdp}
    return SimpleNamespace(
        is_deepspeed_enabled=config is not None,
        is_fsdp_enabled=fsdp is not None,
        accelerator=SimpleNamespace(
            mixed_precision=mixed, state=SimpleNamespace(**plugins), ddp_handler=DistributedDataParallelKwargs()
        ),
        args=SimpleNamespace(optim=optim, world_size=ranks),
        optimizer=optimizer,
    )


def state_bytes(trainer, model, sharding, ranks=1):
    """What a rank holds beside activations."""
    held = HeldBytes.of(trainer, model, sharding)
    profile = counted_profile(model, None, dtype=held.dtype)
    cluster = Cluster(1, ranks, DEVICES["H200-141GB"])
    memory = RankMemory(profile, sharding, cluster, "none", True, held.offloaded, held.precision)
    return memory.state_bytes - OVERHEAD_BYTES


def weights_of(model):
    return sum(weight.numel() for weight in model.parameters())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_gradients_and_optimizer_are_what_torch_holds(dtype):
    model = plain_family_model(config_of("internvl")).to(dtype)
    optimizer = torch.optim.AdamW(model.parameters())
    for weight in model.parameters():
        weight.grad = torch.zeros_like(weight)
    optimizer.step()
    states = [state[name] for state in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
    held = sum(2 * weight.nbytes for weight in model.parameters()) + sum(state.nbytes for state in states)
    assert held == 4 * dtype.itemsize * weights_of(model)
    assert state_bytes(fake_trainer(), model, "ddp") == pytest.approx(held, rel=0.01)


@pytest.mark.parametrize(
    ("trainer", "sharding", "dtype", "expected"),
    [
        # 16-bit copies of float32 weights, which autocast makes: 4 + 4 + 8 and 2
        (fake_trainer("bf16"), "ddp", torch.float32, 18),
        (fake_trainer("bf16"), "ddp", torch.bfloat16, 8),
        (fake_trainer(optim="sgd"), "ddp", torch.bfloat16, 4),
        (fake_trainer(optimizer=torch.optim.SGD([torch.zeros(1)])), "ddp", torch.bfloat16, 4),
        # weights and, shared by two ranks, gradients, masters and states
        (fake_trainer("bf16", ZERO2 | {"bf16": {"enabled": True}}), "zero2", torch.float32, 2 + 14 / 2),
        (fake_trainer("no", ZERO2), "zero2", torch.float32, 4 + 16 / 2),
        (
            fake_trainer("bf16", ZERO2 | {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}}),
            "zero2", torch.bfloat16, 2 + 10 / 2,
        ),
        (
            fake_trainer("bf16", OFFLOADED | {"bf16": {"enabled": True}}),
            "zero2", torch.bfloat16, 2,
        ),
    ],
)  # fmt: skip
def test_bytes_of_a_weight_follow_from_model_arguments_and_engine(trainer, sharding, dtype, expected):
    model = plain_family_model(config_of("internvl")).to(dtype)
    ranks = 1 if sharding == "ddp" else 2
    assert state_bytes(trainer, model, sharding, ranks) / weights_of(model) == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize(
    ("trainer", "sharding", "expected"),
    [
        (fake_trainer("bf16", ranks=2), "ddp", None),
        (fake_trainer("bf16"), "ddp", 0),
        (fake_trainer("no", {"zero_optimization": {"stage": 0}}, ranks=2), "ddp", 0),
        (fake_trainer("bf16", ZERO2, ranks=2), "zero2", 500_000_000),
        (fake_trainer("bf16", {"zero_optimization": BUCKETS | {"stage": 2}}), "zero2", 2 * 640 * 640),
        (fake_trainer("bf16", {"zero_optimization": BUCKETS | {"stage": 3}}), "zero3", 640 * 640),
    ],
)
def test_gradients_wait_in_buffers_to_be_sent(trainer, sharding, expected):
    model = plain_family_model(config_of("internvl"))
    counted, in_float32 = (counted_profile(model, None, dtype=dtype) for dtype in ("bfloat16", "float32"))
    model.config.text_config.hidden_size = 640
    held = HeldBytes.of(trainer, model, sharding)
    assert held.buffered == expected
    if expected is None:  # weights and gradients of DDP are in float32 under autocast
        assert held.buffer_bytes(counted) == pytest.approx(4 * weights_of(model), rel=0.01)
    else:
        assert held.buffer_bytes(in_float32) == 4 * expected


@pytest.mark.parametrize("offloads", [False, True])
@pytest.mark.parametrize("version", [1, 2])
def test_fsdp_shards_float32_weights_where_it_mixes_precisions(version, offloads):
    one = SimpleNamespace(offload_params=offloads)
    two = SimpleNamespace(pin_memory=True) if offloads else SimpleNamespace()
    plugin = SimpleNamespace(cpu_offload=one if version == 1 else two)
    model = plain_family_model(config_of("internvl")).to(torch.bfloat16)
    held = HeldBytes.of(fake_trainer("bf16", fsdp=plugin), model, "fsdp")
    assert (held.precision.master, held.precision.state_bytes) == (True, 4)
    assert held.offloaded == (("optimizer", "parameters") if offloads else ())
    held = HeldBytes.of(fake_trainer("no", fsdp=plugin), model, "fsdp")
    assert (held.precision.master, held.precision.state_bytes) == (False, 2)


def test_adapters_in_float32_do_not_make_a_model_float32():
    model = plain_family_model(config_of("internvl")).to(torch.bfloat16)
    model = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"]))
    assert {weight.dtype for weight in model.parameters() if weight.requires_grad} == {torch.float32}
    held = HeldBytes.of(fake_trainer("bf16", optim="adamw_bnb_8bit"), model, "ddp")
    assert (held.dtype, held.precision.master, held.precision.autocast) == ("bfloat16", True, False)
    assert held.precision.optimizer == OPTIMIZERS["adamw_bnb_8bit"]


@pytest.mark.parametrize(
    ("name", "level", "limits", "measured"),
    [
        ("8B", "full", (19, 5504), 64.2),
        ("8B", "full", (38, 10944), 67.0),
        ("2B", "none", (19, 5504), 46.3),
        ("2B", "full", (19, 5504), 17.2),
    ],
)
def test_predicted_peaks_are_those_that_an_h200_measured(name, level, limits, measured):
    """torch.cuda.max_memory_allocated of transformers' Trainer on packs (tools/gpu), which knows no overhead."""
    load = largest_load(made_lengths(name, 3800), PackLimits(*limits))
    peak = float(on_h200(name, level, 139.8).peak_bytes(load)) - OVERHEAD_BYTES
    assert peak / GIB == pytest.approx(measured, rel=0.02)


def on_h200(name, level, memory_gib):
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(public_config(name), dtype=torch.bfloat16)
    held = HeldBytes.of(fake_trainer(optim="adamw_torch_fused"), model, "ddp")
    cluster = Cluster(1, 1, DEVICES["H200-141GB"], memory_bytes=memory_gib * GIB)
    return RankMemory(counted_profile(model, "NVIDIA H200"), "ddp", cluster, level, True, (), held.precision)


def test_packs_that_ran_out_of_memory_become_two():
    """16 x 1 of 2B without checkpointing needed more than 139.5 GiB."""
    memory, lengths = on_h200("2B", "none", 0.94 * 139.8), made_lengths("2B", 3800)
    asked = {"batch_size": 16, "num_replicas": 1}
    full = fit_step(lengths, 16, **asked)
    assert full.micro_batches == 1
    assert float(memory.peak_bytes(largest_load(lengths, full.limits))) > 139.5 * GIB
    size = fit_step(lengths, 16, **asked, memory=memory)
    assert size.micro_batches == 2
    assert float(memory.peak_bytes(largest_load(lengths, size.limits))) < memory.budget_bytes


def test_a_device_keeps_a_margin_and_the_smallest_of_all_ranks_decides(monkeypatch):
    device, totals = torch.device("cuda", 1), {0: 80, 1: 100}
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda asked: (0, totals[asked.index] * GIB))
    assert device_gib(device) == pytest.approx(94)
    totals[1] = 20
    assert device_gib(device) == 18
    assert device_gib(torch.device("cpu")) is None
    for others, expected in (([24 * GIB, 18 * GIB], 16), ([None], None)):
        monkeypatch.setattr("omnibal.integrations.trainer.memory.gather", lambda own, others=others: [own, *others])
        assert device_gib(device) == expected


ASKED = {"per_device_train_batch_size": 11, "gradient_accumulation_steps": 1}


def peaks_of(trainer, sampler, memory=None):
    """Predicted bytes of each pack of an epoch, fillers included."""
    memory = memory or TrainerSettings.of(trainer).memory(8.0)
    lengths, peaks = sampler.lengths, []
    for pack in (pack for step in range(sampler.num_steps) for pack in sampler.packs_of_all_ranks(step)):
        own = lengths.take(np.array([*pack, *pack.fillers], dtype=int))
        squares = float((own.llm_tokens.astype(float) ** 2).sum())
        sums = own.vision_units.sum(), own.llm_tokens.sum(), squares, 0.0, own.target_tokens.sum()
        peaks.append(float(memory.peak_bytes(Load(*map(float, sums)))))
    return peaks


def pretend(monkeypatch, gib):
    monkeypatch.setattr("omnibal.integrations.trainer.settings.device_gib", lambda device: gib)


@pytest.mark.parametrize("seed", [0, 1])
def test_packs_fit_the_device_without_a_word(seed, tmp_path, monkeypatch):
    trainer = trainer_of("internvl", tmp_path, **ASKED)
    given = {"lengths": given_lengths(seed, len(trainer.train_dataset)), "check_lengths": False}
    plain = balance(trainer, memory_gib=float("inf"), **given)
    memory = TrainerSettings.of(trainer).memory(8.0)
    largest = float(memory.peak_bytes(largest_load(plain.lengths, plain.limits)))
    room = 0.7 * largest + 0.3 * memory.state_bytes
    pretend(monkeypatch, room / GIB)
    trainer = trainer_of("internvl", tmp_path, **ASKED)
    fitted = balance(trainer, **given)
    assert fitted.micro_batches > plain.micro_batches
    assert max(peaks_of(trainer, fitted)) <= room
    # Limits that are given stay, and an infinite memory is not asked.
    for options in ({"memory_gib": float("inf")}, {"limits": plain.limits}):
        assert balance(trainer_of("internvl", tmp_path, **ASKED), **given, **options).limits == plain.limits


def given_lengths(seed, count):
    rng = np.random.default_rng(seed)
    tiles = rng.integers(0, 3, count)
    texts = rng.integers(2, 9, count)
    return SampleLengths(tiles, 4 * tiles + texts, target_tokens=texts - (tiles == 0))


def check_unlike_devices(folder, layout):
    """On each process: ranks whose devices differ take the same packs, which fit the smaller one."""
    case = Case("internvl", layout, options=ASKED | {"per_device_train_batch_size": 12})

    def made(case):
        trainer = trainer_of(case, folder)
        trainer.train_dataset.items = (3 * trainer.train_dataset.items)[:24]  # a step asks both ranks for all
        return trainer

    trainer = made(case)
    options = {"lengths": given_lengths(0, len(trainer.train_dataset)), "check_lengths": False}
    plain = balance(trainer, memory_gib=float("inf"), **options)
    memory = TrainerSettings.of(trainer).memory(8.0)
    largest = float(memory.peak_bytes(largest_load(plain.lengths, plain.limits)))
    room = 0.7 * largest + 0.3 * memory.state_bytes
    own = room / (1 - MOST_MARGIN_SHARE) + (trainer.args.process_index == 0) * 10 * GIB
    asked = partial(device_gib, torch.device("cuda", 0))
    with (
        mock.patch.object(torch.cuda, "mem_get_info", lambda device: (0, own)),
        mock.patch("omnibal.integrations.trainer.settings.device_gib", lambda device: asked()),
    ):
        trainer = made(case)
        fitted = balance(trainer, **options)
        again = made(replace(case, options=case.options | {"gradient_checkpointing": True}))
        balance(again, plain.limits, **options)
    (fills,) = (each for each in again.callback_handler.callbacks if isinstance(each, FillsMemory))
    assert set(fills.levels) == {"none", "full"}
    assert len(set(gather(fills.levels))) == 1
    assert fitted.micro_batches > plain.micro_batches
    assert len(set(gather((fitted.limits, fitted.micro_batches)))) == 1
    assert max(peaks_of(trainer, fitted)) <= room


class Looks(TrainerCallback):
    """Notes the tensors of each kind that DeepSpeed's ZeRO holds on a rank."""

    def __init__(self, trainer):
        self.trainer, self.weights, self.gradients, self.optimizer = trainer, {}, {}, {}

    def on_train_begin(self, *_, **__):
        zero, stage = self.trainer.deepspeed.optimizer, self.trainer.deepspeed.zero_optimization_stage()
        # Gradients are whole on each rank under ZeRO 1 until they are summed, and shared under 2 and 3.
        noted = "reduce_gradients" if stage == 1 else "step"
        plain = getattr(zero, noted)

        def noting(*args, **options):
            if stage == 1:
                self.gradients = storages(weight.grad for weight in self.trainer.model.parameters())
            elif stage == 2:
                self.gradients = storages(chain.from_iterable(zero.averaged_gradients.values()))
            else:
                self.gradients = storages([zero.grad_partitions_flat_buffer])
            return plain(*args, **options)

        setattr(zero, noted, noting)

    def on_train_end(self, *_, **__):
        zero, states = self.trainer.deepspeed.optimizer, []
        self.weights = storages(getattr(weight, "ds_tensor", weight) for weight in self.trainer.model.parameters())
        for master, state in zero.optimizer.state.items():
            states += [master, *(value for value in state.values() if value.dim())]
        self.optimizer = storages(states)


def storages(tensors):
    """Bytes by address."""
    found = [tensor.untyped_storage() for tensor in tensors if tensor is not None]
    return {storage.data_ptr(): storage.nbytes() for storage in found}


def check_held_by_deepspeed(folder, layout):
    """On each process: weights, gradients and optimizer that DeepSpeed holds are those that are counted of a rank."""
    for dtype in ("float32", "bfloat16"):
        config = zero_config(int(layout[-1])) | {"bf16": {"enabled": dtype == "bfloat16"}}
        options = {"deepspeed": config, "bf16": dtype == "bfloat16", "optim": "adamw_torch"}
        trainer = trainer_of(Case("internvl", layout, options=options), folder / dtype, max_steps=1)
        balance(trainer, LIMITS["internvl"])
        looks = Looks(trainer)
        trainer.add_callback(looks)
        memory = TrainerSettings.of(trainer).memory(8.0)
        trainer.train()
        ranks, optimizer = trainer.args.world_size, looks.optimizer.keys() - looks.weights.keys()
        sizes = [getattr(weight, "ds_numel", weight.numel()) for weight in trainer.model.parameters()]
        largest = max(sizes) * ELEMENT_BYTES[dtype]
        held = {
            "parameter_bytes": sum(looks.weights.values()),
            "gradient_bytes": sum(looks.gradients.values()),
            "optimizer_bytes": sum(looks.optimizer[place] for place in optimizer),
        }
        assert memory.profile.dtype == dtype
        for name, found in held.items():
            counted = sum(getattr(layer, name) for layer in memory.held.layers)
            counted /= ranks if name in SHARED[layout] else 1
            # Under ZeRO 2 a tensor that lies in two ranks' parts is whole on both.
            whole = largest if (layout, name) == ("zero2", "gradient_bytes") else 0
            assert 0.98 * counted <= found <= 1.02 * (counted + whole), (layout, dtype, name, found / counted)


def test_a_device_that_seems_too_small_warns_and_trains(tmp_path, monkeypatch, capsys):
    plain = balance(trainer_of("internvl", tmp_path, **ASKED))
    assert "memory" not in capsys.readouterr().out
    pretend(monkeypatch, 2.0001)
    sampler = balance(trainer_of("internvl", tmp_path, **ASKED))
    assert sampler.limits == plain.limits
    assert "omnibal: memory must hold the largest sample" in capsys.readouterr().out
    with pytest.raises(InfeasibleError, match="memory must hold the largest sample"):
        balance(trainer_of("internvl", tmp_path, **ASKED), memory_gib=2.0001)


def test_a_model_that_is_not_counted_is_not_asked(tmp_path, monkeypatch):
    pretend(monkeypatch, 2.0001)
    assert balance(trainer_of("idefics3", tmp_path, **ASKED)).num_steps
