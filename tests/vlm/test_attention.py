"""Attention over packs against a dense block-diagonal mask, in layers and in whole transformers models."""

from inspect import signature
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional
from torch.nn.attention.varlen import varlen_attn
from torch.testing import assert_close
from transformers import Qwen2Config, Qwen2ForCausalLM

from omnibal.errors import ConfigError, DataError
from omnibal.vlm import attention
from omnibal.vlm.attention import PACKED_ATTENTION, attention_kwargs, packed_attention, sample_lengths

CAUSAL = SimpleNamespace(is_causal=True, num_key_value_groups=1)


def bounds_of(lengths, device="cpu"):
    return torch.tensor([0, *lengths], device=device).cumsum(0).to(torch.int32)


def dense_attention(query, key, value, lengths, *, window=None, scaling=None, causal=True):
    """The oracle: every token against every other, then a mask of the pack's size squared."""
    groups = query.shape[1] // key.shape[1]
    key, value = (tensor.repeat_interleave(groups, dim=1) for tensor in (key, value))
    sample = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).to(query.device)
    position = torch.arange(sum(lengths), device=query.device)
    behind = position[:, None] - position
    seen = (sample[:, None] == sample) & (behind < (window or sum(lengths))) & ((behind >= 0) | (not causal))
    scores = query @ key.transpose(2, 3) * (scaling or query.shape[-1] ** -0.5)
    weights = scores.masked_fill(~seen, -torch.inf).softmax(-1, dtype=torch.float32).to(value.dtype)
    return (weights @ value).transpose(1, 2)


def random_heads(seed, lengths, heads, kv_heads, head_dim=8, dtype=torch.float32, device="cpu"):
    generator = torch.Generator().manual_seed(seed)
    shapes = ((heads, sum(lengths)), (kv_heads, sum(lengths)), (kv_heads, sum(lengths)))
    drawn = (torch.randn(1, *shape, head_dim, generator=generator) for shape in shapes)
    return [tensor.to(device=device, dtype=dtype).requires_grad_() for tensor in drawn]


def check_against_dense(inputs, lengths, window, *, causal=True, **tolerance):
    results = []
    kwargs = attention_kwargs(bounds_of(lengths, inputs[0].device))
    for attend in (
        lambda *qkv: packed_attention(CAUSAL, *qkv, None, is_causal=causal, sliding_window=window, **kwargs)[0],
        lambda *qkv: dense_attention(*qkv, lengths, window=window, causal=causal),
    ):
        leaves = [tensor.detach().clone().requires_grad_() for tensor in inputs]
        mixed = attend(*leaves)
        (mixed.float() * torch.linspace(-1, 1, mixed.numel(), device=mixed.device).view_as(mixed)).sum().backward()
        results.append((mixed.detach(), *(leaf.grad for leaf in leaves)))
    assert results[0][0].is_contiguous()
    for ours, dense in zip(*results, strict=True):
        assert_close(ours, dense, **tolerance)


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 99),
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=6),
    heads=st.sampled_from([(4, 4), (4, 2), (3, 1)]),
    window=st.sampled_from([None, 1, 3, "both ways"]),
)
def test_packed_attention_is_dense_attention_under_a_block_diagonal_mask(seed, lengths, heads, window):
    causal = window != "both ways"
    window = window if causal else None
    check_against_dense(random_heads(seed, lengths, *heads), lengths, window, causal=causal, rtol=1e-5, atol=2e-6)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("heads", [(4, 4), (4, 2)])
