"""omnibal pack: how well a dataset packs, and how alike the ranks' work is."""

import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Final, get_args

import numpy as np
import typer
from tqdm import tqdm

from omnibal.cli.opening import expect, open_workspace, problem_lines, read_lengths
from omnibal.cli.options import (
    ClusterOption,
    JsonOption,
    LengthsOption,
    LimitsOption,
    PictureOption,
    answer,
    check_picture,
    read_limits,
)
from omnibal.config import PackingSection
from omnibal.data.epoch import Epoch, arrange_epoch
from omnibal.data.lengths import SampleLengths
from omnibal.data.limit_search import find_trap
from omnibal.data.limits import PackLimits, choose_limits
from omnibal.data.packing_spec import Method, Oversized
from omnibal.data.packs import Packs
from omnibal.errors import ConfigError
from omnibal.report.packing import (
    Arranged,
    PackingFigures,
    measure_packing,
    packing_notes,
    packing_table,
    plot_rank_loads,
)
from omnibal.workspace import FoundLengths, Workspace

REPLICAS: Final = 8  # if neither the command line nor a cluster says how many
BEFORE: Final[Method] = "random"  # a picture shows it beside the chosen method
# Samples packed before the clock starts: compiled code is compiled once and then cached.
SAMPLES_TO_COMPILE: Final = 64
FATES: Final[dict[Oversized, str]] = {"alone": "each has a pack of its own", "drop": "they are left out", "error": ""}


def pack(
    source: Annotated[
        list[Path],
        typer.Argument(
            help='A ds_config; or, without one, a folder of lengths or JSON lists of {"vit_num", "token_num"}.',
        ),
    ],
    lengths: LengthsOption = None,
    limits: LimitsOption = None,
    cluster: ClusterOption = None,
    num_replicas: Annotated[
        int | None, typer.Option(help="Data-parallel ranks; by default the cluster's, or 8.", min=1)
    ] = None,
    micro_batches: Annotated[
        int | None, typer.Option(help="Packs of a rank and step; by default the ds_config's, or 1.", min=1)
    ] = None,
    method: Annotated[
        Method | None, typer.Option(help="How packs are made; by default the ds_config's, or balanced.")
    ] = None,
    compare: Annotated[bool, typer.Option("--compare", help="Show all methods side by side.")] = False,
    plot: PictureOption = None,
    as_json: JsonOption = False,
) -> None:
    """Pack a dataset for so many ranks and show how good packs and steps are.

    Packs and the fewest possible; how long ranks wait for the slowest one in
    the ViT and in the LLM (Dist Ratio); how random steps are (χ² per degree of
    freedom: 1 as shuffled, more where steps are sorted); the largest packs.

    Example: omnibal pack ds_configs/mine.json --compare

    Example: omnibal pack runs/lengths --num-replicas 16
    --limits 40,12288 --plot packs.png
    """
    check_picture("--plot", plot)
    fixed, workspace = read_limits(limits), _workspace_of(source, lengths, cluster)
    packing = PackingSection() if workspace is None else workspace.section.packing
    packing = packing if method is None else packing.model_copy(update={"method": method})
    found = read_lengths(source, "source") if workspace is None else workspace.found_lengths
    task = _Task(
        lengths=found.lengths,
        limits=choose_limits(found.lengths, *(fixed or (packing.vision_units, packing.llm_tokens))),
        num_replicas=num_replicas or _replicas(workspace),
        micro_batches=micro_batches or (1 if workspace is None else workspace.micro_batches),
        packing=packing,
        vision_unit=found.lengths.vision_unit if workspace is None else workspace.vision_unit,
    )
    # A method that is both shown and drawn is packed once.
    shown = get_args(Method) if compare else (packing.method,)
    drawn = tuple(dict.fromkeys((BEFORE, packing.method))) if plot else ()
    results = {name: task.run(name) for name in dict.fromkeys((*shown, *drawn))}
    if plot is not None:
        plot_rank_loads({f"{name} packs": results[name][1] for name in drawn}, plot, task.vision_unit)
    _answer(task, found, [results[name][0] for name in shown], plot, as_json=as_json)


