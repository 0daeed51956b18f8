"""Drop-ins on a CUDA device, against the same on a CPU."""

from functools import wraps

import pytest
import torch

pytest.importorskip("accelerate")

from transformers.utils.import_utils import is_causal_conv1d_available, is_flash_linear_attention_available

from omnibal.integrations.transformers import balance
from omnibal.packs.collator import FAMILIES, PackCollator, arguments_of, positions_of
from omnibal.packs.losses import loss_per_target
from omnibal.packs.proof import as_pack, check_packed, check_packing, made_samples, two_texts
from omnibal.vlm import attention
from tests.engine.launch import launch
from tests.integrations.items import Collate, collated_backward, config_of, items_of
from tests.integrations.trainers import LIMITS, Case, accelerate_afresh, trainer_of, weights_of
from tests.packs.test_collator import drawn_of
from tests.packs.test_leaks import model_of
from tests.vlm.families import plain_family_model

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

CASES = [
    Case("internvl"),
    Case("internvl", options={"bf16": True}),
    Case("qwen3_vl", kinds=("video", "image", "", "image+video", "video+video", "") * 2),
    Case("qwen2_5_vl", "zero2"),
    Case("internvl", "zero3", options={"gradient_checkpointing": True}),
    Case("qwen2_5_omni_thinker"),
]
KERNELS = is_flash_linear_attention_available() and is_causal_conv1d_available()


def distance(found, expected):
    """How far all tensors are off together, in parts of their length."""
    pairs = [(found[name].cpu().float(), expected[name].cpu().float()) for name in expected]
    return float(sum((a - b).square().sum() for a, b in pairs) / sum(b.square().sum() for _, b in pairs)) ** 0.5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_pack_on_a_device_has_the_gradients_of_its_samples_alone_on_a_cpu(family, dtype):
    if family == "qwen3_5" and is_flash_linear_attention_available():
        pytest.skip("its kernels take no tensors of a CPU")
    plain = plain_family_model(config_of(family))
    loss_alone = collated_backward(plain, items_of(family)[:5], family)
    expected = {name: p.grad.clone() for name, p in plain.named_parameters() if p.grad is not None}
    plain.to("cuda", dtype)
    collator = PackCollator(Collate(family), positions_of(plain.config), arguments=arguments_of(plain))
    check_packed(plain, collator, items_of(family)[:4], rounded=dtype == torch.bfloat16)
    loss, gradients = packed_backward(plain, [collator(drawn_of(family, range(5)))])
    assert float(loss) == pytest.approx(float(loss_alone), rel=5e-3 if dtype == torch.float32 else 0.1)
    tolerance = 5e-3
    if dtype == torch.bfloat16:  # rounding alone takes gradients so far that packs may be as far, not more
        _, alone = packed_backward(plain, [collator(drawn_of(family, [sample])) for sample in range(5)])
        tolerance = 0.02 + 1.5 * distance(alone, expected)
    assert distance(gradients, expected) < tolerance


def packed_backward(plain, packs):
    """The mean loss over the targets of all packs, on the device, and its gradients."""
    plain.zero_grad()
    total, loss = sum((pack["labels"][:, 1:] != -100).sum() for pack in packs).cuda(), 0
    for pack in packs:
        given = {name: value.cuda() if isinstance(value, torch.Tensor) else value for name, value in pack.items()}
        labels = given.pop("labels")
        if "pixel_values" in given:
            given["pixel_values"] = given["pixel_values"].to(next(plain.parameters()).dtype)
        of_pack = loss_per_target(plain(**given), labels, num_items_in_batch=total)
        of_pack.backward()
        loss += of_pack.detach()
    return loss, {name: p.grad.clone() for name, p in plain.named_parameters() if p.grad is not None}


def trained(case, folder):
    """By how much three steps moved the weights."""
    with accelerate_afresh():
        trainer = trainer_of(case, folder, max_steps=3)
        before = weights_of(trainer.model)
        balance(trainer, LIMITS[case.family])
        trainer.train()
        return {name: weight.cpu() - before[name].cpu() for name, weight in weights_of(trainer.model).items()}


@pytest.mark.distributed
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_trainer_on_a_device_takes_the_steps_of_one_on_a_cpu(case, tmp_path):
    (found,) = launch(1, f"{__name__}:trained", case, tmp_path / "cuda", accelerator="cuda", ends=True)
    plain = Case(case.family, kinds=case.kinds)
    (expected,) = launch(1, f"{__name__}:trained", plain, tmp_path / "cpu", accelerator="cpu")
    assert distance(found, expected) < (0.1 if case.options.get("bf16") else 1e-2)


@pytest.mark.skipif(not KERNELS, reason="needs flash-linear-attention and causal-conv1d")
def test_kernels_of_delta_nets_keep_samples_apart():
    model = model_of("qwen3_5").to("cuda", torch.bfloat16)
    check_packed(model, *two_texts(model.config))
    (layers,) = {module.forward.func.__self__ for module in model.modules() if hasattr(module.forward, "func")}
    assert layers.by_kernels
    found = check_packing(model)
    assert found.is_exact, found


def test_a_model_in_16_bits_on_a_device_is_proved_or_its_leak_is_named():
    assert check_packing(model_of("internvl").to("cuda", torch.bfloat16)).is_exact
    assert not check_packing(model_of("qwen3_5").to("cuda", torch.bfloat16)).is_exact


def test_the_kernel_for_packs_runs_where_packs_are_in_16_bits(monkeypatch):
    model = model_of("internvl", text={"head_dim": 16}).to("cuda", torch.bfloat16)
    calls, kernel = [], attention.varlen_attn
    model.set_attn_implementation({"text_config": attention.PACKED_ATTENTION})
    noted = wraps(kernel)(lambda *given, **options: calls.append(1) or kernel(*given, **options))
    monkeypatch.setattr(attention, "varlen_attn", noted)
    pack = as_pack(model, made_samples(model))
    model(**{name: value.cuda() if isinstance(value, torch.Tensor) else value for name, value in pack.items()})
    assert len(calls) == model.config.text_config.num_hidden_layers
