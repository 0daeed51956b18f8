"""Measures what each way to batch, and each saving, brings a trainer on its own machine: ``compare(make_trainer)``.

A few steps stand for an epoch: some that are spread evenly over it, behind its fullest batches.
"""

import gc
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from copy import copy, deepcopy
from functools import partial
from math import inf
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import Any, Final, Literal

import numpy as np
import torch
from accelerate.state import AcceleratorState
from transformers import DefaultFlowCallback, Trainer
from transformers.trainer_pt_utils import LengthGroupedSampler

from omnibal.cost import Load
from omnibal.data.lengths import IntArray, SampleLengths
from omnibal.data.packs import Packs
from omnibal.errors import InfeasibleError, OmnibalError, integer, missing_extra, reporting
from omnibal.feeds.sources import is_indexed
from omnibal.integrations.lengths import LENGTHS, kept_lengths
from omnibal.integrations.trainer.clock import WARM_UP, WATCHED, Clock, MeasuredWay, Timed
from omnibal.integrations.trainer.memory import FULL, is_full
from omnibal.integrations.trainer.settings import batch_size_of, data_rank_of, model_of
from omnibal.packs.collator import PackCollator
from omnibal.packs.loading import PackSampler
from omnibal.ranks import gather, rank_and_size

GROUPED: Final = "group_by_length"
MOST_LOOKED_AT: Final = 512  # steps of packs among which the fullest pack is looked for
Way = None | Literal["group_by_length"] | Mapping[str, Any] | Callable[[Trainer], Any]
"""None to train as a trainer does, a sampling strategy of transformers, options of ``balance``, or what is called with
the trainer and may return the sampler of its packs."""
Balance = Callable[..., PackSampler]
"""``balance`` itself, whose module imports this one."""
PLAIN: Final = MappingProxyType({"recompute": "as_is", "head": "all"})
"""Options of ``balance`` that leave its savings out."""
WAYS: Final[Mapping[str, Way]] = MappingProxyType(
    {
        "as today": None,
        GROUPED: GROUPED,
        "packs": PLAIN,
        "packs, savings": {},
        "packs, compiled": {"compile": True},
    }
)
QUIET: Final = {
    "save_strategy": "no", "eval_strategy": "no", "logging_strategy": "no", "eval_on_start": False, "report_to": [],
    "push_to_hub": False, "load_best_model_at_end": False, "enable_jit_checkpoint": False, "disable_tqdm": True,
}  # fmt: skip
"""Settings of a trainer that saves, evaluates and reports nothing."""


def compare_ways(
    make_trainer: Callable[[], Trainer],
    balance: Balance,
    steps: int,
    *,
    ways: Mapping[str, Way],
    lengths: SampleLengths | None,
    picture: str | Path | None,
) -> list[MeasuredWay]:
    """What ``omnibal.integrations.transformers.compare`` documents, with its ``balance``."""
    from omnibal.report.compare import draw, show

    integer("steps", steps, 1)
    found = list[MeasuredWay]()
    for name, way in ways.items():
        with TemporaryDirectory(prefix="omnibal_compare") as folder, _accelerate_afresh():
            trainer = make_trainer()
            if lengths is None and not found:
                lengths = _lengths(trainer)
            found.append(measure(trainer, name, way, steps, Path(folder), balance=balance, lengths=lengths))
        del trainer
        if rank_and_size()[0] == 0:  # where the run ends before its table, this is what there is
            print(f"omnibal: {name}: {found[-1].failed or f'{found[-1].tokens_per_second:,.0f} tokens/s'}")
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    if rank_and_size()[0] == 0:
        with reporting("showing of what was compared"):
            show(found)
            if picture is not None:
                _draw(partial(draw, found), Path(picture))
    return found


def measure(
    trainer: Trainer,
    name: str,
    way: Way,
    steps: int,
    folder: Path,
    *,
    balance: Balance,
    lengths: SampleLengths | None,
    seconds: float = inf,
) -> MeasuredWay:
    """What one way does, on all ranks together.

    Args:
        trainer: A new one; it cannot train afterwards.
        name: What the way is called.
        way: What is done to the trainer.
        steps: How many steps are timed.
        folder: Takes the place of the trainer's output folder.
        lengths: Of every sample; None where they are not known, and the first steps stand for all.
        seconds: After which fewer steps suffice; of one rank.
    """
    failed, own, clock = None, None, None
    num_ranks = rank_and_size()[1]
    with _as_it_was(trainer):
        try:
            _quieten(trainer, folder)
            sampler = begin(trainer, way, steps, balance=balance, lengths=lengths)
            clock = Clock(trainer, steps, sampler, seconds)
            trainer.args.max_steps = clock.num_steps
            trainer.train()
            own = clock.timed()
        except Exception as error:
            if isinstance(error, OmnibalError) or type(error).__module__.startswith("torch._dynamo"):  # on all alike
                failed = _said(error)
            elif not (num_ranks == 1 or is_full(error)):
                raise
            elif num_ranks > 1 and clock is not None and clock.done >= WARM_UP:
                raise InfeasibleError(
                    f"{name} must fit on all ranks, got {FULL} behind its first steps on rank {rank_and_size()[0]} "
                    f"alone; measure it with smaller batches: compare(make_trainer, ways=...)"
                ) from error
            else:
                failed = _said(error)
                if not is_full(error):
                    traceback.print_exc()
    if own is not None and len(own.seconds) < (1 if seconds < inf else steps):
        failed = f"its training ended after {len(own.seconds)} of {steps} steps"
    answers: Sequence[tuple[str | None, Timed | None]] = gather((failed, own))
    reasons = [f"{reason}{f' (rank {rank})' * (num_ranks > 1)}" for rank, (reason, _) in enumerate(answers) if reason]
    if reasons:
        return MeasuredWay(name, reasons[0])
    return MeasuredWay.of(name, [each for _, each in answers if each], trainer.get_tp_size())


