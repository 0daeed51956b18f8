"""DistTrain's models without their generator: units beside pipelines, and seconds of the allocation; see README.md."""

import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Final, NamedTuple

import numpy as np

from omnibal.advise.estimate import Scenario
from omnibal.advise.layouts import Kind, weigh_layouts
from omnibal.advise.models import Model
from omnibal.cluster import Cluster, Encoder, Layout
from omnibal.cost import Load
from omnibal.data.lengths import SampleLengths
from omnibal.data.limits import PackLimits
from omnibal.device import DEVICES, Device, usable_bytes
from omnibal.errors import ConfigError
from omnibal.families import layer_records
from omnibal.pipeline.times import split_profile
from omnibal.planner.allocation import ModuleCost, allocate
from omnibal.planner.packings import Packing, PlanRequest
from omnibal.planner.search import placed_step
from omnibal.planner.step_model import StepCosts
from omnibal.profile.counted import analytic_profile
from omnibal.profile.records import ModelProfile
from tools.bench import machine, print_table
from tools.layouts.bench import PER_DEVICE, lengths

DEVICE: Final = replace(
    DEVICES["A100-80GB"], name="A800-80GB", link_bytes_per_second=150e9, node_bytes_per_second=12.5e9
)
"""The paper's section 8: NVLink of 300 GB/s both ways together, four cards of 200 Gb/s for the eight of a node."""
TOKENS: Final = 8192
"""Of every sample, images and text together."""
MOST_IMAGES: Final = 7
"""Of 512 × 512 pixels: 1024 patches of 16 × 16, each of which is a token of the language model."""
SILENT: Final = 1e30
"""Bytes per second of links that tensor ranks' sums take no time on."""
VISION: Final = {
    "hidden_size": 1280, "intermediate_size": 5120, "num_hidden_layers": 32, "num_attention_heads": 16,
    "image_size": [512, 512], "patch_size": [16, 16], "attention_bias": True, "norm_type": "layer_norm",
}  # fmt: skip


class Run(NamedTuple):
    """Replicas of Megatron-LM's layout, and samples of a step."""

    replicas: int
    batch: int


class Published(NamedTuple):
    """One of the paper's models: sizes of the language model, Megatron-LM's stages of it, a small and a large run."""

    name: str
    layers: int
    hidden: int
    intermediate: int
    heads: int
    groups: int
    stages: int
    runs: tuple[Run, Run]
    gain: str
    """Of the large run."""

    @property
    def config(self) -> dict[str, object]:
        text = {
            "model_type": "llama", "hidden_size": self.hidden, "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers, "num_attention_heads": self.heads, "num_key_value_heads": self.groups,
            "vocab_size": 128_256,
        }  # fmt: skip
        whole = {"model_type": "internvl", "downsample_ratio": 1.0, "tie_word_embeddings": False}
        return whole | {"vision_config": VISION, "text_config": text}

    def layout(self, run: Run) -> Layout:
        """Megatron-LM's: every stage is a node of eight tensor ranks, and the encoder has a stage of its own."""
        return Layout(1 + self.stages, run.replicas, num_tensor=8, encoder=Encoder(1, run.replicas, 8))


MODELS: Final = (
    Published("ViT-Huge + Llama3-7B", 32, 4096, 11008, 32, 32, 1, (Run(4, 128), Run(80, 1920)), "1.7–2.2"),
    Published("ViT-Huge + Llama3-13B", 40, 5120, 13824, 40, 40, 2, (Run(4, 64), Run(48, 1920)), "1.7–2.2"),
    Published("ViT-Huge + Llama3-70B", 80, 8192, 28672, 64, 8, 10, (Run(1, 40), Run(12, 1920)), "1.3"),
)
FROZEN: Final[dict[str, tuple[str, ...]]] = {
    "all": (), "encoder": ("language",), "LLM": ("vision",), "projector": ("vision", "language"),
}  # fmt: skip
"""What is trained; the projector always is."""
ROWS: Final[tuple[tuple[str, str, int, tuple[str, ...]], ...]] = (
    ("InternVL3-38B", "8x8xA100-80GB", 1, ()),
    ("InternVL3-38B", "8x8xA100-80GB", 4, ()),
    ("InternVL3-78B", "16x8xH100-80GB", 2, ()),
    ("InternVL3-78B", "16x8xH100-80GB", 4, ()),
    ("InternVL3-78B", "8x8xA100-80GB", 4, ()),
    ("Qwen2.5-VL-72B", "16x8xH100-80GB", 8, ()),
    ("InternVL3-78B", "16x8xH100-80GB", 4, ("vision",)),
)
"""Model, cluster, the most tensor ranks, and what is frozen."""
SMALL_GAIN, FROZEN_GAIN = "1.4–2.7", "1.2–2.9"
"""Of the small runs, all three models together: section 8.2.1, and Figures 19 and 20 with the generator's row."""