@pytest.mark.parametrize("head_dim", [12, 64])
def test_packed_attention_on_a_gpu(dtype, window, heads, head_dim):
    lengths = [1, 200, 1, 37]
    inputs = random_heads(0, lengths, *heads, head_dim=head_dim, dtype=dtype, device="cuda")
    tolerance = 1e-4 if dtype == torch.float32 else 3e-2
    check_against_dense(inputs, lengths, window, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("asks_about_groups", [True, False], ids=["as in torch 2.12", "as in torch 2.11"])
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("heads", [(4, 4), (4, 2)])
def test_the_kernel_for_gpus_is_called_as_it_documents(monkeypatch, heads, window, asks_about_groups):
    def documented(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale, window_size, enable_gqa):
        """varlen_attn by its documentation: (tokens, heads, head_dim); window_size counts tokens before and after."""
        assert enable_gqa == (query.shape[1] != key.shape[1])
        return ungrouped(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, scale=scale, window_size=window_size)

    def ungrouped(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale, window_size):
        real = [tensor.detach().to("meta", torch.bfloat16) for tensor in (query, key, value)]
        bounds = cu_seq_q.to("meta")
        options = {"scale": scale, "window_size": window_size}
        if "enable_gqa" in signature(varlen_attn).parameters:
            options["enable_gqa"] = query.shape[1] != key.shape[1]
        assert varlen_attn(*real, bounds, bounds, max_q, max_k, **options).shape == query.shape
        lengths = cu_seq_q.diff().tolist()
        assert torch.equal(cu_seq_q, cu_seq_k) and max_q == max_k == max(lengths)
        assert window_size[1] in (0, -1)
        before = None if window_size[0] == -1 else window_size[0] + 1
        batched = (tensor.transpose(0, 1)[None] for tensor in (query, key, value))
        return dense_attention(*batched, lengths, window=before, scaling=scale, causal=window_size[1] == 0)[0]

    monkeypatch.setattr(attention, "varlen_attn", documented if asks_about_groups else ungrouped)
    monkeypatch.setattr(attention, "_ASKS_ABOUT_GROUPS", asks_about_groups)
    monkeypatch.setattr(attention, "_kernel_serves", lambda query, dropout: True)
    lengths = [4, 1, 7]
    for causal in (True, False) if window is None else (True,):
        check_against_dense(random_heads(0, lengths, *heads), lengths, window, causal=causal, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kernel_serves", [True, False])
def test_packs_never_go_to_cudnn_which_keeps_a_graph_for_every_shape(monkeypatch, kernel_serves):
    chosen = []

    def spy(query, *_, **__):
        flags = torch.backends.cuda
        chosen.append((flags.cudnn_sdp_enabled(), flags.flash_sdp_enabled(), flags.math_sdp_enabled()))
        return query.clone()

    monkeypatch.setattr(attention, "varlen_attn", spy)
    monkeypatch.setattr(functional, "scaled_dot_product_attention", spy)
    monkeypatch.setattr(attention, "_kernel_serves", lambda query, dropout: kernel_serves)
    lengths = [4, 1, 7]
    packed_attention(CAUSAL, *random_heads(0, lengths, 4, 2), None, **attention_kwargs(bounds_of(lengths)))
    assert chosen == [(False, True, True)] * (1 if kernel_serves else 3)
    assert torch.backends.cuda.cudnn_sdp_enabled()


def test_bounds_become_the_names_that_transformers_uses():
    bounds = bounds_of([2, 5, 1])
    assert sample_lengths(bounds) == (2, 5, 1)
    kwargs = attention_kwargs(bounds)
    assert kwargs["cu_seq_lens_q"] is bounds and kwargs["cu_seq_lens_k"] is bounds
    assert (kwargs["max_length_q"], kwargs["max_length_k"]) == (5, 5)


def test_no_tiles_give_no_output_and_zero_gradients():
    inputs = [torch.empty(0, 2, 17, 8, requires_grad=True) for _ in range(3)]
    mixed, weights = packed_attention(CAUSAL, *inputs, None, is_causal=False)
    assert mixed.shape == (0, 17, 2, 8) and weights is None
    mixed.sum().backward()
    assert all(tensor.grad is not None for tensor in inputs)


def test_without_bounds_and_causality_it_is_plain_attention():
    query, key, value = (torch.randn(3, 2, 5, 8) for _ in range(3))
    mixed, _ = packed_attention(CAUSAL, query, key, value, None, is_causal=False)
    assert torch.equal(mixed, functional.scaled_dot_product_attention(query, key, value).transpose(1, 2))


def test_wrong_calls_are_refused():
    query, key, value = random_heads(0, [3, 2], 2, 2)
    bounds = bounds_of([3, 2])
    with pytest.raises(
        DataError, match="cu_seq_lens must end with the number of tokens of one sequence, got 4 for 1 x 5"
    ):
        packed_attention(CAUSAL, query, key, value, None, cu_seq_lens_q=bounds_of([3, 1]))
    with pytest.raises(ConfigError, match="attention_mask must be None"):
        packed_attention(CAUSAL, query, key, value, torch.ones(1, 1, 5, 5), cu_seq_lens_q=bounds)
    with pytest.raises(ConfigError, match="sliding_window must be None where attention is not causal, got 4"):
        packed_attention(CAUSAL, query, key, value, None, is_causal=False, sliding_window=4, cu_seq_lens_q=bounds)
    with pytest.raises(ConfigError, match="got softcap"):
        packed_attention(CAUSAL, query, key, value, None, cu_seq_lens_q=bounds, softcap=30.0)


@pytest.fixture(params=["full", "sliding"])
def models(request):
    """One transformers model twice: with packed attention, and with transformers' own."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 50}
    window = {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1}
    config = Qwen2Config(
        **sizes, num_attention_heads=4, num_key_value_heads=2, **(window if request.param == "sliding" else {})
    )
    torch.manual_seed(0)
    plain = Qwen2ForCausalLM._from_config(config, attn_implementation="sdpa").eval()
    packed = Qwen2ForCausalLM._from_config(config, attn_implementation=PACKED_ATTENTION).eval()
    packed.load_state_dict(plain.state_dict())
    return packed, plain


@pytest.mark.parametrize("given_bounds", [True, False], ids=["bounds given", "bounds from positions"])
def test_a_whole_model_reads_packs(models, given_bounds):
    packed, plain = models
    samples = [torch.arange(3, 10), torch.tensor([7]), torch.arange(20, 32)]
    positions = torch.cat([torch.arange(len(sample)) for sample in samples])[None]
    kwargs = attention_kwargs(bounds_of([len(sample) for sample in samples])) if given_bounds else {}
    logits = packed(input_ids=torch.cat(samples)[None], position_ids=positions, **kwargs).logits
    expected = torch.cat([plain(input_ids=sample[None]).logits for sample in samples], dim=1)
    assert_close(logits, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_under_autocast_the_kernel_gets_16_bits(monkeypatch, models, dtype):
    packed, plain = models
    seen, serves = set(), attention._kernel_serves
    monkeypatch.setattr(attention, "_kernel_serves", lambda query, drop: seen.add(query.dtype) or serves(query, drop))
    ids, kwargs = torch.arange(3, 21)[None], attention_kwargs(bounds_of([7, 11]))
    with torch.autocast("cpu", dtype=dtype):  # of float32 weights, as Trainer has them with bf16=True
        ours = packed(input_ids=ids, position_ids=torch.cat([torch.arange(7), torch.arange(11)])[None], **kwargs).logits
        expected = torch.cat([plain(input_ids=sample).logits for sample in (ids[:, :7], ids[:, 7:])], dim=1)
        exact = packed_attention(CAUSAL, *random_heads(0, [7, 11], 2, 2, dtype=torch.float64), None, **kwargs)[0]
    assert seen == {dtype, torch.float64} and exact.dtype == torch.float64
    assert_close(ours, expected, rtol=1e-5, atol=1e-6)


def test_a_whole_model_still_reads_padded_batches_and_generates(models):
    packed, plain = models
    ids = torch.randint(3, 50, (2, 9), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    ours, theirs = (model(input_ids=ids, attention_mask=mask).logits for model in models)
    assert_close(ours[mask.bool()], theirs[mask.bool()], rtol=1e-5, atol=1e-6)
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    for prompt in ({"input_ids": ids[:1]}, {"input_ids": ids, "attention_mask": mask}):
        assert torch.equal(packed.generate(**prompt, **options), plain.generate(**prompt, **options))
