from copy import deepcopy

import pytest
import torch
from torch import nn
from torch.testing import assert_close
from transformers import AutoModelForCausalLM, Gemma2Config, LlamaConfig
from transformers.models.qwen3_vl_moe.modeling_qwen3_vl_moe import load_balancing_loss_func

from omnibal.errors import ConfigError
from omnibal.packs.losses import loss_per_target, routed_tokens, router_loss, target_rows
from tests.families.models import small_config
from tests.vlm.families import family_samples, plain_family_model, plain_inputs, shaken, tied_config

SMALL = {
    "hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 2, "head_dim": 12, "vocab_size": 50,
}  # fmt: skip


def text_model(config):
    torch.manual_seed(0)
    return shaken(AutoModelForCausalLM.from_config(config))


def padded_batch():
    labels = torch.randint(50, (3, 9), generator=torch.Generator().manual_seed(0))
    labels[0, :4] = labels[1, 6:] = labels[2, :8] = -100
    return {"input_ids": labels.clamp(min=0), "labels": labels}


def both(model, **inputs):
    """Loss and gradients of a model as it is, and on target rows."""
    found = []
    for one in (model, deepcopy(model)):
        if one is not model:
            target_rows(one)
        one.train().zero_grad()
        output = one(**inputs)
        (3 * output.loss).backward()
        assert (output.logits is None) == (one is not model)
        found.append((output.loss.detach(), [parameter.grad for parameter in one.parameters()]))
    return found


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("count", [None, 7, torch.tensor(13)])
def test_loss_and_gradients_are_the_models_own(tied, count):
    options = {} if count is None else {"num_items_in_batch": count}
    model = text_model(LlamaConfig(**SMALL, tie_word_embeddings=tied))
    plain, ours = both(model, **padded_batch(), **options)
    assert_close(ours, plain, rtol=1e-4, atol=1e-6)


def test_a_copy_of_the_model_trains_as_it_does():
    model = text_model(LlamaConfig(**SMALL))
    target_rows(model)
    found = []
    for one in (model, deepcopy(model)):
        one.train()(**padded_batch()).loss.backward()
        found.append([parameter.grad for parameter in one.parameters()])
    assert_close(found[1], found[0])


@pytest.mark.parametrize("family", ["internvl", "llava", "qwen2_5_vl"])
def test_so_they_are_of_image_text_models(family):
    model = plain_family_model((tied_config if family == "llava" else small_config)(family))
    sample = family_samples(family)[0]
    plain, ours = both(model, **plain_inputs(sample), labels=sample["labels"][None])
    assert_close(ours, plain, rtol=1e-4, atol=1e-5)


def test_without_labels_or_training_it_does_as_ever():
    model, batch = text_model(LlamaConfig(**SMALL)), padded_batch()
    expected = model.eval()(**batch)
    target_rows(model)
    assert_close(model(**batch).logits, expected.logits)
    assert_close(model(**batch).loss, expected.loss)
    assert_close(model.train()(input_ids=batch["input_ids"]).logits, expected.logits)
    with torch.no_grad():
        assert_close(model(**batch).logits, expected.logits)


def test_a_trainer_of_adapters_goes_the_same_way(tmp_path):
    from peft import LoraConfig, get_peft_model
    from transformers import Trainer, TrainingArguments

    batch, losses = padded_batch(), []
    items = [{name: value[row] for name, value in batch.items()} for row in range(3)]
    options = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 3, "num_train_epochs": 3}
    for patched in (False, True):
        torch.manual_seed(1)
        adapters = LoraConfig(target_modules=["q_proj", "lm_head"], lora_dropout=0.0, init_lora_weights=False)
        model = get_peft_model(text_model(LlamaConfig(**SMALL)), adapters)
        if patched:
            target_rows(model)
        arguments = TrainingArguments(tmp_path, report_to=[], save_strategy="no", logging_steps=1, **options)
        trainer = Trainer(model, arguments, train_dataset=items)
        trainer.train()
        losses.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
    assert len(losses[0]) == 3 and losses[0][0] != losses[0][2]
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)


class Scaling(nn.Module):
    """A head behind which something else is done."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, hidden):
        return self.inner(hidden) * 2


def test_heads_and_losses_that_do_something_else_are_refused():
    with pytest.raises(ConfigError, match=r"final_logit_softcapping must be None or 1, got 30\.0; Gemma2For"):
        target_rows(text_model(Gemma2Config(**SMALL)))
    with pytest.raises(ConfigError, match="one of transformers' for target_rows, got Linear"):
        target_rows(nn.Linear(2, 2))
    with pytest.raises(ConfigError, match="what lm_head gives to loss_function, got LlamaModel"):
        target_rows(text_model(LlamaConfig(**SMALL)).model)
    model, batch = text_model(LlamaConfig(**SMALL)), padded_batch()
    target_rows(model)
    with pytest.raises(ConfigError, match="got one that is replaced; call target_rows once"):
        target_rows(model)
    with pytest.raises(ConfigError, match=r"labels must be of all rows, \(3, 2\), got \(3, 9\); leave logits_to_keep"):
        model.train()(**batch, logits_to_keep=2)
    with pytest.raises(ConfigError, match="ignore_index must be -100 under target_rows, got 0"):
        model(**batch, ignore_index=0)
    with pytest.raises(ConfigError, match="and return a dict, under target_rows, got tuple of LlamaForCausalLM"):
        model(**batch, return_dict=False)
    model.lm_head = Scaling(model.lm_head)
    with pytest.raises(ConfigError, match="must reach the loss unchanged under target_rows, got changed ones"):
        model(**batch)


def test_the_router_is_weighed_as_by_transformers():
    generator = torch.Generator().manual_seed(0)
    logits = tuple(torch.randn(12, 5, generator=generator) for _ in range(3))
    mask = torch.tensor([[1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 0]])
    expected = load_balancing_loss_func(logits, 5, 2, mask)
    assert_close(router_loss(logits, mask.flatten().bool(), 2), expected)
    even = (torch.eye(4) * 50,)
    assert router_loss(even, torch.ones(4, dtype=torch.bool), 1).item() == pytest.approx(1)


def test_neither_padding_nor_a_filler_counts_for_the_router():
    labels = torch.tensor([[-100, 1, 2], [-100, 1, -100], [-100, -100, -100]])
    mask = torch.tensor([[1, 1, 1], [1, 1, 0], [1, 1, 1]])
    assert routed_tokens({"labels": labels, "attention_mask": mask}).int().tolist() == [[1, 1, 1], [1, 1, 0], [0, 0, 0]]


def test_a_step_without_targets_has_no_loss():
    outputs = {"logits": torch.zeros(1, 3, 4, requires_grad=True)}
    loss = loss_per_target(outputs, torch.full((1, 3), -100), num_items_in_batch=torch.tensor(0))
    loss.backward()
    assert (loss.item(), outputs["logits"].grad.any().item()) == (0, False)


def test_a_router_is_not_forgotten_without_a_word():
    outputs = {"logits": torch.zeros(1, 3, 4), "aux_loss": torch.tensor(2.0)}
    with pytest.raises(ConfigError, match="output_router_logits must be False where the loss is that of the tokens al"):
        loss_per_target(outputs, torch.zeros(1, 3, dtype=torch.long))
