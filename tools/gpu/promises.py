"""What costs promise for the rows that a GPU has timed, beside what it measured; needs no GPU and no weights.

python -m tools.gpu.promises
"""

from collections.abc import Iterator
from dataclasses import replace
from unittest.mock import patch

import numpy as np

from omnibal.advise import batches as advised
from omnibal.advise.batches import Batches
from omnibal.advise.wait import BACKWARD_OPERATIONS, LAUNCH_SECONDS, CostByPhase, operations, phase_costs
from omnibal.cost import Load
from omnibal.data.lengths import SampleLengths
from omnibal.data.packs import Packs
from omnibal.data.step_size import fit_step
from omnibal.device import Device
from omnibal.families import layer_records
from omnibal.formats.model_format import as_tied
from omnibal.integrations.trainer.steps import AskedSteps, Gains, expected_gains, first_batches
from omnibal.packs.loading import PackSampler
from omnibal.profile.counted import analytic_profile
from omnibal.profile.records import Level, ModelProfile
from tools.dropin.ways import Task, default, group_by_length
from tools.gpu.models import config_of, made_lengths

SAMPLES, BATCH, ACCUMULATION, DEVICE = 3800, 4, 4, "H200-141GB"
LONGEST = 5
"""Steps of group_by_length that were timed at most, the longest samples first."""
REAL = {"8B": 0.62, "2B": 0.56}
"""Share of real tokens in the random batches that were timed: a few steps, unlike all in this."""
LAYERS = {
    ("1B", "vision_block"): (1.29, 2.72), ("1B", "decoder_block"): (1.72, 2.94),
    ("8B", "vision_block"): (1.32, 2.89), ("8B", "projector"): (0.64, 1.05), ("8B", "decoder_block"): (7.80, 15.75),
    ("26B", "vision_block"): (9.29, 19.34), ("26B", "projector"): (1.66, 3.60),
    ("26B", "decoder_block"): (13.24, 26.55), ("8B", "head"): (100.0, 0.0), ("26B", "head"): (221.0, 0.0),
}  # fmt: skip
"""Milliseconds forward and backward of a layer on the pack ``LARGEST``; a head has both in one."""
LARGEST = Load(16, 8192, 4096**2 + 4 * 1024**2)
MEASURED = {("8B", "random"): 1.89, ("8B", "grouped"): 1.19, ("2B", "random"): 1.83, ("2B", "grouped"): 1.25}
CHECKPOINTING, MEASURED_WITHOUT = "2B, no checkpointing over checkpointing", 1.40
RECOMPUTED: dict[str, Level] = {"8B": "full", "2B": "none"}


def profile_of(model: str) -> ModelProfile:
    """Counted costs of a model of ``tools.gpu.models``."""
    config = config_of(model)
    records = layer_records(as_tied(config.to_dict(), tied=config.tie_word_embeddings))
    return analytic_profile(records, Device.named(DEVICE))


def costs_of(model: str, recompute: Level) -> CostByPhase:
    """The same by phase."""
    return phase_costs(profile_of(model), recompute=recompute)


SMALLER = {
    ("8B", "vision_block"): (4.76, 2.59, 1.54, 1.22), ("8B", "decoder_block"): (1.97, 1.27, 0.98, 0.87),
    ("26B", "vision_block"): (1.29, 1.07, 0.98, 0.97), ("26B", "decoder_block"): (1.30, 0.96, 0.87, 0.89),
}  # fmt: skip
"""Forward passes of an eighth of that pack, a quarter, half and all of it, over what was counted on that day, in
proportion to the pack."""


def smaller_rows() -> Iterator[tuple[str, float, float, float]]:
    """A layer with a part of the pack, the milliseconds of its forward pass, as counted, and with the host's."""
    for (model, kind), shares in SMALLER.items():
        layer = next(layer for layer in profile_of(model).layers if layer.kind == kind)
        for part, share in zip((1 / 8, 1 / 4, 1 / 2, 1.0), shares, strict=True):
            measured = LAYERS[model, kind][0] * part * share / shares[-1]
            counted = 1e3 * float(layer.forward_seconds(LARGEST * part))
            host = 1e3 * LAUNCH_SECONDS * operations(layer)
            yield f"{model}, {kind.replace('_', ' ')}, {part:g} of the pack", measured, counted, max(counted, host)


