"""Fine-tunes Qwen2.5-VL, InternVL or another model that packs, in transformers.Trainer on balanced packs.

deepspeed launch/examples/finetune.py --model MODEL --data train.jsonl --output_dir out, and any TrainingArguments.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForImageTextToText, HfArgumentParser, Trainer, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from omnibal.formats.conversations import open_dataset
from omnibal.integrations.transformers import balance

pad = partial(pad_sequence, batch_first=True)


@dataclass
class Job:
    """What is trained on what."""

    model: str = field(metadata={"help": "A Hugging Face folder."})
    data: str = field(metadata={"help": "Conversations as JSON lines, or whatever else omnibal reads."})
    held_out: str | None = field(default=None, metadata={"help": "More of these, for --eval_strategy."})


def main(job: Job, args: TrainingArguments) -> None:
    """Train, from the newest checkpoint in ``args.output_dir`` if there is one."""
    args.remove_unused_columns = False  # the collator reads them
    model = AutoModelForImageTextToText.from_pretrained(job.model, dtype=torch.bfloat16 if args.bf16 else torch.float32)
    image_token = model.config.image_token_id

    def collate(items: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """A padded batch; balance asks for batches of one item and packs them, evaluation for whole batches."""
        ids, labels = ([item[name] for item in items] for name in ("input_ids", "labels"))
        batch = {"input_ids": pad(ids), "labels": pad(labels, padding_value=-100)}
        batch["attention_mask"] = pad([torch.ones_like(row) for row in ids])
        batch["mm_token_type_ids"] = (batch["input_ids"] == image_token).long()  # Qwen's positions follow from it
        for name in ("pixel_values", "image_grid_thw"):
            if images := [item[name] for item in items if item.get(name) is not None]:
                batch[name] = torch.cat(images)
        return batch

    data = {"train_dataset": open_dataset(job.data, job.model)}
    if job.held_out:
        data["eval_dataset"] = open_dataset(job.held_out, job.model)
    trainer = Trainer(model, args, data_collator=collate, **data)
    balance(trainer)
    trainer.train(resume_from_checkpoint=get_last_checkpoint(args.output_dir))
    trainer.save_model()


if __name__ == "__main__":
    main(*HfArgumentParser((Job, TrainingArguments)).parse_args_into_dataclasses())
