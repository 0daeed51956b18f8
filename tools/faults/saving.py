"""How long a step waits for a checkpoint, which is written before training goes on or beside it.

    python -m torch.distributed.run --nproc_per_node 2 -m tools.faults.saving

Two stages train an InternVL of some hundred million parameters; each way saves five times, in turns. The pause is that
of the slower rank, from the call to its return.
"""

import json
import time
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import torch.distributed as dist

from omnibal.demo import write_demo
from omnibal.engine.checkpoint import MANIFEST
from omnibal.engine.engine import OmnibalEngine
from omnibal.engine.initialize import initialize
from omnibal.formats.conversations import open_dataset
from omnibal.ranks import gather
from tools.bench import machine, print_table

WIDTH, LAYERS, SAVES = 768, 8, 5


def config_of(model: Path, folder: Path) -> dict[str, object]:
    config = json.loads((model / "config.json").read_text())
    for part in ("vision_config", "text_config"):
        config[part] |= {"num_hidden_layers": LAYERS, "hidden_size": WIDTH, "intermediate_size": 4 * WIDTH}
    config["text_config"].pop("layer_types", None)
    if dist.get_rank() == 0:
        (model / "config.json").write_text(json.dumps(config))
    dist.barrier()
    return {
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}},
        "zero_optimization": {"stage": 1},
        "omnibal": {
            "model": {"path": str(model), "weights": "random"},
            "data": {"workers": 0, "max_tiles": 2},
            "packing": {"vision_units": 8, "llm_tokens": 320},
            "pipeline": {"num_stages": 2},
            "run": {"output": str(folder / "run")},
        },
    }


def step_seconds(engine: OmnibalEngine) -> float:
    started = time.perf_counter()
    engine.train_batch().item()
    return max(gather(time.perf_counter() - started))


def saved(engine: OmnibalEngine, folder: Path, *, beside: bool) -> tuple[float, float, int]:
    """Seconds of the pause and of a step while threads write, and steps until the checkpoint is whole."""
    step_seconds(engine)  # each has a name of its own
    started = time.perf_counter()
    engine.save_checkpoint(folder, async_save=beside, keep=1)
    pause = max(gather(time.perf_counter() - started))
    checkpoint, steps, seconds = folder / f"global_step{engine.global_steps}", 0, list[float]()
    while not all(gather((checkpoint / MANIFEST).exists())):
        seconds.append(step_seconds(engine))
        steps += 1
    return pause, median(seconds or [0.0]), steps


def main() -> None:
    dist.init_process_group("gloo")
    with TemporaryDirectory() as name:
        [shared] = {*gather(name if dist.get_rank() == 0 else None)} - {None}
        folder = Path(shared)
        if dist.get_rank() == 0:
            write_demo(folder / "data", samples=400, held_out=20)
        dist.barrier()
        data = folder / "data"
        config = config_of(data / "model", folder)
        engine, *_ = initialize(config=config, dataset=open_dataset(data / "train.json", data / "model", max_tiles=2))
        quiet = median([step_seconds(engine) for _ in range(4)][1:])
        found: dict[bool, list[tuple[float, float, int]]] = {False: [], True: []}
        for _ in range(SAVES):
            for beside, times in found.items():
                times.append(saved(engine, folder / "checkpoints", beside=beside))
        size = sum(path.stat().st_size for path in (folder / "checkpoints").rglob("*") if path.is_file())
        if dist.get_rank() == 0:
            print(f"{machine('torch', 'deepspeed')}; a checkpoint has {size / 2**20:,.0f} MiB\n")
            rows = [
                [
                    "beside" if beside else "before",
                    *(f"{median(of):.2f}" for of in zip(*times, strict=True)),
                    f"{quiet:.2f}",
                ]
                for beside, times in found.items()
            ]
            print_table(["written", "pause s", "a step beside it s", "steps until whole", "a step alone s"], rows)
        engine.finish_saving()
        dist.barrier()


if __name__ == "__main__":
    main()