def layer_rows() -> Iterator[tuple[str, float, float, float]]:
    """A layer, the milliseconds that both passes took, those that are counted, and with the host's."""
    for (model, kind), measured in LAYERS.items():
        layer = next(layer for layer in profile_of(model).layers if layer.kind == kind)
        seconds = layer.forward_seconds + layer.backward_seconds + layer.weight_seconds
        counted, host = float(seconds(LARGEST)), (1 + BACKWARD_OPERATIONS) * LAUNCH_SECONDS * operations(layer)
        yield f"{model}, {kind.replace('_', ' ')}", sum(measured), 1e3 * counted, 1e3 * max(counted, host)


def sampler_of(model: str) -> PackSampler:
    """The packs that ``balance`` makes in ``ladder``."""
    lengths = made_lengths(model, SAMPLES)
    size = fit_step(lengths, BATCH * ACCUMULATION, batch_size=BATCH, num_replicas=1)
    return PackSampler(lengths, size.limits, rank=0, num_replicas=1, micro_batches=size.micro_batches)


def gains_of(sampler: PackSampler, costs: CostByPhase, *, masks: bool = True) -> Gains:
    """What ``balance`` prints, or would print if a padded row's attention took what is counted for packs."""
    asked = AskedSteps(BATCH * ACCUMULATION, BATCH, ACCUMULATION, 1.0)
    with patch.object(advised, "MASKED", advised.MASKED if masks else 1.0):
        return expected_gains(sampler, costs, "ddp", asked)


def real_share(lengths: SampleLengths) -> float:
    """Share of real tokens in random batches."""
    way = default(Task(lengths, 1, ACCUMULATION, BATCH))
    groups = [batch for step in way.steps for rank in step for batch in rank]
    return float(Packs.from_lists(groups).load(lengths).llm_tokens.sum() / way.load(lengths).llm_tokens.sum())


def over_longest(sampler: PackSampler, costs: CostByPhase, *, masks: bool = True) -> float:
    """Tokens a second of packs, in times of the first batches of group_by_length, which hold the longest samples."""
    lengths = sampler.lengths
    way = group_by_length(Task(lengths, 1, ACCUMULATION, BATCH))
    way = replace(way, steps=way.steps[:LONGEST])
    groups = [batch for step in way.steps for rank in step for batch in rank]
    load = way.load(lengths)
    grouped = Batches(load, Packs.from_lists(groups).load(lengths).reshape(load.shape), way.samples_a_step)
    with patch.object(advised, "MASKED", advised.MASKED if masks else 1.0):
        return _tokens_a_second(first_batches(sampler), costs) / _tokens_a_second(grouped, costs)


def _tokens_a_second(batches: Batches, costs: CostByPhase) -> float:
    seconds = np.sum([cost(batches.timed()).sum() for cost in costs.values()])
    return float(batches.real.llm_tokens.sum() / seconds)


def rows() -> Iterator[tuple[str, float, float, float]]:
    """A name, what was measured, what was counted without masks, and with them."""
    for model, recompute in RECOMPUTED.items():
        sampler, costs = sampler_of(model), costs_of(model, recompute)
        before, after = (gains_of(sampler, costs, masks=masks) for masks in (False, True))
        measured = MEASURED[model, "random"]
        yield f"{model}, packs over random, as printed", measured, before.whole, after.whole
        timed = real_share(sampler.lengths) / REAL[model]
        name = f"{model}, packs over random, {REAL[model]:.0%} real tokens as timed"
        yield name, measured, timed * before.whole, timed * after.whole
        longest = [over_longest(sampler, costs, masks=masks) for masks in (False, True)]
        yield f"{model}, packs over grouped, as printed", MEASURED[model, "grouped"], before.grouped, after.grouped
        yield f"{model}, packs over grouped, longest batches", MEASURED[model, "grouped"], longest[0], longest[1]
    packs = first_batches(sampler_of("2B"))
    kept, again = (_tokens_a_second(packs, costs_of("2B", level)) for level in ("none", "full"))
    yield CHECKPOINTING, MEASURED_WITHOUT, kept / again, kept / again


def main() -> None:
    """Print the tables of RESULTS.md."""
    print("| gain in tokens/s | measured | counted without masks | counted | of measured |\n|---|---:|---:|---:|---:|")
    for name, measured, before, after in rows():
        print(f"| {name} | {measured:.2f} | {before:.2f} | {after:.2f} | {after / measured:.2f} |")
    for passes, found in (("both passes", layer_rows()), ("forward", smaller_rows())):
        print(f"\n| layer, {passes} | measured ms | counted ms | of measured | with the host's | of measured |")
        print("|---|---:|---:|---:|---:|---:|")
        for name, measured, counted, least in found:
            shares = counted / measured, least / measured
            print(f"| {name} | {measured:.2f} | {counted:.2f} | {shares[0]:.2f} | {least:.2f} | {shares[1]:.2f} |")


if __name__ == "__main__":
    main()
