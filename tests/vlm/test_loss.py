import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional
from torch.testing import assert_close
from transformers.loss.loss_utils import ForCausalLMLoss

from omnibal.vlm.loss import token_losses


def case(seed, tokens, vocab=7, share=0.5):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(1, tokens, vocab, generator=generator) * 3
    labels = torch.randint(vocab, (1, tokens), generator=generator)
    labels[torch.rand(1, tokens, generator=generator) > share] = -100
    return logits, labels


@given(seed=st.integers(0, 1000), tokens=st.integers(1, 30), share=st.sampled_from([0.0, 0.3, 1.0]))
def test_each_tokens_loss_is_its_cross_entropy_under_the_row_before(seed, tokens, share):
    logits, labels = case(seed, tokens, share=share)
    losses = token_losses(logits, labels)
    assert losses.shape == (tokens,) and losses.dtype == torch.float32
    for t in range(tokens):
        if t == 0 or labels[0, t] == -100:
            assert losses[t] == 0
        else:
            assert_close(losses[t], -functional.log_softmax(logits[0, t - 1], 0)[labels[0, t]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_sum_is_transformers_loss_and_so_are_its_gradients(dtype):
    logits, labels = case(1, 20)
    gradients = []
    for total in (
        lambda x: token_losses(x, labels).sum(),
        lambda x: ForCausalLMLoss(x, labels, vocab_size=7, num_items_in_batch=1),
    ):
        leaf = logits.to(dtype).requires_grad_()
        loss = total(leaf)
        loss.backward()
        gradients.append((loss.detach(), leaf.grad))
    assert_close(gradients[0], gradients[1])


def test_a_pack_without_targets_sends_zero_gradients():
    logits = torch.randn(1, 5, 7, requires_grad=True)
    loss = token_losses(logits, torch.full((1, 5), -100)).sum()
    loss.backward()
    assert loss == 0 and torch.equal(logits.grad, torch.zeros_like(logits))
