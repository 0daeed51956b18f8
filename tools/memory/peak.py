"""The footprint against reality: bytes that two CPU processes hold in a step of DeepSpeed's pipeline; see README.md."""

import argparse
import os
import tempfile
from itertools import pairwise
from pathlib import Path

import torch
import torch.multiprocessing
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import InternVLConfig

from omnibal.cluster import Layout
from omnibal.cost import Load
from omnibal.data.limits import PackLimits
from omnibal.errors import InfeasibleError
from omnibal.formats.collate import pack_samples
from omnibal.memory.footprint import Footprint, StageMemory
from omnibal.memory.recompute import choose_levels, recompute_seconds
from omnibal.pipeline.partition import Partition
from omnibal.pipeline.schedule import SCHEDULES, ScheduleName
from omnibal.plan import Plan
from omnibal.processes import free_port
from omnibal.profile.records import Level, ModelProfile
from omnibal.vlm import load_model
from omnibal.vlm.layers import VisionLanguageModel
from omnibal.vlm.measure import measure_profile
from tools.bench import head, line

TILES, SAMPLES, TOKENS = 24, 6, 120
IMAGE_TOKEN, TOKENS_PER_TILE, TILE = 3, 16, 56
MICRO_BATCHES = 4
CUTS: dict[ScheduleName, tuple[tuple[int, ...], ...]] = {
    "1f1b": ((0, 9, 17), (0, 5, 17), (0, 12, 17)),
    "zero-bubble": ((0, 9, 17), (0, 5, 17)),
    "zero-bubble-lean": ((0, 9, 17),),
}


def model() -> VisionLanguageModel:
    """Six blocks of each kind; activations far outweigh weights."""
    vision = {
        "hidden_size": 128,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "intermediate_size": 512,
        "image_size": TILE,
        "patch_size": 7,
    }
    text = {
        "model_type": "qwen2",
        "hidden_size": 128,
        "num_hidden_layers": 6,
        "intermediate_size": 384,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 503,
        "max_position_embeddings": 1024,
    }
    return load_model(
        InternVLConfig(vision_config=vision, text_config=text, image_token_id=IMAGE_TOKEN, tie_word_embeddings=False)
    )


def pack() -> dict[str, torch.Tensor]:
    """As large as any."""
    generator, items = torch.Generator().manual_seed(0), []
    for _ in range(SAMPLES):
        tiles = TILES // SAMPLES
        words = torch.randint(4, 503, (TOKENS - tiles * TOKENS_PER_TILE,), generator=generator)
        ids = torch.cat([torch.full((tiles * TOKENS_PER_TILE,), IMAGE_TOKEN), words])
        labels = torch.where(ids == IMAGE_TOKEN, -100, ids)
        items.append({"input_ids": ids, "labels": labels, "pixel_values": torch.randn(tiles, 3, TILE, TILE)})
    return pack_samples(items, pad_token_id=0, pixel_shape=(3, TILE, TILE))


class SamePack:
    """A loader of one pack, again and again."""

    steps_per_epoch = 1
    micro_batches = MICRO_BATCHES

    def __init__(self) -> None:
        # Made before anything is measured: on a GPU it would lie in the host's memory.
        self._batches = [pack() for _ in range(MICRO_BATCHES)]

    def next_step(self) -> tuple[object, list[dict[str, torch.Tensor]]]:
        """A step of it."""
        from omnibal.data.epoch import Step

        return Step(0, 0, SAMPLES * MICRO_BATCHES, Load([1], [1])), list(self._batches)