def _said(error: Exception) -> str:
    text = str(error).strip().splitlines()[0] if str(error).strip() else ""
    if is_full(error) and not isinstance(error, OmnibalError):
        return f"{FULL}: {text[:150]}"
    return text if isinstance(error, OmnibalError) else f"{type(error).__name__}: {text[:400]}"


@contextmanager
def _accelerate_afresh() -> Iterator[None]:
    """Let Accelerate, which has one state for all Accelerators, make another one for the same arguments."""
    before = dict(AcceleratorState._shared_state)
    AcceleratorState._shared_state.clear()
    try:
        yield
    finally:
        AcceleratorState._shared_state.clear()
        AcceleratorState._shared_state.update(before)


@contextmanager
def _as_it_was(trainer: Any) -> Iterator[None]:
    """Leave nothing of a training behind: neither on the device nor in settings that the next trainer may share."""
    config = trainer.accelerator.state.deepspeed_plugin.deepspeed_config if trainer.is_deepspeed_enabled else {}
    before = deepcopy(config)
    try:
        yield
    finally:
        config.clear()
        config.update(before)
        trainer.model.zero_grad()
        trainer.optimizer = trainer.lr_scheduler = None
        trainer.accelerator.free_memory()


def _quieten(trainer: Any, folder: Path) -> None:
    """Let a trainer save, evaluate and report nothing; the arguments that the user holds stay."""
    trainer.args = copy(trainer.args)
    for name, value in {**QUIET, "output_dir": str(folder)}.items():
        kind: Any = type(getattr(trainer.args, name, value))
        setattr(trainer.args, name, kind(value) if isinstance(value, str) else value)
    handler = trainer.callback_handler
    handler.callbacks = [
        each
        for each in handler.callbacks
        if isinstance(each, DefaultFlowCallback) or not type(each).__module__.startswith("transformers.")
    ]


def _lengths(trainer: Any) -> SampleLengths | None:
    """Lengths of the trainer's samples, found or measured but not kept; None where packs cannot be made of them."""
    dataset, args = trainer.train_dataset, trainer.args
    if not all(gather(is_indexed(dataset) and not isinstance(dataset, Mapping))):
        return None
    with suppress(OmnibalError):  # which ``balance`` explains; on all ranks alike
        collator = PackCollator.of(model_of(trainer), trainer.data_collator)
        where, workers = Path(str(args.output_dir)) / LENGTHS, args.dataloader_num_workers
        return kept_lengths(collator, dataset, where, saves=False, num_workers=workers)[0]
    return None


def begin(trainer: Any, way: Way, steps: int, *, balance: Balance, lengths: SampleLengths | None) -> PackSampler | None:
    """Let a trainer train in a way, from the fullest batches on; the sampler of its packs, if they are packs."""
    if isinstance(way, Mapping):
        trainer.args.train_sampling_strategy = "random"  # packs take the place of any strategy
        sampler = balance(trainer, **{"lengths": lengths, **way})
        spread_packs(sampler)
        return sampler
    if callable(way):
        found = way(trainer)
        return found if isinstance(found, PackSampler) else None
    if way is not None:
        trainer.args.train_sampling_strategy = way
    spread_batches(trainer, steps + WATCHED, lengths)
    return None


def _draw(drawing: Callable[[Path], None], path: Path) -> None:
    try:
        drawing(path)
        print(f"drawn: {path}")
    except ModuleNotFoundError as error:
        print(f"no picture: {missing_extra('matplotlib') if error.name == 'matplotlib' else error}")


def spread(count: int) -> list[int]:
    """All numbers below a count, so that the first of them, however many, are spread evenly.

    >>> spread(5)
    [0, 4, 2, 1, 3]
    """
    bits = max(count - 1, 0).bit_length()
    order = [int(f"{number:0{bits}b}"[::-1], 2) if bits else 0 for number in range(2**bits)]
    return [number for number in order if number < count]


