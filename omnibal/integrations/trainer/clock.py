"""Times a trainer's steps: what they hold, how long the loader takes, how long ranks wait, the most memory."""

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any, Final, NamedTuple, Self, cast

import numpy as np
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from transformers import Trainer, TrainerCallback, TrainerState

from omnibal.errors import reporting
from omnibal.integrations.trainer.memory import GIB
from omnibal.packs.loading import PackSampler
from omnibal.passes import Mark, mark, seconds_between

WARM_UP: Final = 3  # steps that are not timed; behind the second one ``balance`` corrects what recomputes
WATCHED: Final = 2  # steps behind the timed ones, whose transfers torch's profiler notes where there are several ranks
LEAST_TIMED: Final = 3  # steps that are timed, however long they take
TALK: Final = "nccl|^gloo:"
"""Names of the transfers between ranks, on GPUs and between processes of a CPU."""


class Kernel(NamedTuple):
    """Work of a device, in seconds."""

    name: str
    begin: float
    end: float


class Timed(NamedTuple):
    """What one rank saw of the timed steps."""

    seconds: list[float]  # of each step
    loading: list[float]  # seconds of each step in which the rank asked its loader for batches
    held: list[tuple[float, ...]]  # samples, real tokens, tokens with padding, vision units of each step
    peak: float  # bytes, in all steps
    waited: float | None  # share of the watched steps


@dataclass(frozen=True)
class MeasuredWay:
    """What a way to train does on all ranks together, or why it could not be measured.

    Attributes:
        way: Its name.
        failed: What it ran into; all else is 0 then.
        steps: How many were timed.
        seconds: Of the timed steps together, each as long as on its slowest rank.
        samples, tokens, padded_tokens, vision_units: In the timed steps; ``tokens`` without padding.
        error: The standard error of the tokens a second of a step, as a share of their mean.
        peak_gib: Of the fullest rank, warm-up among it; None on a CPU.
        waited: The mean share of the time in which a rank's device ran nothing but transfers: it waited for other
            ranks, or for the transfer. None of one rank, and where torch's profiler sees no transfer.
        loading_seconds: A step's mean, on the rank that loads longest.
    """

    way: str
    failed: str | None = None
    steps: int = 0
    seconds: float = 0.0
    samples: int = 0
    tokens: int = 0
    padded_tokens: int = 0
    vision_units: int = 0
    error: float = 0.0
    peak_gib: float | None = None
    waited: float | None = None
    loading_seconds: float = 0.0

    @classmethod
    def of(cls, way: str, ranks: Sequence[Timed], sharing: int = 1) -> Self:
        """Put together what the ranks saw of the same steps; so many ranks share each batch."""
        seconds = np.array([rank.seconds for rank in ranks]).max(axis=0)
        held = np.array([rank.held for rank in ranks]).sum(axis=0) / sharing
        samples, tokens, padded, units = held.sum(axis=0).astype(int).tolist()
        rates, peak = held[:, 1] / seconds, max(rank.peak for rank in ranks)
        error = rates.std(ddof=1) / len(rates) ** 0.5 / rates.mean() if len(rates) > 1 else 0.0
        waited = [rank.waited for rank in ranks if rank.waited is not None]
        return cls(
            way,
            None,
            len(seconds),
            float(seconds.sum()),
            samples,
            tokens,
            padded,
            units,
            float(error),
            peak_gib=peak / GIB if peak else None,
            waited=sum(waited) / len(waited) if len(waited) == len(ranks) > 1 else None,
            loading_seconds=max(sum(rank.loading) for rank in ranks) / len(seconds),
        )

    @property
    def samples_per_second(self) -> float:
        """Samples that all ranks together train in a second."""
        return self.samples / self.seconds if self.seconds else 0.0

    @property
    def tokens_per_second(self) -> float:
        """Tokens that all ranks together train in a second; padding is not counted."""
        return self.tokens / self.seconds if self.seconds else 0.0

    @property
    def real_tokens(self) -> float:
        """The share of tokens that are no padding."""
        return self.tokens / self.padded_tokens if self.padded_tokens else 0.0


