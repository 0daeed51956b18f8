"""Lines for internvl/train/internvl_chat_finetune.py of OpenGVLab's InternVL, run with --use_packed_ds True.

In ``main``, where the datasets are built, keep what is built for ``use_packed_ds False`` (a ConcatDataset, without
``distributed_mode`` and ``force_shuffle``); the model and the collator stay those of packed training. Then

    trainer = Trainer(model=model, args=training_args, train_dataset=train_dataset, data_collator=collator, ...)
    use_packs(trainer, PackLimits(vision_units=48, llm_tokens=16384))  # new

Their loss, with its weights of tokens, stays as it is.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from omnibal import PackLimits
from omnibal.integrations.loops import replace_loader


def one_buffer(items: Sequence[dict[str, Any]], collate: Callable[..., Any]) -> Any:
    """Whole samples as one of their packed buffers, for ``packed_collate_fn``."""
    buffer: dict[str, Any] = {name: torch.cat([item[name] for item in items]) for name in items[0]}
    sizes = torch.tensor([len(item["input_ids"]) for item in items])
    buffer["data_index"] = torch.repeat_interleave(torch.arange(len(items)), sizes)
    buffer["type_ids"] = torch.zeros_like(buffer["input_ids"])
    buffer |= {"worker_state_key": "", "worker_state_dict": {}}
    return collate([buffer])


def use_packs(trainer: Any, limits: PackLimits) -> None:
    """Call it before ``trainer.train()``. Text-only samples bring a white tile here, so every pack has one."""
    trainer.data_collator = partial(one_buffer, collate=trainer.data_collator)
    replace_loader(trainer, limits)
