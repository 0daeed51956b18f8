"""Which flash-attention torch is switched to: decided by names, cards and a trial, with kernels that are made up."""

import pytest
import torch
from torch.nn import attention
from transformers import InternVLConfig, Qwen2VLConfig

from omnibal.integrations.trainer import kernels
from omnibal.integrations.trainer.kernels import Heads, heads_of, use_newer

CUDA = torch.device("cuda")
HEADS = [Heads(4, 2, 16)]


@pytest.fixture
def machine(monkeypatch):
    """A card and packages, as said; kernels that give 1, or what is said."""

    def make(major, *modules, gives=None):
        active = []
        found = {"": 1.0, "FA3": 1.0, "FA4": 1.0} | (gives or {})

        def computed(heads, device):
            value = found[active[-1] if active else ""]
            if isinstance(value, Exception):
                raise value
            return [torch.tensor(value)]

        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (major, 0))
        monkeypatch.setattr(kernels, "find_spec", lambda name: name in modules or None)
        monkeypatch.setattr(kernels, "_computed", computed)
        monkeypatch.setattr(attention, "activate_flash_attention_impl", active.append)
        monkeypatch.setattr(attention, "restore_flash_attention_impl", lambda _raise_warn: active.clear())
        monkeypatch.setattr(attention, "current_flash_attention_impl", lambda: active[-1] if active else None)
        monkeypatch.setattr(attention, "list_flash_attention_impls", lambda: ["FA3", "FA4"])
        return active

    return make


@pytest.mark.parametrize(
    ("major", "modules", "expected"),
    [
        (9, ("flash_attn_interface", "flash_attn.cute.interface"), "flash-attention 3"),
        (9, ("flash_attn.cute.interface",), "flash-attention 4"),
        (10, ("flash_attn_interface", "flash_attn.cute.interface"), "flash-attention 4"),
        (10, ("flash_attn_interface",), "flash-attention 2"),
        (8, ("flash_attn_interface", "flash_attn.cute.interface"), "flash-attention 2"),
        (9, (), "flash-attention 2"),
    ],
)
def test_the_newest_kernel_of_a_card_is_used(machine, major, modules, expected):
    active = machine(major, *modules)
    assert use_newer(CUDA, HEADS) == expected
    assert active == ([f"FA{expected[-1]}"] if expected[-1] != "2" else [])


@pytest.mark.parametrize("gives", [1.1, RuntimeError("head_dim must be 128\nmore")])
def test_a_kernel_that_fails_or_differs_is_left_out(machine, gives):
    active = machine(9, "flash_attn_interface", gives={"FA3": gives})
    assert use_newer(CUDA, HEADS).startswith("flash-attention 2 (flash-attention 3 is left out: ") and active == []


def test_a_kernel_that_a_user_has_activated_stays(machine):
    machine(9, "flash_attn_interface").append("FA4")
    assert use_newer(CUDA, HEADS) == "flash-attention 4"


def test_a_cpu_keeps_what_it_has():
    assert use_newer(torch.device("cpu"), HEADS) == "flash-attention 2"


def test_heads_are_those_of_llm_and_encoder():
    config = InternVLConfig()
    text = config.text_config
    assert heads_of(config)[0] == Heads(text.num_attention_heads, text.num_key_value_heads, 128)
    assert heads_of(config)[1] == Heads(16, 16, 64)
    qwen = Qwen2VLConfig()  # whose encoder names its own width apart from the LLM's
    assert heads_of(qwen)[1] == Heads(16, 16, qwen.vision_config.embed_dim // 16)
