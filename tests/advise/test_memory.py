"""What the loss of transformers' Trainer holds."""

import numpy as np
import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM, Trainer, TrainingArguments

from omnibal.advise.memory import LOGIT_BYTES
from omnibal.device import DEVICES
from omnibal.families.text import text_records
from omnibal.integrations.target_rows import target_rows
from omnibal.memory.footprint import loss_bytes
from omnibal.profile.counted import analytic_profile
from omnibal.vlm.storages import StorageMeter

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
