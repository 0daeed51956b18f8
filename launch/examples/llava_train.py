"""Lines for llava/train/train.py of LLaVA 1.5.

    trainer = LLaVATrainer(model=model, tokenizer=tokenizer, args=training_args, **data_module)
    use_balance(trainer, PackLimits(vision_units=16, llm_tokens=12000))  # new

Its model puts images into the text itself and makes the mask and the positions of each row anew, so samples cannot
share one: micro-batches are balanced, and padded by its own collator. Limits count the padding.
"""

from collections.abc import Mapping
from typing import Any

from omnibal import PackLimits
from omnibal.integrations.loops import item_loads, replace_loader

IMAGE_TOKEN, PATCHES = -200, 576
"""A mark in a text that becomes so many tokens: CLIP's at 336 pixels."""


def loads(item: Mapping[str, Any]) -> tuple[int, int, int]:
    """Images (a blank one for a sample without), LLM tokens, target tokens."""
    _, tokens, targets = item_loads(item)
    marks = int((item["input_ids"] == IMAGE_TOKEN).sum())
    return 1, tokens + marks * (PATCHES - 1), targets


def use_balance(trainer: Any, limits: PackLimits) -> None:
    """Call it before ``trainer.train()``."""
    replace_loader(trainer, limits, measure=loads, padded=True)
