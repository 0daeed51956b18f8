"""Draws micro-batches ahead, has ranks agree on where samples go, and counts what samples cost and exchanges take."""

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain, count, islice
from typing import Any, Final

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from omnibal.advise.wait import sample_costs
from omnibal.cost import IntArray
from omnibal.data.limits import PackLimits
from omnibal.data.packing_spec import DEFAULT_COST
from omnibal.dispatch.step_plan import Costs, Link, PhaseCosts, StepPlan, columns, plan_step
from omnibal.errors import ConfigError, DataError, reporting, said
from omnibal.feeds.feed import ahead, micro_batches_of
from omnibal.formats.collate import IGNORED
from omnibal.integrations.rearranging import Drawn, StepCheck, features_of
from omnibal.integrations.trainer.steps import counted_profile
from omnibal.packs.apart import TYPES
from omnibal.packs.collator import (
    PER_TOKEN,
    PER_VIDEO,
    PackCollator,
    RowCollator,
    RowKinds,
    images_of,
    largest_rows,
    rows_of_images,
)
from omnibal.packs.encoders import EncoderAdapter, device_and_dtype, encoders_of, known_phases, phases_of
from omnibal.passes import device_name
from omnibal.profile.records import Level
from omnibal.ranks import Meeting, check_same, gather, new_gloo_group

BEGINNING: Final = 0, None  # a position: steps that are done, and the state of the source behind them
BEFORE_ALL: Final = -1, -1  # steps and micro-batches
AHEAD: Final = 2  # steps that are drawn and planned before they are wanted
MEASURED_BYTES: Final = 2**24  # that each rank sends to measure the link: some ten images
SECONDS: Final = PER_VIDEO[-1]  # of videos: positions are counted from them before samples travel
RUNS: Final = 4  # exchanges that are timed: the fastest counts, since the first ones connect the ranks


