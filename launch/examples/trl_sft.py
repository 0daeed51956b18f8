"""TRL's SFTTrainer: torchrun --nproc-per-node 2 launch/examples/trl_sft.py runs/trl."""

import sys
from pathlib import Path
from typing import Any

from datasets import Dataset
from tiny import ADAM, LIMITS, collate, demo
from trl import SFTConfig, SFTTrainer

from omnibal import PackLimits
from omnibal.integrations.transformers import balance


def train(
    model: Any,
    dataset: Any,
    collate: Any,
    limits: PackLimits,
    folder: Path,
    *,
    tokenizer: Any,
    epochs: int = 2,
    micro_batches: int = 2,
    samples_per_step: int | None = None,
    **options: Any,
) -> None:
    """Goes on from the last checkpoint in the folder, if there is one.

    A step holds ``samples_per_step`` samples, by default those that the arguments ask for.
    """
    config = SFTConfig(
        output_dir=str(folder),
        num_train_epochs=epochs,
        gradient_accumulation_steps=micro_batches,
        learning_rate=ADAM["lr"],
        remove_unused_columns=False,
        dataset_kwargs={"skip_prepare_dataset": True},  # the collator prepares
        save_strategy="steps",
        save_steps=1,
        report_to=[],
        **options,
    )
    trainer = SFTTrainer(
        model=model,
        args=config,
        train_dataset=Dataset.from_dict({"number": range(len(dataset))}),  # SFTTrainer takes no other class
        data_collator=lambda rows: collate([dataset[row["number"]] for row in rows]),
        processing_class=tokenizer,
    )
    balance(trainer, limits, samples_per_step=samples_per_step)
    trainer.train(resume_from_checkpoint=any(folder.glob("checkpoint-*")))


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    model, dataset = demo(folder)
    train(model, dataset, collate, LIMITS, folder, tokenizer=dataset.tokenizer)