def drawn_lengths() -> SampleLengths:
    """As many tokens in every sample, and a skewed number of images, as in Figure 5, which has no numbers."""
    images = np.rint(np.random.default_rng(1).lognormal(np.log(2.6), 0.6, 20_000)).astype(np.int64)
    return SampleLengths(np.minimum(images, MOST_IMAGES), np.full(len(images), TOKENS))


def weigh(model: Published, run: Run, trained: str, published: str) -> list[object]:
    """Samples per second of Megatron-LM's layout, the best pipeline with tensor ranks, and the best units."""
    rigid = model.layout(run)
    cluster = Cluster(rigid.num_devices // 8, 8, DEVICE)
    profiles = profiles_of(model, FROZEN[trained])
    scenario = Scenario(drawn_lengths(), profiles(1, 1), cluster, run.batch)
    answer = weigh_layouts(scenario, profiles, kinds=("tensor", "units"))
    tensor, units = (next(each for each in answer.candidates if each.kind == kind) for kind in ("tensor", "units"))
    of_rigid = run.batch / rigid_seconds(rigid, scenario, profiles(8, 8))
    speeds = (of_rigid, tensor.samples_per_second, units.samples_per_second)
    return [
        f"{model.name}, {cluster.num_devices}", trained, *(f"{speed:.1f}" for speed in speeds),
        f"{speeds[2] / speeds[0]:.2f}", f"{speeds[2] / speeds[1]:.2f}", published, tensor.layout, units.layout,
    ]  # fmt: skip


def profiles_of(
    model: Published, frozen: tuple[str, ...] = (), device: Device = DEVICE
) -> Callable[[int, int], ModelProfile]:
    """Costs by the tensor ranks of encoder and language model."""

    def profile(encoder: int, language: int) -> ModelProfile:
        degrees = {"vision": encoder, "language": language}
        return analytic_profile(layer_records(model.config), device, tensor_parallel=degrees, frozen=frozen)

    return profile


def rigid_seconds(layout: Layout, scenario: Scenario, profile: ModelProfile) -> float:
    """A step of Megatron-LM's layout: micro-batches of one sample in random order, 1F1B."""
    shape = (layout.num_replicas, scenario.samples_per_step // layout.num_replicas)
    load = scenario.draws[0].all_rows.load
    step = tuple(load[samples] for samples in np.arange(scenario.samples_per_step).reshape(shape))
    packing = Packing(PackLimits(MOST_IMAGES, TOKENS), shape[1], scenario.samples_per_step, (step,), load.max())
    request = PlanRequest(cluster=scenario.cluster, global_batch=scenario.samples_per_step)
    return placed_step(StepCosts(profile, packing, layout, request), "1f1b").step_seconds


def print_models() -> None:
    """Both runs with all parts trained; the small runs also with parts frozen (Figures 19 and 20)."""
    names = [
        "model, GPUs", "trained", "rigid", "tensor", "units", "units/rigid", "units/tensor", "paper",
        "layout of tensor", "layout of units",
    ]  # fmt: skip
    cells = [(model, model.runs[0], "all", SMALL_GAIN) for model in MODELS]
    cells += [(model, model.runs[0], trained, FROZEN_GAIN) for trained in tuple(FROZEN)[1:] for model in MODELS]
    large = [(model, model.runs[1], "all", model.gain) for model in MODELS]
    print_table(names, (weigh(*cell) for cell in large + cells))


def print_talk() -> None:
    """The large runs with and without the seconds that tensor ranks take to add up what they compute."""
    rows = []
    for model in MODELS:
        run, speeds = model.runs[1], list[float]()
        rigid = model.layout(run)
        for device in (replace(DEVICE, link_bytes_per_second=SILENT), DEVICE):
            # Both send between stages and replicas at the same speed.
            profiles = profiles_of(model, device=device)
            cluster = Cluster(rigid.num_devices // 8, 8, DEVICE)
            scenario = Scenario(drawn_lengths(), profiles(1, 1), cluster, run.batch)
            (units,) = weigh_layouts(scenario, profiles, kinds=("units",)).candidates
            speeds += [run.batch / rigid_seconds(rigid, scenario, profiles(8, 8)), units.samples_per_second]
        gains = [f"{speeds[1] / speeds[0]:.2f}", f"{speeds[3] / speeds[2]:.2f}", model.gain]
        rows.append([f"{model.name}, {rigid.num_devices}", *(f"{speed:.1f}" for speed in speeds), *gains])
    silent = ["rigid, no talk", "units, no talk"]
    print_table(
        ["model, GPUs", *silent, "rigid", "units", "units/rigid, no talk", "units/rigid", "paper"], rows
    )  # fmt: skip


def print_rows() -> None:
    """Published models of this project's families, with at most so many tensor ranks: pipeline, units, spread."""
    names = ["model, devices", "trained", "tensor ranks", "pipeline", "units", "spread", "units/pipeline"]
    print_table([*names, "spread/pipeline", "layout of units"], (_row(*row) for row in ROWS))


def _row(name: str, machines: str, most: int, frozen: tuple[str, ...]) -> list[object]:
    cluster, records = Cluster.parse(machines), Model.known(name).records

    def profiles(encoder: int, language: int) -> ModelProfile:
        if max(encoder, language) > most:
            raise ConfigError(f"degrees of at most {most} are weighed")
        degrees = {"vision": encoder, "language": language}
        return analytic_profile(records, cluster.device, tensor_parallel=degrees, frozen=frozen)

    scenario = Scenario(lengths(name), profiles(1, 1), cluster, PER_DEVICE * cluster.num_devices, spares_rows=True)
    kinds: tuple[Kind, ...] = ("pipeline", "tensor", "units", "spread")
    found = {each.kind: each for each in weigh_layouts(scenario, profiles, kinds=kinds).candidates}
    pipeline = max(found[kind].samples_per_second for kind in kinds[:2] if kind in found)
    units, spread = (found[kind].samples_per_second for kind in kinds[2:])
    return [
        f"{name}, {cluster}", "ViT frozen" if frozen else "all", f"at most {most}",
        *(f"{rate:.1f}" for rate in (pipeline, units, spread)),
        f"{units / pipeline:.2f}", f"{spread / pipeline:.2f}", found["units"].layout,
    ]  # fmt: skip


def modules() -> list[ModuleCost]:
    """Costs of MLLM-72B's parts for a mean sample, all layers recomputed; the generator is a guess."""
    model, mean = MODELS[-1], Load(3, TOKENS, TOKENS**2)
    profiles = profiles_of(model)
    found = []
    for part, name in enumerate(("vision", "language")):
        by_degree = {degree: split_profile(profiles(degree, degree))[part] for degree in (1, 2, 4, 8)}
        layers = by_degree[1].layers
        weights = sum(layer.parameter_bytes for layer in layers)
        found.append(
            ModuleCost(
                name,
                {d: float(sum(each.forward_seconds(mean) for each in by_degree[d].layers)) for d in by_degree},
                backward_ratio=3,
                parameter_bytes=weights,
                gradient_bytes=weights,
                optimizer_bytes=6 * weights,
                activation_bytes=float(sum(each.saved_bytes["full"](mean) for each in layers)),
                num_layers=len(layers),
            )
        )
    return [*found, replace(found[0], name="generator")]


def print_allocation() -> None:
    """The paper's Table 2."""
    parts, rows = modules(), []
    for num_devices, batch, published in ((1296, 1920, 0.922), (648, 960, 0.641), (324, 480, 0.441), (112, 240, 0.133)):
        taken = []
        for _ in range(3):
            begun = time.process_time()
            usable = usable_bytes(DEVICE.memory_bytes)
            best, *_ = allocate(parts, num_devices, global_batch=batch, device_memory_bytes=usable)
            taken.append(time.process_time() - begun)
        units = "; ".join(
            f"{name} {unit.num_stages} × {unit.num_replicas} × {unit.num_tensor}" for name, unit in best.units.items()
        )
        rows.append([num_devices, batch, published, f"{min(taken):.3f}", units])
    print_table(["GPUs", "global batch", "paper", "here", "stages × replicas × tensor ranks"], rows)


PARTS: Final = {"models": print_models, "talk": print_talk, "rows": print_rows, "allocation": print_allocation}

if __name__ == "__main__":
    print(f"Made {machine('numpy', 'numba')}.")
    for name in sys.argv[1:] or PARTS:
        print(f"\n## {name}\n", flush=True)
        PARTS[name]()