class RearrangingLoader:
    """Yields what ``RearrangedModel`` takes: this rank's samples, and where all ranks' samples go.

    A thread draws the next steps, exchanges their lengths with the other ranks (numbers only, over gloo) and plans
    them while the model works. Sources may never end, or end at different times: a rank that has no more works on
    others' samples until all have ended. What goes wrong on one rank is raised on all. A rank that leaves the loop,
    skips a step or holds another plan ends all, with a message that names the rank.

    Args:
        source: Yields lists of items of a dataset, a micro-batch of this rank each, once for every iteration of the
            loader. If it has ``state_dict`` and ``load_state_dict``, they are used to resume; else as many
            micro-batches as were trained are drawn and thrown away.
        collator: Makes tensors of an item: a ``PackCollator``, or a ``RowCollator`` for models that cannot pack.
        encoders: Those of the model, by the kind of their inputs, as ``encoders_of`` makes them.
        costs: What a sample costs in each phase; by default an encoder's units, and a decoder block's operations.
        micro_batches: Micro-batches of a step (gradient accumulation): the loss is a mean over the targets of all.
        group: The ranks that share samples, the same as of the ``RearrangedModel``; by default all.
        replicas: All ranks over which gradients are averaged, by default those of ``group``. They run equally many
            steps. Give ``dist.group.WORLD`` where ranks share samples within a node or a hybrid ZeRO group alone.
        prints: Whether rank 0 says how even the first step was and is.
    """

    def __init__(
        self,
        source: Iterable[Sequence[Any]],
        collator: PackCollator,
        *,
        encoders: Mapping[str, EncoderAdapter],
        costs: Costs | None = None,
        micro_batches: int = 1,
        group: dist.ProcessGroup | None = None,
        replicas: dist.ProcessGroup | None = None,
        prints: bool = True,
    ) -> None:
        self._source, self._collator, self._encoders = source, collator, encoders
        phases = phases_of(encoders)
        self._costs = _costs_of(phases, costs, padded=isinstance(collator, RowCollator))
        self._inputs = [name for encoder in encoders.values() for name in encoder.takes]
        # What ranks tell each other of a sample: a plan's columns, and rows of each kind's features and tensors.
        self._told = (*columns(phases), *map(features_of, encoders), *self._inputs)
        self._micro_batches = micro_batches
        # The link is measured by those that share samples.
        settings = {"micro_batches": micro_batches, "encoders": [*encoders], "costs": replace(self._costs, link=None)}
        check_same({**settings, "rows of positions": collator.num_positions})
        replicas = replicas or group
        self._ranks, sharing = dist.get_process_group_ranks(replicas), dist.get_process_group_ranks(group)
        if missing := {*sharing} - {*self._ranks}:
            raise ConfigError(f"replicas must have all ranks of group, got none of rank {min(missing)}")
        # A gloo group of its own, since a thread gathers what ranks draw.
        self._group, self._meeting = new_gloo_group(replicas), Meeting(group)
        self._sharing = [self._ranks.index(rank) for rank in sharing]  # among the replicas
        self._num_ranks = len(sharing)
        self._prints = prints and dist.get_rank() == 0
        self.position = BEGINNING
        self._steps: Iterator[tuple[list[Drawn], Any]] | None = None

    def __iter__(self) -> Iterator[Drawn]:
        received = BEFORE_ALL
        self._meeting.begin()
        try:
            for _, drawn in micro_batches_of(self):
                received = drawn.check.place
                yield drawn
        except GeneratorExit:
            self._meeting.leave(received)
            raise

    def step(self) -> tuple[StepPlan, list[Drawn]] | None:
        """The next step's first plan, and this rank's micro-batches; None where all ranks' sources have ended."""
        if self._steps is None:
            self._steps = ahead(partial(self._steps_from, *self.position), AHEAD)
        if (found := next(self._steps, None)) is None:
            self.go_to(BEGINNING)
            return None
        drawn, state = found
        self.position = self.position[0] + 1, state
        if self._prints:
            with reporting("the line about the first step"):
                print(f"omnibal: {drawn[0].plan.describe()}")
            self._prints = False
        return drawn[0].plan, drawn

    def go_to(self, position: tuple[int, Any]) -> None:
        self.position, self._steps = position, None

    def state_dict(self) -> dict[str, Any]:
        """The state of this rank between two steps, from which as many ranks go on."""
        steps_done, source = self.position
        return {"steps_done": steps_done, "source": source, "num_ranks": self._num_ranks}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next iteration go on where this rank's state was taken, on as many ranks."""
        if state["num_ranks"] != self._num_ranks:
            raise ConfigError(
                f"state must be of a run on {self._num_ranks} ranks, got {state['num_ranks']}; "
                "every rank goes on in its own source"
            )
        self.go_to((state["steps_done"], state["source"]))

    def _steps_from(self, steps_done: int, state: Any) -> Iterator[tuple[list[Drawn], Any]]:
        """Micro-batches of each step, and the state of the source behind it; runs in a thread beside the model."""
        batches = self._batches(steps_done, state)
        for number in count(steps_done):
            if (step := self._next_step(batches, number)) is None:
                return
            yield step

    def _batches(self, steps_done: int, state: Any) -> Iterator[Sequence[Any]]:
        # A generator, so that a source which cannot begin fails in the first draw, and the other ranks are told.
        if state is not None:
            self._source.load_state_dict(state)  # type: ignore[attr-defined]
        trained = 0 if state is not None else steps_done * self._micro_batches
        yield from islice(self._source, trained, None)

    def _next_step(self, batches: Iterator[Sequence[Any]], number: int) -> tuple[list[Drawn], Any] | None:
        """One step of this rank and the state of its source, or None where all ranks' sources have ended."""
        # 1. This rank draws its micro-batches of the step, fewer or none where its source has ended.
        # 2. All ranks gather the sizes of all samples; what failed on one rank is raised on all.
        # 3. Every rank makes the same plans of all micro-batches from the same numbers.
        told: tuple[list[IntArray], RowKinds] | DataError
        try:
            read = [[self._collator.sample(item) for item in batch] for batch in islice(batches, self._micro_batches)]
            known = {*self._inputs, *PER_TOKEN, SECONDS}
            if unknown := {name for sample in chain(*read) for name in sample} - known:
                expected = f"only what encoders take ({', '.join(self._inputs)}) beside tokens"
                raise DataError(f"samples must hold {expected}, got {', '.join(sorted(unknown))}")
            tokens = [self._tokens(batch) for batch in read]
            state = self._source.state_dict() if hasattr(self._source, "state_dict") else None
            told = [self._sizes(batch) for batch in read], rows_of_images(chain(*read), self._inputs)
        except Exception as error:
            told = DataError(said(error))
        of_ranks, shapes = self._gather(told, number)
        if not any(of_ranks):
            return None
        nothing = np.zeros((len(self._told), 0), dtype=np.int64)
        per_batch = [
            [sizes[batch] if batch < len(sizes) else nothing for sizes in of_ranks]
            for batch in range(max(map(len, of_ranks)))
        ]
        # Weights change after the last micro-batch of a step: a short step is filled up with empty micro-batches.
        per_batch += [[nothing] * len(of_ranks)] * (self._micro_batches - len(per_batch))
        targets = sum(int(sizes[self._told.index("target_tokens")].sum()) for ranks in per_batch for sizes in ranks)
        # RearrangedModel multiplies by the ranks that share samples, and hosts average over all replicas.
        total = targets * self._num_ranks / len(self._ranks)
        missing = self._micro_batches - len(read)
        read, tokens = read + [[]] * missing, tokens + [self._tokens([])] * missing
        drawn = []
        for batch, (of_samples, samples, ranks) in enumerate(zip(tokens, read, per_batch, strict=True)):
            plan = self._plan([ranks[rank] for rank in self._sharing], total)
            inputs = {name: _pinned(rows) for name, rows in images_of(samples, shapes).items()}
            check = StepCheck(self._meeting, (number, batch), plan.digest)
            drawn.append(Drawn(_pinned(of_samples), inputs, plan, check))
        return drawn, state

    def _gather(
        self, told: tuple[list[IntArray], RowKinds] | DataError, step: int
    ) -> tuple[list[list[IntArray]], RowKinds]:
        """Sizes of the micro-batches of all ranks, each (len(told), samples), and the largest rows of inputs."""
        # A rank that has failed (a DataError in place of what it has drawn) or is at another step ends all ranks.
        own = told if isinstance(told, DataError) else (step, *told)
        gathered: list[Any] = gather(own, group=self._group)
        rows = []
        for rank, (at, _, shapes) in zip(self._ranks, gathered, strict=True):
            if at != gathered[0][0]:
                expected = f"stand at step {gathered[0][0]}, as on rank {self._ranks[0]}"
                raise ConfigError(f"rank {rank}: the loader must {expected}, got step {at}")
            rows += [(f"rank {rank}: ", name, shape) for name, shape in shapes.items()]
        return [sizes for _, sizes, _ in gathered], largest_rows(rows)

    def _plan(self, ranks: Sequence[IntArray], total_targets: float) -> StepPlan:
        source = np.repeat(np.arange(len(ranks)), [sizes.shape[1] for sizes in ranks])
        sizes = dict(zip(self._told, np.concatenate(ranks, axis=1), strict=True))
        plan = plan_step(source, sizes, len(ranks), self._costs, total_targets=total_targets)
        _ = plan.features, plan.imbalance, plan.digest  # cached in this thread, rather than when the model runs
        return plan

    def _sizes(self, samples: Sequence[Mapping[str, Tensor]]) -> IntArray:
        """All that is told of samples, (len(told), samples)."""
        rows = []
        for sample in samples:
            ids, found = sample["input_ids"], dict.fromkeys(self._told, 0)
            for kind, encoder in self._encoders.items():
                count, of_kind = int((ids == encoder.token_id).sum()), (*encoder.units(sample),)
                for what, value in zip(("units", "squared", "tokens"), (*of_kind, count), strict=True):
                    found[f"{encoder.phase}_{what}"] += value
                found[features_of(kind)] = count
                found |= {name: len(sample.get(name, ())) for name in encoder.takes}
            found |= {"llm_tokens": len(ids), "target_tokens": int((sample["labels"] != IGNORED).sum())}
            rows.append([*found.values()])
        return np.array(rows, dtype=np.int64).reshape(-1, len(self._told)).T

    def _tokens(self, samples: Sequence[Mapping[str, Tensor]]) -> Tensor:
        tokens = [torch.empty((0, 3 + self._collator.num_positions), dtype=torch.int64)]
        for sample in samples:
            ids = sample["input_ids"]
            types = next((sample[name] for name in TYPES if name in sample), torch.zeros_like(ids))
            tokens.append(torch.stack([ids, sample["labels"], types, *self._collator.positions(sample)], dim=1))
        return torch.cat(tokens)


