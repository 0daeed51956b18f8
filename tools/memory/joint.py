"""Planning together against planning in two phases, on the paper's models; see README.md."""

import argparse
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
from tqdm import tqdm

from omnibal.data.limits import PackLimits
from omnibal.errors import InfeasibleError
from omnibal.pipeline.partition import descend, model_optima
from omnibal.planner import PlanRequest, PlanResult, make_plan
from omnibal.planner.packings import packings
from omnibal.planner.search import Choice
from omnibal.planner.step_model import StepCosts, StepModel
from omnibal.profile.records import ModelProfile
from tools.bench import table
from tools.memory.paper_tables import profile_of
from tools.partition.paper_models import BASELINE, LIMITS, cluster_of
from tools.synthetic import tiled_lengths

GIB = 2**30
LENGTHS = tiled_lengths(40_000, seed=1)
MODELS = {
    name: replace(BASELINE, language=language, tensor_parallel=degree)
    for name, language, degree in (("6B+20B", "InternLM2-20B", 2), ("6B+34B", "Yi-34B", 2), ("6B+70B", "Llama3-70B", 4))
}
LIMIT_SETS = {"fixed": (LIMITS,), "free": (None,), "both": (LIMITS, None)}
STAGES = (8, 16)
REPLICAS = 2
BUDGETS = (24, 28, 32, 40, 48, 64, 80)
GLOBAL_BATCH = 256
STARTS = 4


@dataclass(frozen=True)
class Row:
    """One problem and what came of it."""

    model: str
    stages: int
    budget: int
    levels: str
    limits: str
    baseline: Choice | InfeasibleError
    """In two phases."""
    result: PlanResult | InfeasibleError
    seconds: float

    @property
    def gain(self) -> float | None:
        """Share of the time of the plan made in two phases that a sample takes less; None where either does not fit."""
        if isinstance(self.result, InfeasibleError) or isinstance(self.baseline, InfeasibleError):
            return None
        return 1 - self.result.choice.sample_seconds / self.baseline.sample_seconds

    def cells(self) -> list[str]:
        """For the table."""
        head = [self.model, f"{self.stages}", f"{self.budget}", self.levels, self.limits]
        if isinstance(self.result, InfeasibleError):
            missing = str(self.result).split(" bytes (")[1].split(")")[0]
            return [*head, "–", f"missing {missing}", "", "", f"{self.seconds:.1f}"]
        result = self.result
        baseline = _missing(self.baseline) if isinstance(self.baseline, InfeasibleError) else _describe(self.baseline)
        gain = "fits" if self.gain is None else f"{self.gain:.1%}"
        return [*head, baseline, _describe(result.choice), gain, _recomputed(result.choice), f"{self.seconds:.1f}"]


def rows(models: Sequence[str], stages_list: Sequence[int], limit_sets: Sequence[PackLimits | None]) -> Iterator[Row]:
    """Solve every problem of some models."""
    problems = [
        (model, stages, budget, levels, limits)
        for model in models
        for stages in stages_list
        for levels in ("none, full", "all three")
        for limits in limit_sets
        for budget in BUDGETS
    ]
    for model, stages, budget, levels, limits in tqdm(problems):
        profile = profile_of(MODELS[model], selective=levels == "all three")
        request = PlanRequest(
            cluster=cluster_of(stages * REPLICAS * profile.num_tensor, budget * GIB), num_stages=stages,
            global_batch=GLOBAL_BATCH, accumulate_float32=False, head_room=0.0, limits=limits,
        )  # fmt: skip
        started = time.perf_counter()
        result: PlanResult | InfeasibleError
        try:
            result = make_plan(profile, LENGTHS, request)
        except InfeasibleError as error:
            result = error
        words = "free" if limits is None else f"{limits.vision_units}, {limits.llm_tokens}"
        seconds = time.perf_counter() - started
        yield Row(model, stages, budget, levels, words, two_phases(profile, request), result, seconds)


