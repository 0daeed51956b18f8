import pytest
import torch
from transformers.models.qwen3_vl_moe.modeling_qwen3_vl_moe import load_balancing_loss_func

from omnibal.errors import ConfigError
from omnibal.packs.losses import loss_per_target, routed_tokens, router_loss


def test_the_router_is_weighed_as_by_transformers():
    generator = torch.Generator().manual_seed(0)
    logits = tuple(torch.randn(12, 5, generator=generator) for _ in range(3))
    mask = torch.tensor([[1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 0]])
    expected = load_balancing_loss_func(logits, 5, 2, mask)
    torch.testing.assert_close(router_loss(logits, mask.flatten().bool(), 2), expected)
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