class PeakMeter(TorchDispatchMode):
    """The most bytes alive at one time, of all that operators make."""

    def __init__(self) -> None:
        super().__init__()
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # noqa: ANN001, ANN204
        given = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage()._cdata not in given:
                storage = tensor.untyped_storage()
                self._made[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self._made = {key: entry for key, entry in self._made.items() if not entry[0].expired()}
        self.peak = max(self.peak, sum(size for _, size in self._made.values()))
        return result


def measure(rank: int, plan_path: str, port: int, folder: str) -> None:
    """One process: train a step, then measure the next."""
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port), "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    torch.set_num_threads(1)

    from omnibal.config import layout_of, read_config
    from omnibal.engine.initialize import build_engine, meet
    from omnibal.engine.resolve import ResolvedRun

    meet("gloo")
    content = {
        "gradient_accumulation_steps": MICRO_BATCHES,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}},
        "zero_optimization": {"stage": 0},
        "gradient_clipping": 0.0,
        "omnibal": {"model": {"weights": "random"}},
    }
    config, section = read_config(content)
    plan = Plan.load(plan_path)
    resolved = ResolvedRun(config, section, None, model(), layout_of(config, 2, 1))
    engine = build_engine(resolved, plan, SamePack(), 2)
    engine._on_device = lambda tensors: tuple(tensor.clone() for tensor in tensors)  # a copy, as on a GPU
    engine.train_batch()
    before = sum(p.grad.nbytes for p in engine.module.parameters() if p.grad is not None)
    with PeakMeter() as meter:
        engine.train_batch()
    torch.save(before + meter.peak, Path(folder) / f"{rank}.pt")


def measured_peaks(plan: Plan) -> list[int]:
    """Of both stages."""
    with tempfile.TemporaryDirectory() as folder:
        plan.save(Path(folder) / "plan.json")
        torch.multiprocessing.spawn(measure, (str(Path(folder) / "plan.json"), free_port(), folder), nprocs=2)
        return [torch.load(Path(folder) / f"{rank}.pt") for rank in range(2)]


def dynamic(memory: StageMemory) -> int:
    """What comes and goes within a step."""
    return memory.total - memory.parameters - memory.optimizer - memory.overhead


def variants(footprint: Footprint, profile: ModelProfile, partition: Partition) -> list[tuple[str, tuple[Level, ...]]]:
    """Every level everywhere, and what half of the memory between none and full allows."""
    size = len(profile.layers)
    found: list[tuple[str, tuple[Level, ...]]] = [(level, (level,) * size) for level in ("none", "selective", "full")]
    levels: tuple[Level, ...] = ()
    ends = [footprint.stages(partition, (level,) * size) for level in ("none", "full")]
    for stage, (a, b) in enumerate(pairwise(partition.boundaries)):
        budget = (ends[0][stage].total + ends[1][stage].total) // 2
        seconds = recompute_seconds(profile, Load([TILES], [SAMPLES * TOKENS], [SAMPLES * TOKENS**2]))
        try:
            levels += choose_levels(footprint, stage, range(a, b), seconds, budget)
        except InfeasibleError:
            levels += ("full",) * (b - a)
    return [*found, ("half the budget", levels)]


def main() -> None:
    """Print the table as Markdown."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("schedules", nargs="*", default=list(CUTS), help="all, if none are named")
    schedules = parser.parse_args().schedules
    torch.set_num_threads(1)
    profile = measure_profile(model(), PackLimits(TILES, SAMPLES * TOKENS))
    targets = SAMPLES * TOKENS - TILES * TOKENS_PER_TILE
    load = Load(TILES, SAMPLES * TOKENS, SAMPLES * TOKENS**2, target_tokens=targets)
    layout = Layout(2, zero_stage=0, precision=profile.dtype)
    print(head(("schedule", "cut", "levels", "stage", "predicted MiB", "measured MiB", "error")))
    errors = []
    for schedule, boundaries in [(name, cut) for name in schedules for cut in CUTS[name]]:
        partition = Partition(boundaries)
        footprint = Footprint(profile, load, SCHEDULES[schedule](2, MICRO_BATCHES), layout)
        for name, levels in variants(footprint, profile, partition):
            plan = Plan(PackLimits(TILES, SAMPLES * TOKENS), MICRO_BATCHES, partition, levels, schedule=schedule)
            predicted = [dynamic(memory) for memory in footprint.stages(partition, levels)]
            for stage, (guess, found) in enumerate(zip(predicted, measured_peaks(plan), strict=True)):
                errors.append(guess / found - 1)
                mib = f"{guess / 2**20:.1f}", f"{found / 2**20:.1f}"
                print(line((schedule, boundaries, name, stage, *mib, f"{errors[-1]:+.1%}")), flush=True)
    print(f"\nerrors from {min(errors):+.1%} to {max(errors):+.1%}")


if __name__ == "__main__":
    main()
