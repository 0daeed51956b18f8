"""Lines for qwenvl/train/train_qwen.py of QwenLM's qwen-vl-finetune, run with --data_flatten True.

    trainer = Trainer(model=model, processing_class=tokenizer, args=training_args, **data_module)
    use_packs(trainer, PackLimits(vision_units=16384, llm_tokens=8192))  # new

Its collator flattens as many samples as it gets, so only the loader changes, and the loss: Qwen's models would train a
mean of means.
"""

from collections.abc import Mapping
from typing import Any

from omnibal import PackLimits
from omnibal.integrations.loops import item_loads, replace_loader
from omnibal.packs.losses import loss_per_target


def loads(item: Mapping[str, Any]) -> tuple[int, int, int]:
    """Patches of images and videos, LLM tokens, target tokens."""
    patches, tokens, targets = item_loads(item)
    videos = item.get("pixel_values_videos")
    return patches + (0 if videos is None else len(videos)), tokens, targets


def use_packs(trainer: Any, limits: PackLimits) -> None:
    """Call it before ``trainer.train()``."""
    replace_loader(trainer, limits, measure=loads)
    trainer.compute_loss_func = loss_per_target
