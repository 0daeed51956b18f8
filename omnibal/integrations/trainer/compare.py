"""Measures what each way to batch, and each saving, brings a trainer on its own machine: ``compare(make_trainer)``."""

import gc
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from copy import copy, deepcopy
from functools import partial
from math import inf
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import Any, Final, Literal

import torch
from accelerate.state import AcceleratorState
from transformers import DefaultFlowCallback, Trainer

from omnibal.data.lengths import SampleLengths
from omnibal.errors import InfeasibleError, OmnibalError, integer, missing_extra, reporting
from omnibal.feeds.sources import is_indexed
from omnibal.integrations.lengths import LENGTHS, kept_lengths
from omnibal.integrations.trainer.clock import WARM_UP, WATCHED, Clock, MeasuredWay, Timed
from omnibal.integrations.trainer.memory import FULL, is_full
from omnibal.integrations.trainer.settings import model_of
from omnibal.integrations.trainer.spread import GROUPED, spread_batches, spread_packs
from omnibal.packs.collator import PackCollator
from omnibal.packs.loading import PackSampler
from omnibal.ranks import gather, rank_and_size

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
