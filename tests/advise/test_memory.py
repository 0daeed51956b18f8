"""What a rank holds: the loss of transformers' Trainer, optimizers, copies of gradients and weights."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM, Trainer, TrainingArguments

from omnibal.advise.memory import LOGIT_BYTES, RankMemory, TrainingPrecision, optimizer_of
from omnibal.advise.models import Model, adapted_profile
from omnibal.cluster import Cluster
from omnibal.cost import Load
from omnibal.device import DEVICES
from omnibal.families import layer_records
from omnibal.families.parts import text_records
from omnibal.memory.footprint import loss_bytes
from omnibal.memory.recompute import recompute_seconds
from omnibal.packs.losses import target_rows
from omnibal.passes import StorageMeter
from omnibal.profile.counted import analytic_profile
from omnibal.profile.records import LEVELS
from tests.families.models import small_config

TOKENS, VOCABULARIES = 256, (4000, 8000)


def config_of(vocab_size):
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2, "num_key_value_heads": 1}
    return sizes | {
        "model_type": "qwen2", "num_hidden_layers": 1, "vocab_size": vocab_size, "tie_word_embeddings": True,
    }  # fmt: skip


def peak_bytes(vocab_size, folder, targets=8, spared=False):
    """Of a step in 16 bits, of one sample; what parameters are in only once is left out."""
    ids = torch.arange(TOKENS)
    labels = torch.where(ids < TOKENS - targets, -100, ids)
    arguments = TrainingArguments(folder, per_device_train_batch_size=1, use_cpu=True, report_to=[])
    model = Qwen2ForCausalLM(Qwen2Config(**config_of(vocab_size))).to(torch.bfloat16)
    if spared:
        target_rows(model)
    trainer = Trainer(model, arguments, train_dataset=[{"input_ids": ids, "labels": labels}])
    trainer.create_optimizer_and_scheduler(1)
    batch = next(iter(trainer.get_train_dataloader()))
    trainer.training_step(model, dict(batch), torch.tensor(targets))  # makes the gradients that the next one adds to
    with StorageMeter() as meter:
        trainer.training_step(model, dict(batch), torch.tensor(targets))
    return meter.peak_bytes


def test_transformers_loss_holds_the_logits_of_all_tokens_in_float32(tmp_path):
    small, large = (peak_bytes(size, tmp_path) for size in VOCABULARIES)
    more = TOKENS * (VOCABULARIES[1] - VOCABULARIES[0])
    assert (large - small) / more == pytest.approx(LOGIT_BYTES, rel=0.02)


def test_a_head_on_target_rows_holds_the_logits_of_those(tmp_path):
    targets, peaks, expected = TOKENS // 2, [], []
    for vocab_size in VOCABULARIES:
        peaks.append(peak_bytes(vocab_size, tmp_path, targets, spared=True))
        *_, head = analytic_profile(text_records(config_of(vocab_size), tied=True), DEVICES["A100-80GB"]).layers
        expected.append(loss_bytes(head, np.array(targets)))
    assert peaks[1] - peaks[0] == pytest.approx(expected[1] - expected[0], rel=0.03)


def held_bytes(model, spec, precision, sharding="ddp", tokens=1000):
    """Of a rank that trains all of a model."""
    cluster = Cluster.parse(spec)
    profile = analytic_profile(Model.known(model).records, cluster.device)
    memory = RankMemory(profile, sharding, cluster, "full", precision=precision)
    return float(memory.peak_bytes(Load(4 * tokens, tokens, tokens**2))), memory


def test_small_states_let_runs_fit_that_adamw_in_float32_does_not():
    """2 billion parameters on 24 GB: bitsandbytes' 8-bit AdamW on 16-bit weights does it."""
    usual, memory = held_bytes("Qwen2-VL-2B", "RTX4090", TrainingPrecision())
    assert usual > memory.budget_bytes
    small, _ = held_bytes("Qwen2-VL-2B", "RTX4090", TrainingPrecision(optimizer_of("adamw_bnb_8bit"), pure=True))
    assert small < 0.95 * memory.budget_bytes
    trained = sum(layer.gradient_bytes for layer in memory.profile.layers) / 2
    embedding = next(layer for layer in memory.profile.layers if layer.kind == "text_embedding").gradient_bytes / 2
    # 12 bytes become 2, of embeddings 8; its tied head has none of its own
    states = sum(layer.optimizer_bytes for layer in memory.held.layers)
    assert states == 12 * trained
    assert memory.held.layers == memory.profile.layers
    eight = TrainingPrecision(optimizer_of("adamw_bnb_8bit"), pure=True).applied(memory.profile, "ddp")
    kept = sum(layer.optimizer_bytes for layer in eight.layers if layer.kind != "text_embedding")
    assert kept == pytest.approx((2 + 2 * 4 / 256) * (trained - embedding), rel=1e-3)
    assert next(layer for layer in eight.layers if layer.kind == "text_embedding").optimizer_bytes == 8 * embedding


