"""Every key of a ds_config has a rule for a run that goes on with another value of it."""

from collections.abc import Iterator

import pytest
from pydantic import BaseModel

from omnibal.config import OmnibalSection
from omnibal.config.section import HEEDED, LoraSection, Section
from omnibal.engine.settings import RULES, SettingChange, changes, is_refused, rule_of, settings_of


def keys_of(section: type[BaseModel], place: str) -> Iterator[str]:
    for name, field in section.model_fields.items():
        kind = LoraSection if name == "lora" else field.annotation
        if isinstance(kind, type) and issubclass(kind, Section):
            yield from keys_of(kind, f"{place}.{name}")
        else:
            yield f"{place}.{name}"


def test_every_key_has_a_rule_and_every_rule_a_key():
    of_section = set(keys_of(OmnibalSection, "omnibal"))
    assert {"omnibal.run.keep", "omnibal.model.lora.rank", "omnibal.optimizer.learning_rates.vision"} <= of_section
    assert of_section - RULES.keys() == set()
    assert HEEDED - RULES.keys() == set()
    assert {key for key in RULES if key.startswith("omnibal.")} - of_section == set()
    assert {key.partition(".")[0] for key in RULES} - HEEDED == {"omnibal"}


def test_every_key_of_zeros_has_a_rule():
    """What DeepSpeed adds is refused until somebody has looked at what it does."""
    config = pytest.importorskip("deepspeed.runtime.zero.config")
    named = {key.removeprefix("zero_optimization.") for key in RULES if key.startswith("zero_optimization.")}
    assert named <= set(config.DeepSpeedZeroConfig.model_fields)
    assert {rule_of(f"zero_optimization.{name}") for name in ("round_robin_gradients", "new")} == {"refused"}


@pytest.mark.parametrize(
    ("key", "rule"),
    [
        ("optimizer.params.weight_decay", "taken"),
        ("optimizer.params.amsgrad", "by effect"),
        ("optimizer.type", "by effect"),
        ("scheduler.params.warmup_num_steps", "taken"),
        ("gradient_clipping", "taken"),
        ("bf16.enabled", "by effect"),
        ("zero_optimization.stage", "taken"),
        ("zero_optimization.overlap_comm", "taken"),
        ("omnibal.optimizer.weight_decay", "refused"),
        ("omnibal.packing.seed", "by effect"),
        ("flops_profiler.enabled", "taken"),
    ],
)
def test_rules(key, rule):
    assert rule_of(key) == rule


def test_changes_are_those_of_single_keys():
    config = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "betas": [0.9, 0.95]}}, "comet": {"api_key": "x"}}
    saved = settings_of(config, OmnibalSection())
    assert "comet.api_key" not in saved
    later = {"optimizer": {"type": "AdamW", "params": {"lr": 5e-4, "betas": [0.9, 0.95], "weight_decay": 0.1}}}
    now = settings_of(later, OmnibalSection.model_validate({"run": {"max_steps": 9}}))
    assert [str(change) for change in changes(saved, now)] == [
        "optimizer.params.lr 0.0005 (was 0.001)",
        "omnibal.run.max_steps 9 (was left out)",
        "optimizer.params.weight_decay 0.1 (was left out)",
    ]


def test_what_was_off_may_be_left_out():
    assert is_refused(SettingChange("zero_optimization.round_robin_gradients", None, True))
    assert not is_refused(SettingChange("zero_optimization.round_robin_gradients", None, False))
