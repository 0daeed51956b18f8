"""1F1B and zero-bubble side by side on two CPU processes: step times, equal losses, bytes that wait; see README.md."""

import argparse
import json
import os
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import InternVLConfig, InternVLVisionConfig, Qwen2Config

from omnibal.cluster import Layout, Links
from omnibal.cost import Load
from omnibal.data.limits import PackLimits
from omnibal.engine.initialize import meet
from omnibal.formats.collate import pack_samples
from omnibal.memory.footprint import Footprint
from omnibal.pipeline.schedule import SCHEDULES
from omnibal.pipeline.search import search_partition
from omnibal.pipeline.simulate import simulate_step
from omnibal.plan import Plan
from omnibal.processes import free_port
from omnibal.profile.records import Level, ModelProfile
from omnibal.vlm import load_model
from omnibal.vlm.layers import VisionLanguageModel
from omnibal.vlm.measure import measure_profile
from tools.partition.quiet import Instant, foreign_share

TILE, TOKENS_PER_TILE, IMAGE_TOKEN, VOCABULARY = 112, 16, 3, 512
SAMPLES, TILES, TOKENS = 4, 2, 128
LIMITS = PackLimits(SAMPLES * TILES, SAMPLES * TOKENS)
LOAD = Load(SAMPLES * TILES, SAMPLES * TOKENS, SAMPLES * TOKENS**2)
"""Of the pack."""


def model() -> VisionLanguageModel:
    """Eight ViT blocks of width 256 and six decoder blocks of width 384."""
    vision = InternVLVisionConfig(
        hidden_size=256, intermediate_size=1024, num_hidden_layers=8, num_attention_heads=4, image_size=TILE,
        patch_size=14,
    )  # fmt: skip
    text = Qwen2Config(
        vocab_size=VOCABULARY, hidden_size=384, intermediate_size=1152, num_hidden_layers=6, num_attention_heads=6,
        num_key_value_heads=6, max_position_embeddings=4096, tie_word_embeddings=False,
    )  # fmt: skip
    return load_model(
        InternVLConfig(
            vision_config=vision,
            text_config=text,
            image_token_id=IMAGE_TOKEN,
            image_seq_length=TOKENS_PER_TILE,
            downsample_ratio=0.5,
            tie_word_embeddings=False,
        )
    )


def pack(seed: int) -> dict[str, Tensor]:
    """As large as the limits allow; every token of text carries loss."""
    generator = torch.Generator().manual_seed(seed)
    return pack_samples([_sample(generator) for _ in range(SAMPLES)], pad_token_id=0, pixel_shape=(3, TILE, TILE))


def _sample(generator: torch.Generator) -> dict[str, Tensor | None]:
    ids = torch.randint(IMAGE_TOKEN + 1, VOCABULARY, (TOKENS,), generator=generator)
    ids[: TILES * TOKENS_PER_TILE] = IMAGE_TOKEN
    labels = torch.where(ids == IMAGE_TOKEN, -100, ids)
    return {"input_ids": ids, "labels": labels, "pixel_values": torch.randn(TILES, 3, TILE, TILE, generator=generator)}


STAGES, ROUNDS = 2, 5
CASES: tuple[tuple[int, Level], ...] = ((8, "none"), (8, "full"))
"""Micro-batches, and what every layer recomputes."""
LINKS = Links(2e9)


class Packs:
    """A loader of the same packs, again and again."""

    steps_per_epoch = 1

    def __init__(self, micro_batches: int) -> None:
        self.micro_batches = micro_batches
        self._batches = [pack(seed) for seed in range(micro_batches)]

    def next_step(self) -> tuple[object, list[Any]]:
        """All of them."""
        from omnibal.data.epoch import Step

        return Step(0, 0, self.micro_batches, LOAD), list(self._batches)


def plans(profile: ModelProfile, micro_batches: int, level: Level) -> dict[str, Plan]:
    """The same cut under each schedule."""
    levels = (level,) * len(profile.layers)
    loads = [type(LOAD).stack([LOAD] * micro_batches)]
    found = search_partition(profile, loads, STAGES, LINKS, recompute=levels)
    return {
        schedule: Plan(LIMITS, micro_batches, found.best.partition, levels, schedule=schedule) for schedule in SCHEDULES
    }