def test_copies_of_gradients_are_there_at_the_update():
    """ZeRO on one device: 16 bytes a parameter, and 6 more while it updates, when activations have gone."""
    peak, memory = held_bytes("Qwen2-VL-2B", "A100-80GB", TrainingPrecision(), "zero2", tokens=10)
    trained = sum(layer.gradient_bytes for layer in memory.profile.layers) / 2
    assert peak - memory.state_bytes == pytest.approx(6 * trained)
    busy, _ = held_bytes("Qwen2-VL-2B", "A100-80GB", TrainingPrecision(), "zero2", tokens=12_000)
    assert busy > peak
    pure, memory = held_bytes("Qwen2-VL-2B", "A100-80GB", TrainingPrecision(master=False), "zero2", tokens=10)
    assert pure - memory.state_bytes < trained
    assert TrainingPrecision().copied_bytes(memory.profile, "zero3", 1) == 6e9  # by sub-groups
    offloaded = RankMemory(memory.profile, "zero2", memory.cluster, "full", offloaded=("optimizer",))
    assert offloaded.update_bytes == 0


def test_quantized_weights_and_ligers_loss_take_less():
    cluster = Cluster.parse("RTX4090")
    profile = adapted_profile(Model.known("Qwen2.5-VL-7B").records, cluster.device, rank=16)
    load = Load(4000, 2000, 2000**2)
    plain, small = (
        RankMemory(profile, "ddp", cluster, "full", precision=TrainingPrecision(weight_bits=bits)) for bits in (16, 4)
    )
    blocks = sum(
        layer.parameter_bytes - layer.gradient_bytes for layer in profile.layers if layer.kind == "decoder_block"
    )
    assert plain.state_bytes - small.state_bytes == pytest.approx((1 - 4.5 / 16) * blocks, rel=1e-3)
    fused = replace(small, precision=TrainingPrecision(weight_bits=4, fused_loss=True))
    logits = LOGIT_BYTES * 2000 * profile.layers[-1].sizes["vocab"]
    assert float(small.peak_bytes(load) - fused.peak_bytes(load)) > 0.4 * logits


@pytest.mark.parametrize("seed", range(4))
def test_the_least_recomputation_that_fits_is_found(seed):
    rng = np.random.default_rng(seed)
    profile = analytic_profile(layer_records(small_config("qwen3_vl").to_dict()), DEVICES["A100-80GB"])
    load = Load(*(float(size) for size in rng.integers([16, 40, 400, 64], [400, 400, 9000, 9000])))
    blocks = [index for index, layer in enumerate(profile.layers) if layer.kind.endswith("_block")]
    given = [None if index in blocks else "none" for index in range(len(profile.layers))]
    seconds = recompute_seconds(profile, load)

    def memory_of(recompute, memory_bytes=0.0):
        cluster = Cluster(1, 1, DEVICES["A100-80GB"], memory_bytes=memory_bytes or 2**40)
        return RankMemory(profile, "ddp", cluster, recompute, True)

    every = memory_of(tuple(level or "full" for level in given))
    most, least = (float(memory_of(level).peak_bytes(load)) for level in ("none", every.recompute))
    assert every.filled(load, seconds, given).levels == ("none",) * len(given)
    assert replace(every, cluster=memory_of("none", least - 2).cluster).filled(load, seconds, given) is None
    passing = every._passing_bytes(load)
    for share in (0.01, 0.3, 0.6, 0.9):
        budget = int(least + share * (most - least))
        found = replace(every, cluster=memory_of("none", budget).cluster).filled(load, seconds, given)
        assert found.peak_bytes(load) <= budget
        times = []
        for levels in product(("none", "full"), repeat=len(blocks)):
            tried = memory_of(tuple(dict(zip(blocks, levels, strict=True)).get(i, "none") for i in range(len(given))))
            if tried.peak_bytes(load) + passing - tried._passing_bytes(load) <= budget - 1:
                times.append(sum(seconds[index, LEVELS.index(tried.levels[index])] for index in blocks))
        own = sum(seconds[index, LEVELS.index(found.levels[index])] for index in blocks)
        assert own <= min(times) * (1 + 1e-9)