class Clock(TrainerCallback):  # type: ignore[misc]
    """Times some steps of a trainer behind its first ones, without changing its weights, and ends the training.

    Learning rates are 0: the optimizer works as ever, and weights stay.

    Args:
        trainer: Before training, as it is to be measured.
        steps: How many are timed.
        sampler: Of its packs, whose samples are counted without fillers; else batches are counted as they come.
        seconds: After which fewer steps than ``steps`` suffice; of one rank.
    """

    def __init__(self, trainer: Trainer, steps: int, sampler: PackSampler | None = None, seconds: float = inf) -> None:
        self._trainer, self._sampler = trainer, sampler
        self._steps, self._seconds, self._device = steps, seconds, trainer.args.device
        self.done = 0
        self._marks, self._begun = list[Mark](), 0.0
        self._held, self._loading = list[list[Any]](), list[float]()  # of each step
        self._peak, self._waited = 0, None if trainer.args.world_size == 1 else 0.0
        self._draw = trainer.get_batch_samples
        self._profile: Any = None
        vars(trainer)["get_batch_samples"] = self._load
        trainer.add_callback(self)

    @property
    def num_steps(self) -> int:
        """Steps of the training."""
        return WARM_UP + self._steps + (0 if self._waited is None else WATCHED)

    def _load(self, batches: Iterator[Any], *others: Any) -> Any:
        loading = _TimedIterator(batches)
        found = self._draw(loading, *others)
        self._loading.append(loading.seconds)
        self._held.append([sum(each) for each in zip(*map(held_by, found[0]), strict=True)] if found[0] else [0] * 4)
        return found

    def on_train_begin(self, args: Any, state: TrainerState, control: Any, **others: Any) -> None:
        """Begin anew to look for the most memory."""
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)

    def on_step_begin(self, args: Any, state: TrainerState, control: Any, **others: Any) -> None:
        """Let the optimizer leave weights as they are."""
        for group in cast(Any, self._trainer.optimizer).param_groups:  # a schedule sets it anew behind each step
            group["lr"] = torch.zeros_like(group["lr"]) if isinstance(group["lr"], Tensor) else 0.0

    def on_step_end(self, args: Any, state: TrainerState, control: Any, **others: Any) -> None:
        """Mark the time; begin or end what is measured."""
        self.done += 1
        if self._device.type == "cuda":  # Trainer's log may have begun anew
            self._peak = max(self._peak, torch.cuda.max_memory_allocated(self._device))
        if self._sampler is not None:
            self._held[-1][:2] = self._in_packs(state.global_step - 1)
        timed = self.done - WARM_UP
        if timed == 0:
            self._begun = perf_counter()
        if 0 <= timed <= self._steps:
            self._marks.append(mark(self._device))
        late = timed >= LEAST_TIMED and perf_counter() - self._begun > self._seconds
        if timed == self._steps and self._waited is not None:
            with reporting("measuring of transfers"):
                self._watch()
        control.should_training_stop |= late or self.done == self.num_steps
        if self.done == self.num_steps and self._waited is not None:
            self._waited = None
            with reporting("measuring of transfers"):
                self._waited = self._share_of_talk()

    def _in_packs(self, step: int) -> list[int]:
        """Samples of this rank in a step, and their tokens."""
        sampler = self._sampler
        assert sampler is not None, "the caller has one"
        packs = sampler.packs_of_all_ranks(step % sampler.num_steps)
        own = packs[sampler.rank * sampler.micro_batches :][: sampler.micro_batches]
        samples = [sample for pack in own for sample in pack]
        return [len(samples), int(sampler.lengths.llm_tokens[samples].sum())]

    def _watch(self) -> None:
        # Without the host's operators, which take long to note.
        kind = ProfilerActivity.CUDA if self._device.type == "cuda" else ProfilerActivity.CPU
        started = profile(activities=[kind])
        started.start()
        self._profile = started, perf_counter()

    def _share_of_talk(self) -> float | None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        watched, begun = self._profile
        seconds = perf_counter() - begun
        watched.stop()
        kernels = kernels_of(watched, self._device)
        talk = [kernel for kernel in kernels if re.search(TALK, kernel.name)]
        others = [kernel for kernel in kernels if not re.search(TALK, kernel.name)]
        return (busy_seconds(kernels) - busy_seconds(others)) / seconds if talk else None

    def timed(self) -> Timed:
        """What this rank saw; a training that others ended early has fewer steps."""
        pairs = zip(self._marks, self._marks[1:], strict=False)
        seconds = [seconds_between(begin, end) for begin, end in pairs]
        held = [tuple(map(float, each)) for each in self._held[WARM_UP:][: len(seconds)]]
        return Timed(seconds, self._loading[WARM_UP:][: len(seconds)], held, self._peak, self._waited)


class _TimedIterator(Iterator[Any]):
    def __init__(self, batches: Iterator[Any]) -> None:
        self._batches, self.seconds = batches, 0.0

    def __next__(self) -> Any:
        begin = perf_counter()
        try:
            return next(self._batches)
        finally:
            self.seconds += perf_counter() - begin


def held_by(batch: Any) -> tuple[Any, ...]:
    """Samples, real tokens, tokens with padding and vision units of a batch, as numbers or as tensors on its device."""
    ids, mask, positions, pixels = (
        batch.get(name) for name in ("input_ids", "attention_mask", "position_ids", "pixel_values")
    )
    is_packed = mask is None and positions is not None and len(ids) == 1
    # The first row of positions is that of the text, and begins anew with each sample.
    samples = (positions.reshape(-1, ids.shape[-1])[0] == 0).sum() if is_packed else len(ids)
    tokens = ids.numel() if mask is None else (mask != 0).sum()
    return samples, tokens, ids.numel(), 0 if pixels is None else len(pixels)


def busy_seconds(kernels: Iterable[Kernel]) -> float:
    """Seconds in which at least one kernel runs."""
    busy, until = 0.0, -inf
    for kernel in sorted(kernels, key=lambda kernel: kernel.begin):
        busy += max(kernel.end - max(kernel.begin, until), 0.0)
        until = max(until, kernel.end)
    return busy


def kernels_of(watched: profile, device: torch.device) -> list[Kernel]:
    """What torch's profiler saw a device do; of a CPU, torch's operators and transfers between processes."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        watched.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    kinds = ("cpu_op", "user_annotation") if device.type == "cpu" else ("kernel", "gpu_memcpy", "gpu_memset")
    return [
        Kernel(event["name"], event["ts"] / 1e6, (event["ts"] + event["dur"]) / 1e6)
        for event in events
        if event.get("cat") in kinds and (device.type != "cpu" or re.search(f"^aten::|{TALK}", event["name"]))
    ]