def _costs_of(phases: Sequence[str], costs: Costs | None, *, padded: bool) -> Costs:
    """Costs of all phases: of encoders that nobody has weighed, their units."""
    costs = costs or Costs({})
    if surplus := costs.encoders.keys() - {*phases}:
        raise ConfigError(f"costs.encoders must name phases of {', '.join(phases)}, got {', '.join(sorted(surplus))}")
    method = costs.llm.method or ("padded" if padded else None)
    if (method == "padded") != padded:
        raise ConfigError(
            "costs.llm.method must be 'padded' under a RowCollator and another one under a PackCollator, got "
            f"{method!r} under a {'Row' if padded else 'Pack'}Collator"
        )
    encoders = {phase: costs.encoders.get(phase, PhaseCosts()) for phase in phases}
    return replace(costs, encoders=encoders, llm=replace(costs.llm, method=method))


def _pinned(tensor: Tensor) -> Tensor:
    # From pinned memory a GPU copies while the processor goes on.
    return tensor.pin_memory() if torch.cuda.is_available() else tensor


def counted_costs(
    model: Any,
    *,
    device: torch.device | None = None,
    group: dist.ProcessGroup | None = None,
    limits: PackLimits | None = None,
    recompute: Level = "none",
    phases_meet: bool = True,
    num_positions: int = 1,
) -> Costs:
    """What samples cost in seconds, counted, beside what it takes to exchange them, measured; all ranks together.

    Without a link on a CPU, whose seconds nobody has counted; default costs for a family whose layers nobody has
    counted.

    Args:
        model: A model of transformers, before it is wrapped or sharded.
        device: Where the model will train; by default where it is.
        group: The ranks that share samples; by default all.
        limits: The most units that a rank encodes, and the most tokens that its LLM gets.
        recompute: At which level layers run their backward passes.
        phases_meet: Whether ranks wait for each other between phases, as in ``Link``.
        num_positions: Rows of a token's positions.
    """
    device = device or next(model.parameters()).device
    on_gpu = device.type == "cuda"
    # The last encoder's units are what limits call vision units, whether it sees or, alone, hears.
    phases, tokens = known_phases(model), None if limits is None else limits.llm_tokens
    most: dict[str, int | None] = (
        {} if limits is None else {"sound": limits.sound_units, phases[-1]: limits.vision_units}
    )
    profile = counted_profile(model, device_name(device))
    if profile is None:
        return Costs({phase: PhaseCosts(limit=most.get(phase)) for phase in phases}, PhaseCosts(DEFAULT_COST, tokens))
    counted = sample_costs(profile, recompute=recompute)
    if "vision" not in phases:  # the projector belongs to the only encoder
        counted["sound"] += counted["vision"]
    # An encoder's units count as vision units, whichever they are.
    each = {phase: replace(cost, vision_units=cost.vision_units + cost.sound_units) for phase, cost in counted.items()}
    encoders = {phase: PhaseCosts(replace(each[phase], sound_units=0.0), most.get(phase)) for phase in phases}
    costs = Costs(encoders, PhaseCosts(counted["language"], tokens))
    if not on_gpu:
        return costs
    latency, speed = measured_link(group, device)
    return replace(costs, link=Link(latency, speed, **carried_bytes(model, num_positions), phases_meet=phases_meet))


