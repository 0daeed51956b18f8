import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional
from torch.testing import assert_close
from transformers.loss.loss_utils import ForCausalLMLoss

from omnibal import loss as loss_module
from omnibal.loss import evaluation_statistics, summed_loss, targets_of

WIDTH, VOCAB = 6, 11


class Doubling(nn.Linear):
    """Any module can be a head, if it takes each row by itself."""

    def forward(self, rows):
        return super().forward(rows) + super().forward(2 * rows).tanh()


def case(seed, tokens, share, *, head=nn.Linear, dtype=torch.float32, frozen=False):
    torch.manual_seed(seed)
    module = head(WIDTH, VOCAB, bias=seed % 2 == 0).to(dtype).requires_grad_(not frozen)
    labels = torch.randint(VOCAB, (1, tokens))
    labels[torch.rand(1, tokens) > share] = -100
    return module, torch.randn(1, tokens, WIDTH, dtype=dtype, requires_grad=True), labels


def ours(head, hidden, labels):
    targets = targets_of(labels)
    rows = hidden[0].index_select(0, targets["target_rows"])
    return summed_loss(head, list(head.parameters()), rows, targets["targets"])


def theirs(head, hidden, labels):
    return ForCausalLMLoss(head(hidden), labels, vocab_size=VOCAB, num_items_in_batch=1)


def loss_and_gradients(total, head, hidden, labels, scale=1.0):
    leaves = [tensor for tensor in (hidden, *head.parameters()) if tensor.requires_grad]
    loss = total(head, hidden, labels)
    return [loss.detach(), *torch.autograd.grad(loss * scale, leaves)]


@given(
    seed=st.integers(0, 1000), tokens=st.integers(1, 30), share=st.sampled_from([0.0, 0.3, 1.0]),
    chunk=st.integers(1, 31), head=st.sampled_from([nn.Linear, Doubling]), frozen=st.booleans(),
)  # fmt: skip
def test_the_sum_is_transformers_loss_and_so_are_its_gradients(seed, tokens, share, chunk, head, frozen):
    given = case(seed, tokens, share, head=head, frozen=frozen)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loss_module, "LOSS_ROWS", chunk)
        found = loss_and_gradients(ours, *given, scale=0.3)
    assert_close(found, loss_and_gradients(theirs, *given, scale=0.3), rtol=1e-5, atol=1e-5)


def test_in_16_bits_it_is_as_exact_as_transformers():
    module, hidden, labels = case(0, 300, 0.7, dtype=torch.bfloat16)
    exact = loss_and_gradients(theirs, module.float(), hidden.detach().float().requires_grad_(), labels)
    module.bfloat16()
    for chunk in (1024, 100):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(loss_module, "LOSS_ROWS", chunk)
            found = loss_and_gradients(ours, module, hidden, labels)
        for one, other, truth in zip(found, loss_and_gradients(theirs, module, hidden, labels), exact, strict=True):
            assert (one - truth).norm() <= 1.5 * (other - truth).norm() + 1e-3 * truth.norm()


def test_weights_count_rows_and_a_second_backward_pass_is_refused():
    module, hidden, labels = case(1, 20, 0.5)
    targets = targets_of(labels)
    rows, wanted, weights = hidden[0][targets["target_rows"]], targets["targets"], torch.rand(len(targets["targets"]))
    loss = summed_loss(module, list(module.parameters()), rows, wanted, weights)
    expected = (functional.cross_entropy(module(rows), wanted, reduction="none") * weights).sum()
    assert_close(loss, expected)
    with torch.no_grad():
        assert_close(summed_loss(module, list(module.parameters()), rows, wanted, weights), expected.detach())
    leaves = [hidden, *module.parameters()]
    found = torch.autograd.grad(loss, leaves, retain_graph=True)
    assert_close(found, torch.autograd.grad(expected, leaves, retain_graph=True))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(loss, leaves)


def test_where_nothing_is_trained_there_is_a_loss_all_the_same():
    module, hidden, labels = case(0, 20, 0.5, frozen=True)
    assert_close(ours(module, hidden.detach(), labels), theirs(module, hidden.detach(), labels))


class Counting(nn.Linear):
    most_rows = 0

    def forward(self, rows):
        self.most_rows = max(self.most_rows, len(rows))
        return super().forward(rows)


@pytest.mark.parametrize("wanted", [True, False])
def test_no_more_logits_than_a_chunk_are_made_at_a_time(wanted, monkeypatch):
    monkeypatch.setattr(loss_module, "LOSS_ROWS", 8)
    module, hidden, labels = case(2, 100, 1.0, head=Counting)
    with torch.set_grad_enabled(wanted):
        found = ours(module, hidden, labels)
    assert module.most_rows == 8
    assert_close(found, theirs(module, hidden, labels), check_stride=False)


def test_a_sample_is_exact_if_all_its_targets_are_the_likeliest(monkeypatch):
    monkeypatch.setattr(loss_module, "LOSS_ROWS", 3)
    labels = torch.tensor([[-100, 1, 2, -100, 3, 4, -100, -100, 5]])
    bounds = torch.tensor([0, 3, 6, 8, 9], dtype=torch.int32)  # the third has no target; the last starts with one
    logits = functional.one_hot(torch.tensor([1, 2, 0, 3, 9, 0, 0, 5, 0]), VOCAB).float()
    targets = targets_of(labels)
    found = evaluation_statistics(lambda rows: rows, logits[targets["target_rows"]], targets | {"cu_seq_lens": bounds})
    loss = functional.cross_entropy(logits[:-1], labels[0, 1:], reduction="sum").double()
    assert_close(found, torch.stack([loss, *torch.tensor([5.0, 2.0, 3.0]).double()]), rtol=1e-6, atol=0)
