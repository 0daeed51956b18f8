"""Which flash-attention torch's kernel for packs is: its own, or a newer one that is installed and right.

torch 2.13 hands its flash-attention, of packs and of ``scaled_dot_product_attention``, to flash-attention 3 or 4 where
they are activated, by a user or here. Source: ``torch/nn/attention/_fa3.py`` and ``_fa4.py`` of torch 2.13.
"""

from __future__ import annotations

from collections.abc import Iterable
from importlib.util import find_spec
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import attention, functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.testing import assert_close

from omnibal.errors import said
from omnibal.vlm.attention import attention_kwargs, packed_attention

OWN: Final = "flash-attention 2"
NEWER: Final = {"FA3": "flash-attention 3", "FA4": "flash-attention 4"}
MODULES: Final = (("FA3", "flash_attn_interface", (9,)), ("FA4", "flash_attn.cute.interface", (9, 10)))
"""torch's names, the modules that hold the kernels, and the major numbers of the cards that torch lets them have."""
TRIED_TOKENS: Final = (70, 186)
"""Samples of a pack that both kernels compute: within a tile of the kernels, and beyond one."""
TOLERANCE: Final = 0.03
"""Of products of unit normal numbers in bfloat16, and of their gradients."""


class Heads(NamedTuple):
    """The heads of an attention: of queries, of keys and values, and their width."""

    queries: int
    keys: int
    width: int


def use_newer(device: torch.device, heads: Iterable[Heads]) -> str:
    """Activate flash-attention 3, else 4, if it computes on this device what torch's own does; say which one runs.

    A kernel that a user has activated stays. One that fails, or gives other numbers, is not used, and named.
    """
    current: str | None = getattr(attention, "current_flash_attention_impl", lambda: None)()
    if current is not None:
        return NEWER.get(current, current)
    known: list[str] = getattr(attention, "list_flash_attention_impls", list)()
    if device.type != "cuda" or not known:
        return OWN
    major, heads, left_out = torch.cuda.get_device_capability(device)[0], [*heads], ""
    for name, module, majors in MODULES:
        if name not in known or major not in majors or not _is_installed(module):
            continue
        try:
            expected = [_computed(each, device) for each in heads]
            attention.activate_flash_attention_impl(name)
            assert_close([_computed(each, device) for each in heads], expected, rtol=TOLERANCE, atol=TOLERANCE)
        except Exception as error:  # kernels of others: whatever they raise, torch's own is there
            attention.restore_flash_attention_impl(_raise_warn=False)
            left_out += f" ({NEWER[name]} is left out: {said(error)})"
        else:
            return NEWER[name] + left_out
    return OWN + left_out


def _is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # of a package around it
        return False


def _computed(heads: Heads, device: torch.device) -> list[Tensor]:
    """Outputs and gradients of a causal pack, and of an image that sees itself whole."""
    generator = torch.Generator().manual_seed(0)
    tokens = sum(TRIED_TOKENS)

    def drawn(count: int) -> Tensor:
        numbers = torch.randn(1, count, tokens, heads.width, generator=generator)
        return numbers.to(device, torch.bfloat16).requires_grad_()

    query, key, value = drawn(heads.queries), drawn(heads.keys), drawn(heads.keys)
    bounds = torch.tensor([0, TRIED_TOKENS[0], tokens], dtype=torch.int32, device=device)
    mixed = [packed_attention(nn.Identity(), query, key, value, None, **attention_kwargs(bounds))[0].transpose(1, 2)]
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        mixed.append(functional.scaled_dot_product_attention(query, key, value, enable_gqa=heads.queries != heads.keys))
    gradients = torch.autograd.grad([each.float().square().sum() for each in mixed], (query, key, value))
    return [*(each.detach() for each in mixed), *gradients]


def heads_of(config: Any) -> list[Heads]:
    """The heads of a model's LLM and of its encoder, by its configuration."""
    found = []
    for part in (config.get_text_config(), getattr(config, "vision_config", None)):
        queries = getattr(part, "num_attention_heads", None) or getattr(part, "num_heads", None)
        outside = getattr(part, "embed_dim", None) or getattr(part, "hidden_size", None)
        if queries and outside:
            width = getattr(part, "head_dim", None) or outside // queries
            found.append(Heads(queries, getattr(part, "num_key_value_heads", None) or queries, width))
    return found
