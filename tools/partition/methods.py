"""Our cut against DeepSpeed's on two processes, in one run; see README.md."""

from statistics import median

import torch.distributed as dist
from transformers import InternVLConfig

from omnibal.cost import CostModel
from omnibal.pipeline.partition import Partition
from omnibal.pipeline.search import PartitionSearch, search_partition
from omnibal.profile.records import ModelProfile
from tools.bench import table
from tools.partition.bench import Case, Packs, Timings, measure_link, measure_model, time_steps
from tools.partition.models import MODELS
from tools.partition.reality import LIMITS, MINUTES, heading, links_of, make_parser, predict, sampled, start

METHODS = ("uniform", "parameters", "paper", "search")
TRIED, TRIAL_STEPS = 4, 3


def main() -> None:
    """Measure the model's profile, cut it by each method, time all cuts in turn."""
    parser = make_parser(__doc__)
    parser.add_argument("model", choices=("ViT-heavy", "LLM-heavy"))
    arguments = parser.parse_args()
    start()
    config, packs = MODELS[arguments.model], sampled("balanced")
    profile, share = measure_model(config, LIMITS)
    link = measure_link()
    cuts = find_cuts(profile, packs, link)
    cuts.setdefault(best_of_trials(config, profile, packs, link), []).append("search + trials")
    cases = [Case(" and ".join(methods), partition, packs) for partition, methods in cuts.items()]
    timings = time_steps(config, cases, rounds=arguments.rounds, minutes=MINUTES, report=print)
    if dist.get_rank() == 0:
        predicted = [predict(profile, case, link) for case in cases]
        print(f"\n### {arguments.model}\n\n{heading(share, link)}\n\n{report(cases, predicted, timings)}\n")


def best_of_trials(config: InternVLConfig, profile: ModelProfile, packs: Packs, link: CostModel) -> Partition:
    """Of the search's best candidates the one with the fastest steps, in trials that the table does not count."""
    found = search(profile, packs, link, "search", top=TRIED)
    cases = [Case("trial", candidate.partition, packs) for candidate in found.candidates]
    timings = time_steps(config, cases, rounds=TRIAL_STEPS, minutes=MINUTES, report=print)
    medians: list[object] = [[median(timing.seconds) for timing in timings]]
    dist.broadcast_object_list(medians)
    seconds = medians[0]
    assert isinstance(seconds, list)
    return cases[seconds.index(min(seconds))].partition


def search(profile: ModelProfile, packs: Packs, link: CostModel, method: str, *, top: int = 1) -> PartitionSearch:
    """By one method."""
    return search_partition(profile, [packs.load], dist.get_world_size(), links_of(link), method=method, top=top)


def find_cuts(profile: ModelProfile, packs: Packs, link: CostModel) -> dict:
    """Partitions, each with the methods that find it."""
    cuts: dict = {}
    for method in METHODS:
        cuts.setdefault(search(profile, packs, link, method).best.partition, []).append(method)
    return cuts


def report(cases: list[Case], predicted: list[float], timings: list[Timings]) -> str:
    """A row per cut, relative to that of the search's trials."""
    middles = [median(timing.seconds) if timing.seconds else float("nan") for timing in timings]
    ours = next(middle for case, middle in zip(cases, middles, strict=True) if "search + trials" in case.name)
    rows = []
    for case, seconds, middle, timing in zip(cases, predicted, middles, timings, strict=True):
        spread = f"{1e3 * min(timing.seconds):,.0f} … {1e3 * max(timing.seconds):,.0f}" if timing.seconds else "–"
        cells = f"{1e3 * middle:,.0f}", spread, f"{1e3 * seconds:,.0f}", f"{middle / ours:.2f}"
        rows.append((case.name, " ".join(map(str, case.partition.boundaries)), *cells))
    return table(("method", "boundaries", "measured ms", "fastest … slowest", "predicted ms", "of ours"), rows)


if __name__ == "__main__":
    main()
