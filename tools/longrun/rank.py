"""One process of a long run: trains in a layout, and notes every few steps what the process holds."""

import gc
import json
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist

from omnibal.demo import DemoPaths

NOTES = 40
"""Behind so many steps of a run, evenly spread, it evaluates and notes; it saves behind every second of them."""
LIMITS = {"vision_units": 4, "llm_tokens": 96}
PIPELINES: dict[str, dict[str, Any]] = {
    "pipeline": {"num_stages": 2, "schedule": "zero-bubble"},
    "tensor ranks": {"num_stages": 1, "num_tensor": 2},
    "units": {"num_stages": 2, "encoder": {"num_replicas": 1}},
    "spread encoder": {"num_stages": 2, "encoder": "spread"},
}
DROP_INS = ("ZeRO 1, packs", "ZeRO 3, packs", "ZeRO 1, rearranged")
LAYOUTS = (*PIPELINES, *DROP_INS)


def steps_between_notes(steps: int) -> int:
    return max(steps // NOTES, 1)


class Notes:
    """Writes what this process holds behind a step: bytes of its own, threads, handles, children, Python's objects."""

    def __init__(self, folder: Path) -> None:
        self._file = (folder / f"rank{dist.get_rank()}.jsonl").open("w", buffering=1)
        self._process = psutil.Process()
        self._begun = time.process_time()

    def note(self, step: int) -> None:
        taken = time.process_time() - self._begun
        gc.collect()  # or garbage that waits for its turn would count as kept
        found = {
            "step": step,
            "bytes": self._process.memory_full_info().uss,
            "threads": self._process.num_threads(),
            "handles": self._process.num_fds(),
            "children": len(self._process.children()),
            "objects": len(gc.get_objects()),
            "seconds": taken,  # of this process alone: other work on the machine hardly counts
        }
        self._file.write(json.dumps(found) + "\n")
        self._begun = time.process_time()


def train_pipeline(layout: str, steps: int, every: int, data: DemoPaths, folder: Path) -> None:
    """Train with omnibal.train, which evaluates and saves."""
    from omnibal.train import train

    config = {
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "scheduler": {"type": "WarmupCosineLR", "params": {"total_num_steps": "auto", "warmup_num_steps": "auto"}},
        "zero_optimization": {"stage": 1},
        "gradient_clipping": 1.0,
        "omnibal": {
            "model": {"path": str(data.model), "weights": "random"},
            "data": {"train": str(data.meta), "held_out": str(data.held_out_meta), "max_tiles": 2, "workers": 1},
            "packing": LIMITS,
            "pipeline": PIPELINES[layout],
            "run": {
                "output": str(folder / "run"),
                "max_steps": steps,
                "save_every": 2 * every,
                "keep": 2,
                "evaluate_every": every,
            },
        },
    }
    notes: list[Notes] = []

    def note(engine: Any) -> None:
        notes[:] = notes or [Notes(folder)]
        notes[0].note(engine.global_steps)

    engine = train(config, on_evaluation=note)
    if dist.get_rank() == 0:
        last = engine.last_step
        (folder / "epochs.json").write_text(json.dumps(0 if last is None else last.epoch + 1))


def train_drop_in(layout: str, steps: int, every: int, data: DemoPaths, folder: Path) -> None:
    """Train with transformers.Trainer under DeepSpeed's ZeRO, equipped by ``balance`` or ``rearrange``."""
    from transformers import AutoConfig, AutoModelForImageTextToText, Trainer, TrainerCallback, TrainingArguments

    from omnibal import PackLimits
    from omnibal.formats.conversations import open_dataset
    from omnibal.integrations.transformers import balance, rearrange
    from tests.integrations.items import Collate

    zero = {"stage": int(layout[5]), "stage3_param_persistence_threshold": 0}
    arguments = TrainingArguments(
        str(folder / "run"),
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        remove_unused_columns=False,
        per_device_train_batch_size=2,
        per_device_eval_batch_size=10,  # one batch, with images on both ranks: under ZeRO 3 both run the ViT, or none
        gradient_accumulation_steps=2,
        dataloader_num_workers=1,
        learning_rate=1e-3,
        max_steps=steps,
        logging_steps=every,
        eval_strategy="steps",
        eval_steps=every,
        save_steps=2 * every,
        save_total_limit=2,
        deepspeed={
            "train_micro_batch_size_per_gpu": "auto",
            "gradient_accumulation_steps": "auto",
            "gradient_clipping": 1.0,
            "zero_allow_untested_optimizer": True,
            "zero_optimization": zero,
        },
    )
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(AutoConfig.from_pretrained(data.model))
    train_data, held_out = (open_dataset(meta, data.model, max_tiles=2) for meta in (data.meta, data.held_out_meta))
    trainer = Trainer(model, arguments, Collate("internvl"), train_data, held_out)
    notes = Notes(folder)

    class Callback(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
            if state.global_step % every == 0:
                state.log_history.clear()  # Trainer keeps all it has logged
                trainer.accelerator._dataloaders.clear()  # and Accelerate the loader of each evaluation
                notes.note(state.global_step)

    trainer.add_callback(Callback())
    if layout.endswith("rearranged"):
        rearrange(trainer)
    else:
        balance(trainer, PackLimits(**LIMITS))
    trainer.train()
    if dist.get_rank() == 0:
        (folder / "epochs.json").write_text(json.dumps(trainer.state.epoch))


def main() -> None:
    """Arguments: layout, steps, the demo's folder, the folder for what is noted."""
    layout, steps, demo, folder = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]), Path(sys.argv[4])
    data = DemoPaths(demo / "train.json", demo / "held_out.json", demo / "model", (), ())
    (train_pipeline if layout in PIPELINES else train_drop_in)(layout, steps, steps_between_notes(steps), data, folder)


if __name__ == "__main__":
    main()
