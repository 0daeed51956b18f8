"""The ds_config: its "omnibal" section and its rules under a pipeline."""

from omnibal.config.rules import (
    check_apart_from_layout,
    check_batch,
    check_learning_rates,
    complete_deepspeed_config,
    dtype_of,
    keys_of_plan,
    layout_of,
    micro_batches_of,
    named_plan,
    sums_in_float32,
)
from omnibal.config.section import (
    LearningRates,
    LoraSection,
    ModelSection,
    OmnibalSection,
    OptimizerSection,
    PackingSection,
    PipelineSection,
    RunFiles,
    RunSection,
    read_config,
)

__all__ = [
    "LearningRates",
    "LoraSection",
    "ModelSection",
    "OmnibalSection",
    "OptimizerSection",
    "PackingSection",
    "PipelineSection",
    "RunFiles",
    "RunSection",
    "check_apart_from_layout",
    "check_batch",
    "check_learning_rates",
    "complete_deepspeed_config",
    "dtype_of",
    "keys_of_plan",
    "layout_of",
    "micro_batches_of",
    "named_plan",
    "read_config",
    "sums_in_float32",
]
