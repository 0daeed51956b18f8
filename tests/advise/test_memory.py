"""What the loss of transformers' Trainer holds."""

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM, Trainer, TrainingArguments

from omnibal.advise.memory import LOGIT_BYTES
from omnibal.vlm.storages import StorageMeter

TOKENS, VOCABULARIES = 256, (4000, 8000)


def peak_bytes(vocab_size, folder):
    """Of a step in 16 bits, of a sample with few targets; what parameters are in only once is left out."""
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = Qwen2Config(**sizes, num_hidden_layers=1, vocab_size=vocab_size, tie_word_embeddings=True)
    ids = torch.arange(TOKENS)
    labels = torch.where(ids < TOKENS - 8, -100, ids)
    arguments = TrainingArguments(folder, per_device_train_batch_size=1, use_cpu=True, report_to=[])
    model = Qwen2ForCausalLM(config).to(torch.bfloat16)
    trainer = Trainer(model, arguments, train_dataset=[{"input_ids": ids, "labels": labels}])
    trainer.create_optimizer_and_scheduler(1)
    batch = next(iter(trainer.get_train_dataloader()))
    trainer.training_step(model, dict(batch), torch.tensor(8))  # makes the gradients that the next one adds to
    with StorageMeter() as meter:
        trainer.training_step(model, dict(batch), torch.tensor(8))
    return meter.peak_bytes


def test_transformers_loss_holds_the_logits_of_all_tokens_in_float32(tmp_path):
    small, large = (peak_bytes(size, tmp_path) for size in VOCABULARIES)
    more = TOKENS * (VOCABULARIES[1] - VOCABULARIES[0])
    assert (large - small) / more == pytest.approx(LOGIT_BYTES, rel=0.02)