def two_phases(profile: ModelProfile, request: PlanRequest) -> Choice | InfeasibleError:
    """The best partition for unbounded memory under the paper's limits, and then the least recompute that fits."""
    (layout,) = request.layouts(profile)
    model = StepModel(StepCosts(profile, packings(LENGTHS, request, layout.num_replicas)[0], layout, request))

    problem = model.problem
    starts = model_optima(problem.mean.pace, problem.mean.passing, model.packing.micro_batches)
    seconds = dict(zip(starts, problem.evaluate(np.array(starts)).tolist(), strict=True))
    found = descend(sorted(starts, key=seconds.__getitem__)[:STARTS], seconds, problem.evaluate, problem.bound)
    boundaries = min(found, key=lambda each: (found[each], each))
    try:
        model.levels(boundaries)
    except InfeasibleError as error:
        return error
    return Choice(model, boundaries, float(model.evaluate(np.array([boundaries]))[0]))


def main() -> None:
    """Print the table as Markdown."""
    heads = ("model", "stages", "GiB", "levels", "limits", "two phases", "together", "gain", "recomputed", "s to plan")
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", default=[*MODELS], help="some of the models")
    parser.add_argument("--stages", type=int, nargs="*", default=STAGES, help="numbers of stages")
    parser.add_argument("--limits", choices=LIMIT_SETS, default="both", help="of packs")
    arguments = parser.parse_args()
    solved = list(rows(arguments.models, arguments.stages, LIMIT_SETS[arguments.limits]))
    print(table(heads, (row.cells() for row in solved)))
    print(f"\n{overview(solved)}")
    _summarise(solved)


def overview(solved: Sequence[Row]) -> str:
    """A row per problem without its budget, a column per budget: time saved against planning in two phases.

    "fits" where only the plan made together does, and the GiB that even that is short of where nothing fits.
    """
    problems: dict[tuple[str, ...], dict[int, str]] = {}
    for row in solved:
        _, _, _, levels, limits, _, together, gain, *_ = row.cells()
        cell = gain or f"({together.removeprefix('missing ').removesuffix(' GiB')})"
        problems.setdefault((row.model, f"{row.stages}", limits, levels), {})[row.budget] = cell
    heads = ("model", "stages", "limits", "levels", *(f"{budget} GiB" for budget in BUDGETS))
    rows = [(*problem, *(cells[budget] for budget in BUDGETS)) for problem, cells in problems.items()]
    return table(heads, rows)


def _summarise(solved: list[Row]) -> None:
    results = [row.result for row in solved if isinstance(row.result, PlanResult)]
    gains = sorted(row.gain for row in solved if row.gain is not None)
    print(f"\n{len(solved)} problems, {len(results)} fit together, {len(gains)} in two phases.")
    if gains:
        print(
            f"Where both fit, a sample takes {sum(gains) / len(gains):.1%} less time on average when planned together, "
            f"{gains[len(gains) // 2]:.1%} in the median, at most {gains[-1]:.1%}, at least {gains[0]:.1%}."
        )


def _describe(choice: Choice) -> str:
    packing = choice.model.packing
    per_second = 1 / choice.sample_seconds
    return f"{per_second:.1f}/s ({packing.limits.vision_units}, {packing.limits.llm_tokens}; {packing.micro_batches})"


def _missing(error: InfeasibleError) -> str:
    return f"missing {int(str(error).split('(')[1].split(' bytes')[0]) / GIB:.2f} GiB"


def _recomputed(choice: Choice) -> str:
    """Layers per stage that recompute fully + selectively."""
    levels = choice.model.levels(choice.boundaries)
    stages = [levels[a:b] for a, b in pairwise(choice.boundaries)]
    if "selective" in levels:
        return " ".join(f"{stage.count('full')}+{stage.count('selective')}" for stage in stages)
    return " ".join(f"{stage.count('full')}" for stage in stages)


if __name__ == "__main__":
    main()