def train(rank: int, folder: str, port: int, cases: list[dict[str, Plan]]) -> None:
    """One process: steps of each case's engines in turn; writes what it saw."""
    os.environ |= {
        "RANK": f"{rank}", "LOCAL_RANK": f"{rank}", "WORLD_SIZE": f"{STAGES}", "LOCAL_SIZE": f"{STAGES}",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{port}",
    }  # fmt: skip
    torch.set_num_threads(1)

    meet("gloo")
    found = [_steps(case) for case in cases]
    (Path(folder) / f"{rank}.json").write_text(json.dumps(found))


def _steps(case: dict[str, Plan]) -> dict[str, Any]:
    engines = {schedule: _engine(plan) for schedule, plan in case.items()}
    seconds: dict[str, list[float]] = {schedule: [] for schedule in engines}
    foreign: dict[str, list[float]] = {schedule: [] for schedule in engines}
    losses: dict[str, list[float]] = {schedule: [] for schedule in engines}
    for _ in range(1 + ROUNDS):
        for schedule, engine in engines.items():
            before = Instant.now()
            losses[schedule].append(engine.train_batch().item())
            after = Instant.now()
            seconds[schedule].append(after.wall - before.wall)
            foreign[schedule].append(foreign_share(before, after))
    return {
        "seconds": {schedule: measured[1:] for schedule, measured in seconds.items()},  # the first one warms up
        "foreign": {schedule: measured[1:] for schedule, measured in foreign.items()},
        "losses": losses,
        "pending_bytes": {schedule: engine.weight_gradients.peak_bytes for schedule, engine in engines.items()},
    }


def _engine(plan: Plan) -> Any:
    from omnibal.config import layout_of, read_config
    from omnibal.engine.initialize import build_engine
    from omnibal.engine.resolve import ResolvedRun

    content = {
        "gradient_accumulation_steps": plan.micro_batches,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}},
        "zero_optimization": {"stage": 0},
        "gradient_clipping": 0.0,
        "omnibal": {"model": {"weights": "random"}},
    }
    config, section = read_config(content)
    loader: Any = Packs(plan.micro_batches)
    return build_engine(ResolvedRun(config, section, None, model(), layout_of(config, STAGES, 1)), plan, loader, 1)


def main() -> None:
    """Measure the layers, then the steps of every case; write all figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path, help="JSON of all figures")
    arguments = parser.parse_args()
    os.environ |= {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    torch.set_num_threads(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        profile = measure_profile(model(), LIMITS)
    cases = [plans(profile, *case) for case in CASES]
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(train, (folder, free_port(), cases), nprocs=STAGES)
        by_rank = [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(STAGES)]
    rows = [_row(profile, case, [of_rank[number] for of_rank in by_rank]) for number, case in enumerate(cases)]
    arguments.file.write_text(json.dumps(rows, indent=1) + "\n")


def _row(profile: ModelProfile, case: dict[str, Plan], by_rank: list[dict[str, Any]]) -> dict[str, Any]:
    split = case["zero-bubble"]
    footprint = Footprint(
        profile, LOAD, split.make_schedule(), Layout(STAGES, zero_stage=0, precision=profile.dtype), 0
    )
    loads = [type(LOAD).stack([LOAD] * split.micro_batches)]
    predicted = {
        schedule: simulate_step(
            profile, plan.partition, loads, LINKS, recompute=plan.recompute, schedule=plan.make_schedule()
        ).step_seconds
        for schedule, plan in case.items()
    }  # fmt: skip
    layers = [split.partition.layers(stage) for stage in range(STAGES)]
    return {
        "micro_batches": split.micro_batches,
        "recompute": split.recompute[0],
        "partition": list(split.partition.boundaries),
        "predicted_seconds": predicted,
        "seconds": by_rank[0]["seconds"],
        "foreign": by_rank[0]["foreign"],
        "equal_losses": by_rank[0]["losses"]["1f1b"] == by_rank[0]["losses"]["zero-bubble"],
        "predicted_pending_bytes": [
            int(footprint.pending_bytes(stage)[own.start, own.stop]) for stage, own in enumerate(layers)
        ],
        "pending_bytes": [of_rank["pending_bytes"]["zero-bubble"] for of_rank in by_rank],
    }


if __name__ == "__main__":
    main()
