"""Which kernels a trainer's packs run on, and what is said of them: attention, compiled blocks, the head.

torch 2.13 hands its flash-attention, of packs and of ``scaled_dot_product_attention``, to flash-attention 3 or 4 where
they are activated, by a user or here. Source: ``torch/nn/attention/_fa3.py`` and ``_fa4.py`` of torch 2.13.
"""

from collections.abc import Iterable
from importlib.util import find_spec
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import attention, functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.testing import assert_close
from transformers import Trainer, TrainerCallback, TrainingArguments

from omnibal.advise.wait import Sharding
from omnibal.errors import ConfigError, reporting, said
from omnibal.integrations.trainer.settings import model_of
from omnibal.packs.blocks import CompiledBlocks, compile_blocks
from omnibal.vlm.attention import PACKED_ATTENTION, attention_kwargs, packed_attention

HALF: Final = ("bf16", "fp16")
OWN: Final = "flash-attention 2"
NEWER: Final = {"FA3": "flash-attention 3", "FA4": "flash-attention 4"}
MODULES: Final = (("FA3", "flash_attn_interface", (9,)), ("FA4", "flash_attn.cute.interface", (9, 10)))
"""torch's names, the modules that hold the kernels, and the major numbers of the cards that torch lets them have."""
TRIED_TOKENS: Final = (70, 186)
"""Samples of a pack that both kernels compute: within a tile of the kernels, and beyond one."""
TOLERANCE: Final = 0.03
"""Of products of unit normal numbers in bfloat16, and of their gradients."""


def refuse_compiling(args: TrainingArguments, sharding: Sharding, *, padded: bool) -> None:
    """Refuse what compiled blocks would break, or be broken by."""
    refused = {
        "torch_compile": (args.torch_compile, "it compiles the whole model, compile=True its blocks"),
        "use_liger_kernel": (args.use_liger_kernel, "its kernels stand where blocks would be compiled"),
        "padded": (padded, "batches with padding would each want a graph"),
        # Tried with DeepSpeed 0.19: blocks train exactly, but no graph is made of them.
        "ZeRO 3": (sharding == "zero3", "its hooks leave nothing of a block to compile"),
    }
    for name, (is_there, why) in refused.items():
        if is_there:
            raise ConfigError(f"{name} must be left out beside compile=True; {why}")


class ChoosesKernels(TrainerCallback):  # type: ignore[misc]
    """Behind the check of packs, says what they run on, and compiles blocks for the time of a training if asked to.

    Args:
        compiles: Whether blocks are compiled.
        all_rows: Why the head works on all rows; None where it works on those with a target alone.
    """

    def __init__(self, trainer: Trainer, *, compiles: bool, all_rows: str | None) -> None:
        self._trainer, self._compiles, self._all_rows = trainer, compiles, all_rows
        self._compiled = CompiledBlocks([], [])
        self._flash, config = OWN, model_of(trainer).config
        with reporting("the choice of kernels"):
            if not _drops_weights(config):  # newer kernels refuse to, also in an encoder's attention
                self._flash = use_newer(trainer.args.device, heads_of(config))

    def on_train_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Compile, and say what is used."""
        self._compiled.undo()  # what a training left that ended by an error
        if self._compiles:
            self._compiled = compile_blocks(model_of(self._trainer))
        if self._trainer.is_world_process_zero():
            head = "target rows" if self._all_rows is None else f"all rows ({self._all_rows})"
            told = [f"attention of packs: {self._attention()}", f"the head works on {head}"]
            told += ["Liger's fused loss is not used"] * args.use_liger_kernel
            print("omnibal: " + "; ".join(told + [str(self._compiled)] * self._compiles))

    def on_train_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Leave the model as it was."""
        self._compiled.undo()

    def _attention(self) -> str:
        model, device = model_of(self._trainer), self._trainer.args.device
        found = model.config.get_text_config()._attn_implementation
        if found != PACKED_ATTENTION:
            return f"transformers' {found!r}"
        half = self._trainer.accelerator.mixed_precision in HALF or next(model.parameters()).dtype.itemsize == 2
        if device.type == "cuda" and half:
            return f"torch's {self._flash}"
        return f"a product for each sample ({device.type}, {16 if half else 32} bits: no kernel for packs)"


def _drops_weights(config: Any) -> bool:
    parts = (config, config.get_text_config(), getattr(config, "vision_config", None))
    values = [vars(part) for part in parts if part is not None]
    return any(value for part in values for name, value in part.items() if "atten" in name and "drop" in name)


class Heads(NamedTuple):
    """The heads of an attention: of queries, of keys and values, and their width."""

    queries: int
    keys: int
    width: int


def use_newer(device: torch.device, heads: Iterable[Heads]) -> str:
    """Activate flash-attention 3, else 4, if it computes on this device what torch's own does; say which one runs."""
    # A kernel that a user has activated stays. One that fails, or gives other numbers, is not used, and named.
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