def carried_bytes(model: Any, num_positions: int) -> dict[str, Any]:
    """The fields of ``Link`` in bytes, for a model of transformers."""
    config, layers, rows = model.config, {"vision": 1}, dict[str, Tensor]()
    for encoder in encoders_of(model).values():
        rows[encoder.phase] = encoder.blank()[encoder.takes[0]]
    unit = {phase: float(blank.nbytes / len(blank)) for phase, blank in rows.items()}
    if "vision" in rows:
        layers["vision"] += len(getattr(config.vision_config, "deepstack_visual_indexes", None) or ())
        if "sound" in rows:  # beside a ViT a unit is a position of a row, not the row
            unit["sound"] /= config.audio_config.max_source_positions
    features = config.get_text_config().hidden_size * device_and_dtype(model)[1].itemsize
    # Gradients of features travel if anything outside of the LLM and its head is trained.
    head = model.get_output_embeddings()
    modules = [model.model.language_model, *([] if head is None else [head])]
    language = {id(parameter) for module in modules for parameter in module.parameters()}
    comes_back = any(p.requires_grad and id(p) not in language for p in model.parameters())
    return {
        "unit_bytes": unit,
        "feature_bytes": {phase: float(features * layers.get(phase, 1) * (2 if comes_back else 1)) for phase in rows},
        "token_bytes": 8.0 * (3 + num_positions),
    }


def measured_link(group: dist.ProcessGroup | None, device: torch.device) -> tuple[float, float]:
    """Seconds of an all-to-all that brings next to nothing, and bytes a second of one that brings 16 MiB a rank."""
    # The slowest rank counts, so all ranks get the same numbers.
    ranks = dist.get_world_size(group)
    least, most = (_seconds(group, device, size) for size in (ranks, max(MEASURED_BYTES // ranks, 1) * ranks))
    found = torch.tensor([least, most], dtype=torch.float64, device=device)
    dist.all_reduce(found, op=dist.ReduceOp.MAX, group=group)
    latency, whole = found.tolist()
    # What a rank sends to itself travels through its memory alone.
    travels = MEASURED_BYTES * (ranks - 1) / ranks
    return latency, travels / max(whole - latency, 1e-9)


def _seconds(group: dist.ProcessGroup | None, device: torch.device, size: int) -> float:
    """Seconds of the fastest of several exchanges of ``size`` bytes."""
    sent = torch.zeros(size, dtype=torch.uint8, device=device)
    arrived, found = torch.empty_like(sent), []
    finish = torch.cuda.synchronize if device.type == "cuda" else lambda _: None
    for _ in range(RUNS):
        dist.all_reduce(torch.zeros(1, device=device), group=group)  # begin together
        finish(device)
        begun = time.perf_counter()
        dist.all_to_all_single(arrived, sent, group=group)
        finish(device)
        found.append(time.perf_counter() - begun)
    return min(found)
