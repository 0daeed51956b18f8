"""What OrchMLLM and DistTrain compare themselves with, as far as the simulator can say it; see README.md."""

from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from omnibal.cost import FloatArray, Load
from omnibal.data.lengths import IntArray
from omnibal.pipeline.partition import Partition
from omnibal.planner.packings import StepLoads
from omnibal.planner.search import Variant
from omnibal.profile.records import Level
from tools.bench import table
from tools.paper.ladder import best, gpu_days
from tools.paper.setting import Setting
from tools.partition.paper_models import scaled

RANKS: Final = (64, 512, 2560)
BATCH: Final = 15
"""Samples of a rank's mini-batch, as OrchMLLM's largest model has them where nothing is balanced."""
PHASES: Final = {"ViT": ("vision", "projector"), "LLM": ("language",)}
SHARES: Final = np.arange(0.5, 3.01, 0.125)
"""Devices that the ViT's stage may have, in those of another."""


def main() -> None:
    """Print both tables as Markdown."""
    print(f"### OrchMLLM: data parallelism alone, {BATCH} samples a rank\n\n{orchestrated()}\n")
    print(f"### DistTrain: the ViT on devices of its own\n\n{disaggregated()}")


def orchestrated() -> str:
    """Share of the time that ranks compute: every rank waits for the slowest behind each phase of each step."""
    setting, rows = Setting(), []
    for ranks in RANKS:
        step = _Step.drawn(setting, ranks)
        shares = [step.busy(assigned) for assigned in (step.random(), step.balanced_once(), step.balanced_each())]
        rows.append((f"{ranks}", *(f"{share:.0%}" for share in shares), f"{shares[2] / shares[0]:.2f}"))
    names = ("ranks", "random", "balanced by tokens", "balanced in each phase", "gain")
    return table(names, rows)


