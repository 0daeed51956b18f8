"""``balance`` on two CPU processes with real clips: samples a second and waits for data, against random padded batches.

    torchrun --nproc_per_node 2 -m tools.video.measured FOLDER

FOLDER gets the clips, a tiny Qwen2.5-VL and its lengths. Clips are decoded as they are trained.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
import torch.distributed as dist
from PIL import Image
from transformers import AutoModelForImageTextToText, Trainer, TrainingArguments

from omnibal.demo import vocabulary, write_model_folder
from omnibal.formats.conversations import ConversationDataset, open_dataset
from omnibal.integrations.transformers import balance
from tests.families.models import save_folder
from tests.families.videos import make_clip
from tools.bench import machine, print_table

SAMPLES: Final = 96
BATCH: Final = 4


class TimedTrainer(Trainer):  # type: ignore[misc]
    """Notes how long its steps wait for their batches."""

    waited = 0.0

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        began = time.perf_counter()
        found = super().get_batch_samples(*args, **kwargs)
        self.waited += time.perf_counter() - began
        return found


class Collate:
    """Pads to the longest sample of a batch."""

    def __init__(self, config: Any) -> None:
        self.image, self.video = config.image_token_id, config.video_token_id

    def __call__(self, items: list[dict[str, Any]]) -> dict[str, Any]:
        def rows(name: str, value: int) -> torch.Tensor:
            return torch.nn.utils.rnn.pad_sequence([item[name] for item in items], True, value)

        ids = rows("input_ids", 0)
        lengths = torch.tensor([len(item["input_ids"]) for item in items])
        batch = {"input_ids": ids, "labels": rows("labels", -100)}
        batch["attention_mask"] = (torch.arange(ids.shape[1]) < lengths[:, None]).long()
        batch["mm_token_type_ids"] = (ids == self.image).long() + 2 * (ids == self.video)
        names = {name for item in items for name, value in item.items() if value is not None} - batch.keys()
        return batch | {name: torch.cat([item[name] for item in items if item.get(name) is not None]) for name in names}


def make_data(folder: Path) -> None:
    """A third of the samples are clips of 1 to 40 seconds, a third images, a third texts."""
    rng, records = np.random.default_rng(0), []
    write_model_folder(folder / "demo", vocabulary())
    save_folder("qwen2_5_vl", folder / "model", folder / "demo", weights=True)
    for number in range(SAMPLES):
        record = {"query": "What is red?", "response": "the ball"}
        if number % 3 == 0:
            seconds = float(np.clip(np.exp(rng.normal(np.log(8), 0.9)), 1, 40))
            record["video"] = make_clip(folder / f"{number}.mp4", 96, 64, int(8 * seconds), 8).name
        elif number % 3 == 1:
            sides = rng.integers(24, 200, 2)
            Image.new("RGB", tuple(map(int, sides))).save(folder / f"{number}.png")
            record["image"] = f"{number}.png"
        records.append(record)
    (folder / "data.json").write_text(json.dumps(records))


def run(folder: Path, dataset: ConversationDataset, *, balanced: bool) -> tuple[float, float]:
    """Samples a second of an epoch, and seconds a step that a rank waited for data."""
    model = AutoModelForImageTextToText.from_pretrained(folder / "model", dtype=torch.float32)
    arguments = TrainingArguments(
        str(folder / f"run{balanced}"), use_cpu=True, report_to=[], disable_tqdm=True, remove_unused_columns=False,
        per_device_train_batch_size=BATCH, num_train_epochs=1, save_strategy="no", logging_strategy="no",
        dataloader_num_workers=1, ddp_find_unused_parameters=True,
    )  # fmt: skip
    trainer = TimedTrainer(model, arguments, data_collator=Collate(model.config), train_dataset=dataset)
    if balanced:
        balance(trainer, lengths=dataset.lengths())
    dist.barrier()
    began = time.perf_counter()
    trainer.train()
    seconds = time.perf_counter() - began
    return SAMPLES / seconds, trainer.waited / trainer.state.global_step


def main() -> None:
    folder = Path(sys.argv[1])
    dist.init_process_group("gloo")
    if dist.get_rank() == 0:
        make_data(folder)
    dist.barrier()
    dataset = open_dataset(folder / "data.json", folder / "model")
    found = {name: run(folder, dataset, balanced=name == "balance") for name in ("random batches", "balance")}
    if dist.get_rank() == 0:
        base = found["random batches"][0]
        print(f"a tiny Qwen2.5-VL under DDP, {machine('torch', 'transformers', 'av')}\n")
        rows = [(name, f"{rate / base:.2f} x", f"{waited:.2f}") for name, (rate, waited) in found.items()]
        print_table(("batches", "samples a second", "seconds a step waited for data"), rows)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
