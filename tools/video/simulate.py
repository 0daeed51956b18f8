"""Waits of the encoder and the LLM with videos in the mixture, simulated: batches as today, packs, samples rearranged.

    python -m tools.video.simulate

Videos are as long as those of LLaVA-Video-178K (Zhang et al., arXiv 2410.02713, and its dataset card): up to three
minutes, 40 seconds on average; here log-normal, at 640 x 360 and 30 frames a second. Images and texts are
``tools.synthetic.patch_lengths``. Costs are counted for one device, links are free, ranks meet as under ZeRO 3.
"""

from functools import partial
from typing import Final

import numpy as np

from omnibal.advise.batches import Samples, padded_batches
from omnibal.advise.models import Model
from omnibal.advise.wait import phase_costs, wait
from omnibal.cost import CostModel, FloatArray, Load
from omnibal.data.lengths import SampleLengths
from omnibal.data.metrics import dist_ratio
from omnibal.data.step_size import fit_step
from omnibal.device import Device
from omnibal.dispatch.divide import divide
from omnibal.families.base import VideoHeader
from omnibal.packs.loading import PackSampler
from omnibal.profile.counted import analytic_profile
from tools.bench import machine, print_table
from tools.synthetic import patch_lengths

MODEL: Final = "Qwen2.5-VL-7B"
SAMPLING: Final = {
    "do_sample_frames": True, "fps": 2, "max_frames": 64, "size": {"shortest_edge": 100_352, "longest_edge": 200_704},
}  # fmt: skip
SAMPLES_PER_RANK: Final = 64
BATCH: Final = 4
STEPS: Final = 16


def mixture(count: int, *, videos: float = 0.3, seed: int = 0) -> SampleLengths:
    """Lengths of videos and of images with texts (6 % texts alone), in random order."""
    rng = np.random.default_rng(seed)
    rule = Model.known(MODEL).video_rule(**SAMPLING)
    seconds = np.clip(np.exp(rng.normal(np.log(40) - 0.32, 0.8, int(count * videos))), 2, 180)
    loads = [rule(VideoHeader(640, 360, int(30 * each), 30.0)) for each in seconds]
    text = np.exp(rng.normal(np.log(120), 0.7, len(loads))).astype(np.int64) + 34
    units = np.array([load.vision_units for load in loads])
    squared = np.array([load.vision_squared for load in loads])
    clips = SampleLengths(units, units // 4 + text, target_tokens=text // 2, vision_squared=squared, video_units=units)
    images = patch_lengths(count - len(loads), seed=seed)
    images = SampleLengths(**images.columns(), video_units=np.zeros(len(images), dtype=np.int32))
    return SampleLengths.concatenate([clips, images]).take(rng.permutation(count))


def waits(loads: Load, costs: dict[str, CostModel]) -> tuple[float, float, float]:
    """Share of the ranks' seconds that they wait for the encoder and for the LLM; seconds of a step."""
    seconds: dict[str, FloatArray] = {phase: cost(loads) for phase, cost in costs.items()}
    waited, busy = wait(seconds, "zero3"), sum(each.sum(axis=2) for each in seconds.values())
    whole = sum(waited.values()) + busy
    vision, language = (
        float(sum(each.sum() for phase, each in waited.items() if phase.startswith(part)) / whole.sum())
        for part in ("vision", "language")
    )
    return vision, language, float(whole.max(axis=1).mean())


def rearranged(lengths: SampleLengths, ranks: int, costs: dict[str, CostModel]) -> Load:
    """What ranks hold where random samples of a step go to other ranks for the encoder and for the LLM; no padding."""
    order, size, steps = np.random.default_rng(0).permutation(len(lengths)), BATCH * ranks, []
    for chosen in order[: STEPS * size].reshape(-1, size):
        of = lengths.take(chosen)
        tokens = of.llm_tokens.astype(np.float64)
        each = Load(of.vision_units.astype(np.float64), tokens, tokens**2, of.vision_squared.astype(np.float64))
        of_rank = {
            part: divide(sum(cost(each) for phase, cost in costs.items() if phase.startswith(part)), ranks)
            for part in ("vision", "language")
        }
        vision, language = (partial(np.bincount, rank, minlength=ranks) for rank in of_rank.values())
        sizes = vision(each.vision_units), language(tokens), language(tokens**2), vision(each.vision_squared)
        steps.append(Load(*(size[:, None] for size in sizes)))
    return Load.stack(steps)


def main() -> None:
    model = Model.known(MODEL)
    costs = phase_costs(analytic_profile(model.records, Device.named("A100-80GB")))
    print(f"{MODEL}, {machine('numpy')}; simulated\n")
    # Limits under which a pack holds about as many samples as a batch, for all numbers of GPUs.
    fitted = mixture(SAMPLES_PER_RANK * 64)
    limits = fit_step(fitted, BATCH * 64, batch_size=BATCH, num_replicas=64).limits
    print(f"packs of at most {limits.vision_units:,} patches and {limits.llm_tokens:,} tokens\n")
    rows = []
    for ranks in (8, 64, 512):
        lengths = mixture(SAMPLES_PER_RANK * ranks)
        sampler = PackSampler(lengths, limits, num_replicas=ranks, rank=0)
        samples = Samples.draw(lengths, STEPS * BATCH * ranks, np.random.default_rng(0)).all_rows
        ways = {
            "random batches": padded_batches(samples, batch=BATCH, num_ranks=ranks, micro_batches=1),
            "group_by_length": padded_batches(
                samples, batch=BATCH, batching="group_by_length", num_ranks=ranks, micro_batches=1
            ),
        }
        found = {name: (made.loads, made.samples_per_step) for name, made in ways.items()}
        steps = range(min(sampler.num_steps, STEPS))
        found["packs"] = Load.stack(sampler.load(step) for step in steps), len(lengths) / sampler.num_steps
        found["rearranged"] = rearranged(lengths, ranks, costs), BATCH * ranks
        rates = []
        for name, (loads, per_step) in found.items():
            vision, language, seconds = waits(loads, costs)
            rates.append(per_step / seconds)
            ratios = [f"{dist_ratio(column):.1%}" for column in (loads.vision_units, loads.llm_tokens)]
            gain = f"{rates[-1] / rates[0]:.2f} x"
            rows.append((ranks, name, *ratios, f"{vision:.1%}", f"{language:.1%}", gain))
    names = (
        "GPUs",
        "batches",
        "Dist Ratio, patches",
        "tokens",
        "waits for the encoder",
        "for the LLM",
        "samples a second",
    )
    print_table(names, rows)


if __name__ == "__main__":
    main()