@dataclass(frozen=True)
class _Step:
    """Samples of some steps.

    Attributes:
        seconds: Of each phase, shape (phases, steps, samples).
        ranks: That they are spread over.
    """

    seconds: FloatArray
    ranks: int

    @classmethod
    def drawn(cls, setting: Setting, ranks: int) -> "_Step":
        """Random steps; no padding."""
        lengths, size = setting.drawn, ranks * BATCH
        order = np.random.default_rng(0).permutation(len(lengths))
        chosen = order[: len(order) // size * size].reshape(-1, size)
        tokens = lengths.llm_tokens[chosen].astype(np.float64)
        load = Load(lengths.vision_units[chosen], tokens, tokens**2)
        times = [
            sum(
                (layer.forward_seconds + layer.backward_seconds + layer.weight_seconds)(load)
                for layer in setting.profile.layers
                if layer.module in modules
            )
            for modules in PHASES.values()
        ]
        return cls(np.stack(times), ranks)

    def random(self) -> FloatArray:
        """Seconds of each phase, step and rank as drawn."""
        return self.seconds.reshape(*self.seconds.shape[:2], self.ranks, BATCH).sum(axis=-1)

    def balanced_once(self) -> FloatArray:
        """A sample's phases stay together; ranks are balanced by the LLM's."""
        return self._spread([1, 1])

    def balanced_each(self) -> FloatArray:
        """Every phase is balanced apart, as OrchMLLM does; samples travel between phases for nothing."""
        return self._spread([0, 1])

    def busy(self, assigned: FloatArray) -> float:
        """Share of all ranks' time that they compute."""
        return float(assigned.sum() / (assigned.max(axis=-1).sum() * self.ranks))

    def _spread(self, keys: list[int]) -> FloatArray:
        """Longest first to the least loaded rank (Algorithm 1), by the phase that each phase follows."""
        result = np.zeros((len(keys), self.seconds.shape[1], self.ranks))
        for phase, key in enumerate(keys):
            for step in range(self.seconds.shape[1]):
                sums = np.zeros(self.ranks)
                for sample in np.argsort(-self.seconds[key, step]):
                    rank = sums.argmin()
                    sums[rank] += self.seconds[key, step, sample]
                    result[phase, step, rank] += self.seconds[phase, step, sample]
        return result


def disaggregated() -> str:
    """GPU days of random micro-batches without padding, by what DistTrain changes, one thing after the other."""
    setting = Setting()
    random, spread = (_steps(setting, spread=spread) for spread in (False, True))
    chosen = min(SHARES, key=lambda share: _rung(setting, random, share).step_seconds)
    devices = setting.num_gpus * chosen / (chosen + setting.num_stages - 1)
    rows = {
        "Megatron-LM: ViT on a quarter of the GPUs, a stage of its own": _rung(setting, random, 1.0),
        f"ViT on {devices:.0f} of {setting.num_gpus} GPUs": _rung(setting, random, chosen),
        "+ samples spread over replicas by their time": _rung(setting, spread, chosen),
        "ours: one pipeline, packs, joint plan": best(setting),
    }
    days = {name: gpu_days(setting, of) for name, of in rows.items()}
    gains = [next(iter(days.values())) / value for value in days.values()]
    cells = [
        (name, f"{value:.1f}", f"{gain:.2f}", f"{rows[name].bubble_ratio:.0%}")
        for (name, value), gain in zip(days.items(), gains, strict=True)
    ]
    return table(("", "GPU days", "gain", "idle"), cells)


def _rung(setting: Setting, steps: StepLoads, share: float) -> Variant:
    """The ViT in the first stage, which has so many times the devices of another; the LLM in equal stages.

    All stages together keep their devices, so that each has fewer, the more the first one has.
    """
    layers, stages = setting.profile.layers, setting.num_stages
    vision = sum(layer.module in PHASES["ViT"] for layer in layers)
    usual = stages / (share + stages - 1)
    profile = replace(
        setting.profile,
        layers=tuple(scaled(layer, 1 / (usual * (share if i < vision else 1))) for i, layer in enumerate(layers)),
    )
    rest = Partition.uniform(len(layers) - vision, stages - 1).boundaries
    cut = Partition((0, *(vision + boundary for boundary in rest)))
    everything: Level = "full"
    samples = float(setting.row.num_replicas * setting.micro_batches * setting.batch)
    load = Load.stack(Load.stack(step) for step in steps)
    return Variant("", profile, setting.plan(load, cut, (everything,) * len(layers)), steps, samples)


def _steps(setting: Setting, *, spread: bool) -> StepLoads:
    """Random micro-batches, or a step's samples given to its replicas longest first, as many to each."""
    lengths, replicas = setting.drawn, setting.row.num_replicas
    tokens = lengths.llm_tokens.astype(np.float64)
    load = Load(lengths.vision_units, tokens, tokens**2)
    seconds = sum(layer.forward_seconds(load) for layer in setting.profile.layers)
    size = setting.micro_batches * setting.batch
    generator = np.random.default_rng(0)
    steps = []
    count = len(lengths) // (replicas * size)
    for chosen in generator.permutation(len(lengths))[: count * replicas * size].reshape(count, -1):
        owned = chosen.reshape(replicas, size)
        if spread:
            owned = chosen[_longest_first(seconds[chosen], replicas, size)]
            owned = generator.permuted(owned, axis=1)
        groups = owned.reshape(replicas, setting.micro_batches, setting.batch)
        columns = (lengths.vision_units[groups], tokens[groups], tokens[groups] ** 2)
        steps.append(tuple(Load(*(column[replica].sum(axis=-1) for column in columns)) for replica in range(replicas)))
    return tuple(steps)


def _longest_first(seconds: FloatArray, ranks: int, most: int) -> IntArray:
    """Items of each rank, shape (ranks, most): the longest left to the least loaded rank that has room."""
    sums = np.zeros(ranks)
    found: list[list[int]] = [[] for _ in range(ranks)]
    for item in np.argsort(-seconds).tolist():
        rank = int(sums.argmin())
        found[rank].append(item)
        sums[rank] = sums[rank] + seconds[item] if len(found[rank]) < most else np.inf
    return np.array(found)


if __name__ == "__main__":
    main()
