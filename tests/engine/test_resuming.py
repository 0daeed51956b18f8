"""Which keys of a ds_config may have another value in a run that goes on."""

import pytest

from omnibal.config import settings_of
from omnibal.config.section import OmnibalSection
from omnibal.engine import settings
from omnibal.engine.settings import SettingChange, changes, is_refused


def test_what_deepspeed_adds_to_zero_is_refused_until_somebody_has_looked_at_it():
    config = pytest.importorskip("deepspeed.runtime.zero.config")
    named = {key.removeprefix("zero_optimization.") for key in settings._FREE if key.startswith("zero_optimization.")}
    assert named <= set(config.DeepSpeedZeroConfig.model_fields)
    assert is_refused(SettingChange("zero_optimization.new", None, 1))


@pytest.mark.parametrize(
    ("key", "refused"),
    [
        ("optimizer.params.weight_decay", False),
        ("gradient_clipping", False),
        ("zero_optimization.stage", False),
        ("zero_optimization.overlap_comm", False),
        ("omnibal.optimizer.weight_decay", True),
        ("omnibal.optimizer.learning_rates.vision", False),
        ("omnibal.model.lora.rank", True),
        ("omnibal.model.lora.dropout", False),
        ("omnibal.packing.seed", False),  # the position in the data is compared
    ],
)
def test_keys(key, refused):
    assert is_refused(SettingChange(key, 1, 2)) == refused


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