def _answer(
    task: "_Task", found: FoundLengths, figures: list[PackingFigures], plot: Path | None, *, as_json: bool
) -> None:
    plots, trap = [] if plot is None else [str(plot)], find_trap(task.lengths, task.limits)
    warnings = [] if trap is None else [trap]
    record = task.to_record() | {
        "methods": [entry.to_record() for entry in figures],
        "warnings": warnings,
        "plots": plots,
        "broken": [asdict(problem) for problem in found.problems],
    }
    answer(
        record,
        *problem_lines(found),
        task.title,
        packing_table(figures, task.num_replicas, task.vision_unit),
        *packing_notes(task.num_replicas),
        *(f"warning: {warning}" for warning in warnings),
        *(f"drawn: {path}" for path in plots),
        as_json=as_json,
    )


def _workspace_of(source: list[Path], lengths: list[Path] | None, cluster: str | None) -> Workspace | None:
    """The workspace of the ds_config that the arguments name; None where they name lengths."""
    remedy = "`omnibal lengths` measures a dataset"
    kind = expect("source", source[0], ("ds_config", "saved lengths", "token lengths"), remedy=remedy)
    if kind != "ds_config":
        for name, value in (("--lengths", lengths), ("--cluster", cluster)):
            if value:
                raise ConfigError(f"{name} must come with a ds_config, got {source[0]} with {name}")
        return None
    if len(source) > 1:
        raise ConfigError(f"source must be one ds_config, got {source[1]} beside {source[0]}")
    return open_workspace(source[0], lengths=lengths, cluster=cluster)


def _replicas(workspace: Workspace | None) -> int:
    return REPLICAS if workspace is None or workspace.known_cluster is None else workspace.layout().num_replicas


@dataclass(frozen=True)
class _Task:
    """What is packed, for whom, and how."""

    lengths: SampleLengths
    limits: PackLimits
    num_replicas: int
    micro_batches: int
    packing: PackingSection
    vision_unit: str

    def run(self, method: Method) -> tuple[PackingFigures, Arranged]:
        """Arrange the epoch and measure it."""
        # A few samples first: the seconds that are shown are of packing, not of compiling. Under "alone" an oversized
        # one among these raises nothing.
        first = self.lengths.take(np.arange(min(len(self.lengths), SAMPLES_TO_COMPILE)))
        alone = self.packing.model_copy(update={"oversized": "alone"})
        _pack_all(replace(self, lengths=first, packing=alone).arrange(method), None)
        started = time.perf_counter()
        epoch = self.arrange(method)
        packs = _pack_all(epoch, method)
        figures = measure_packing(
            method,
            self.lengths,
            self.limits,
            packs,
            epoch.steps,
            seconds=time.perf_counter() - started,
            left_out=self.num_oversized if self.packing.oversized == "drop" else 0,
        )
        return figures, Arranged(packs.load(self.lengths), epoch.steps)

    def arrange(self, method: Method) -> Epoch:
        """The epoch, planned as it is asked for."""
        options = self.packing.model_copy(update={"method": method}).options
        shape = {"num_replicas": self.num_replicas, "micro_batches": self.micro_batches}
        return arrange_epoch(self.lengths, self.limits, **shape, **options)

    @property
    def num_oversized(self) -> int:
        """Samples that exceed a limit on their own."""
        return len(self.limits.oversized(self.lengths))

    @property
    def title(self) -> str:
        """The task in a line, and a second one where samples exceed a limit."""
        task = (
            f"{len(self.lengths):,} samples, limits {self.limits.vision_units:,} {self.vision_unit} and "
            f"{self.limits.llm_tokens:,} LLM tokens, {self.num_replicas} ranks × {self.micro_batches} micro-batches"
        )
        if not self.num_oversized:
            return task
        return f"{task}\n{self.num_oversized:,} samples exceed a limit on their own: {FATES[self.packing.oversized]}"

    def to_record(self) -> dict[str, Any]:
        """The task as JSON values."""
        return {
            "samples": len(self.lengths),
            "limits": self.limits.record(),
            "num_replicas": self.num_replicas,
            "micro_batches": self.micro_batches,
            "seed": self.packing.seed,
            "exchange_steps": self.packing.exchange_steps,
            "oversized": {"policy": self.packing.oversized, "samples": self.num_oversized},
        }


def _pack_all(epoch: Epoch, method: Method | None) -> Packs:
    """Plan a whole epoch; a bar shows how far it is, where a method is given and someone is looking."""
    parts = []
    with tqdm(total=epoch.num_steps, desc=method, unit=" steps", leave=False, disable=None if method else True) as bar:
        for packs in epoch:
            parts.append(packs)
            bar.update(len(packs) // epoch.ranks.step_packs)
    return Packs.concatenate(parts)