def spread_packs(sampler: PackSampler) -> None:
    """Let a sampler's first steps be its fullest packs, on all ranks alike, and the others be spread over its epoch."""
    # Ranks then run out of memory together, if they do: one alone would leave the others waiting for it. A single rank
    # has the fullest pack last in each of these steps, beside gradients, and others before it, as that takes less time.
    planned, dealt, turns = sampler.step_packs, sampler.packs_of_step, spread(sampler.num_steps)
    looked = turns[:MOST_LOOKED_AT]
    loads = Load.stack([sampler.load(number) for number in looked])
    size, warm_up = sampler.num_replicas * sampler.micro_batches, list[Packs]()
    for step, fullest in enumerate(_fullest(loads.llm_tokens, loads.vision_units)):
        place, number = divmod(fullest, size)
        pack = dealt(looked[place])[number].tolist()
        others = (
            [each.tolist() for each in dealt(turns[step % len(turns)])] if sampler.num_replicas == 1 else [pack] * size
        )
        warm_up.append(Packs.from_lists([*others[:-1], pack]))

    def turn_of(step: int) -> int:
        """Which step of the epoch has its turn; negative for the first ones."""
        behind = step - WARM_UP if sampler.epoch == 0 else step
        return behind if behind < 0 else turns[behind % len(turns)]

    def step_packs(step: int) -> Packs:
        turn = turn_of(step)
        return warm_up[turn] if turn < 0 else planned(turn)

    def packs_of_step(step: int) -> Packs:
        turn = turn_of(step)
        return warm_up[turn] if turn < 0 else dealt(step)

    step_of = partial(sampler.step_without, samples=())
    vars(sampler).update(step_packs=step_packs, packs_of_step=packs_of_step, step=step_of)


def spread_batches(trainer: Any, steps: int, lengths: SampleLengths | None) -> None:
    """Let a trainer train batches that its own sampler makes, but steps of them that are spread over an epoch."""
    # The fullest batches come first, on all ranks alike. A trainer with a loader of its own, or whose lengths are not
    # known, begins its epoch as it would.
    args, strategy = trainer.args, trainer.args.train_sampling_strategy
    is_own = type(trainer).get_train_dataloader is Trainer.get_train_dataloader
    if lengths is None or not is_own or strategy == "batch_rebalance":  # whose sampler gives batches
        return
    num_replicas = data_rank_of(trainer)[1]
    size = batch_size_of(trainer, num_replicas) * max(args.n_gpu, 1)
    order: list[int] | None = None
    if rank_and_size()[0] == 0:  # others may draw in another order
        own: Iterable[int] = (
            trainer._get_train_sampler(trainer.train_dataset)
            if strategy != GROUPED
            else (
                LengthGroupedSampler(
                    args.train_batch_size * args.gradient_accumulation_steps, lengths=lengths.llm_tokens.tolist()
                )
            )
        )
        epoch = np.fromiter(own, np.int64)
        order = _ordered(epoch, lengths, (args.gradient_accumulation_steps, num_replicas, size), steps)
    order = gather(order)[0]
    if order:
        vars(trainer)["_get_train_sampler"] = lambda *arguments, **others: order


def _ordered(epoch: IntArray, lengths: SampleLengths, shape: tuple[int, int, int], steps: int) -> list[int]:
    """Samples of the fullest batches, once for each rank, and then of steps spread over an epoch.

    Args:
        epoch: Samples in the order of an epoch.
        shape: Micro-batches, ranks, samples of a micro-batch: as Accelerate deals an order.
        steps: How many follow the fullest ones at least.
    """
    whole = epoch[: len(epoch) // np.prod(shape) * np.prod(shape)]
    if not len(whole):  # fewer samples than a step has
        return []
    of_steps, batches = whole.reshape(-1, *shape), whole.reshape(-1, shape[-1])
    padded, units = lengths.llm_tokens[batches].max(axis=1), lengths.vision_units[batches].sum(axis=1)
    # DDP may need gradients of an encoder in every step.
    fullest = _fullest(np.where((units > 0) | ~units.any(), padded, 0), units)
    turns, warm_up = spread(len(of_steps)), list[IntArray]()
    for step, number in enumerate(fullest):
        warm_up.append(np.broadcast_to(batches[number], shape).copy())
        if shape[1] == 1:  # see ``spread_packs``
            warm_up[-1][:-1] = of_steps[turns[step % len(turns)]][:-1]
    timed = [of_steps[turns[number % len(turns)]] for number in range(steps)]
    return [int(sample) for step in (*warm_up, *timed) for sample in step.flat]


def _fullest(tokens: Any, vision_units: Any) -> list[int]:
    """Places of the micro-batches with most tokens and with most vision units, for the first steps in turn."""
    return [int(np.argmax((tokens, vision_units)[step % 2])) for step in range(WARM_UP)]
