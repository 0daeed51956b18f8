"""Times the passes of a trainer's first steps and corrects counted costs by them, so that the next run's promise holds.

``omnibal.profile.calibration`` fits the factors; this file, which needs torch, takes the times.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor
from transformers import Trainer, TrainerCallback, TrainerState

from omnibal.advise.wait import MEETINGS, CostByPhase, phase_costs
from omnibal.cost import Load
from omnibal.errors import ConfigError, reporting, said
from omnibal.families.base import encoder_layers
from omnibal.integrations.trainer.hooks import PacksCallback
from omnibal.integrations.trainer.settings import TrainerSettings, data_rank_of
from omnibal.integrations.trainer.steps import Gains
from omnibal.packs.collator import language_of
from omnibal.passes import Mark, device_name, mark, seconds_between
from omnibal.profile.calibration import MOST_PASSES, PARTS, STEPS, WARM_UP, Calibration, TimedPass, calibrate, sizes_of
from omnibal.profile.records import ModelProfile, every_layer
from omnibal.ranks import gather

FILE: Final = "omnibal_calibration.json"  # in a trainer's output_dir
_DOING: Final = "calibration of counted costs"


def measured_before(trainer: Trainer, settings: TrainerSettings) -> ModelProfile | None:
    """Costs that an earlier run left in ``output_dir``, read by rank 0 for all; None if none fit model and device."""
    path, found = Path(str(trainer.args.output_dir)) / FILE, None
    if trainer.is_world_process_zero() and settings.counted is not None and path.is_file():
        try:
            calibration = Calibration.load(path)
            if calibration.device != settings.device_name:
                raise ConfigError(f"device must be {calibration.device}, got {settings.device_name}")
            found = calibration.apply(settings.counted)
        except Exception as error:  # a run needs none of it
            print(f"omnibal: {path} is left alone: {said(error)}")
    return gather(found)[0]


class PassTimer:
    """Marks of each micro-batch's passes: forward and backward, where the LLM begins, where its gradient is known."""

    # No mark waits for the device. The parts are read off the LLM's call, whose input all encoders' work flows into.

    def __init__(self, model: Any, device: torch.device) -> None:
        language = language_of(model)
        assert language is not None, "callers look for it"
        self._device, self._now, self.marks = device, dict[str, Mark](), list[dict[str, Mark]]()
        self._handles = [
            model.register_forward_pre_hook(self._begin),
            language.register_forward_pre_hook(self._enter_language, with_kwargs=True),
            model.register_forward_hook(self._leave),
        ]

    def close(self) -> None:
        """Leave the model as it was."""
        for handle in self._handles:
            handle.remove()

    def _begin(self, module: Any, inputs: Any) -> None:
        self._now = {}
        if module.training and torch.is_grad_enabled():  # Trainer may evaluate within a step
            self.marks.append(self._now)
            self._mark(self._now, "begin")

    def _enter_language(self, module: Any, inputs: Any, options: Mapping[str, Any]) -> None:
        now, embedded = self._now, options.get("inputs_embeds")
        if "begin" in now and "language" not in now:  # recomputed layers run again in the backward pass
            self._mark(now, "language")
            if isinstance(embedded, Tensor) and embedded.requires_grad:
                embedded.register_hook(lambda gradient: self._mark(now, "vision backward"))  # type: ignore[no-untyped-call]

    def _leave(self, module: Any, inputs: Any, outputs: Any) -> None:
        now, found = self._now, outputs.values() if isinstance(outputs, Mapping) else outputs
        result = next((each for each in found if isinstance(each, Tensor) and each.requires_grad), None)
        if "begin" in now and result is not None:
            self._mark(now, "forward done")
            result.register_hook(lambda gradient: self._begin_backward(now))  # type: ignore[no-untyped-call]

    def _begin_backward(self, now: dict[str, Mark]) -> None:
        self._mark(now, "backward")
        # Autograd's engine calls it when all gradients of this backward pass are there, before DDP waits for its own
        # reductions, whose callback is queued later.
        torch.autograd.Variable._execution_engine.queue_callback(lambda: self._mark(now, "end"))  # type: ignore[attr-defined]

    def _mark(self, now: dict[str, Mark], name: str) -> None:
        with reporting(_DOING):
            now[name] = mark(self._device)


# The marks between which each of PARTS runs; without a gradient of the LLM's input the whole backward pass is its own.
_ENDS: Final = (
    ("begin", "language"),
    ("language", "forward done"),
    ("vision backward", "end"),
    ("backward", "vision backward"),
)


def passes_of(marks: Mapping[str, Mark], load: tuple[float, ...], profile: ModelProfile) -> list[TimedPass]:
    """The passes of a micro-batch, one for each of ``PARTS``, of 0 seconds where a mark is missing."""
    marks, border = {"vision backward": marks.get("end", 0.0), **marks}, encoder_layers(profile.layers)
    layers = {"vision": (0, border), "language": (border, len(profile.layers))}
    seconds = [seconds_between(marks[a], marks[b]) if a in marks and b in marks else 0.0 for a, b in _ENDS]
    return [
        TimedPass(layers[part.split()[0]], part.endswith("backward"), load, taken)
        for part, taken in zip(PARTS, seconds, strict=True)
    ]


class CalibratesCosts(TrainerCallback):  # type: ignore[misc]
    """Times steps 3 to 20, has the ranks share the times once, and says by how much the promise was off."""

    # Packs stay as they are: they depend on data and seed alone, not on how busy a machine was. The next run into the
    # same ``output_dir`` finds the costs there and promises by them. ``promise`` says what packs gain by given costs,
    # ``source`` where the costs of the first promise came from.

    def __init__(
        self,
        trainer: Trainer,
        counted: ModelProfile,
        packs: PacksCallback,
        promise: Callable[[CostByPhase | None], Gains],
        source: str,
    ) -> None:
        self._trainer, self._counted, self._packs = trainer, counted, packs
        self._promise, self._source = promise, source
        self._steps, self._timed = 0, list[tuple[dict[str, Mark], tuple[float, ...]]]()
        self._timer: PassTimer | None = None

    def on_step_begin(self, args: Any, state: TrainerState, control: Any, **others: Any) -> None:
        self._steps += 1
        if self._steps == WARM_UP + 1:
            with reporting(_DOING):
                model = self._trainer.accelerator.unwrap_model(self._trainer.model_wrapped)
                self._timer = PassTimer(model, args.device)

    def on_step_end(self, args: Any, state: TrainerState, control: Any, **others: Any) -> None:
        if self._timer is not None:
            with reporting(_DOING):
                marks, self._timer.marks = self._timer.marks, []
                loads = sizes_of(self._packs.held(state)[0][data_rank_of(self._trainer)[0]])
                if len(marks) == len(loads):
                    self._timed += zip(marks, loads, strict=True)
        if self._steps == STEPS:  # on all ranks, whatever one of them could not measure
            self._close()
            own = list[list[TimedPass]]()
            with reporting(_DOING):
                most = max(MOST_PASSES // (len(PARTS) * args.world_size), 1)
                kept = self._timed[:: max(-(-len(self._timed) // most), 1)]
                own = [passes_of(*each, self._counted) for each in kept]
            gathered = gather(own)
            with reporting(_DOING):
                self._calibrate(args, gathered)

    def on_train_end(self, args: Any, state: TrainerState, control: Any, **others: Any) -> None:
        """Leave the model as it was, however few steps there were."""
        self._close()

    def _close(self) -> None:
        if self._timer is not None:
            with reporting(_DOING):
                self._timer.close()
        self._timer = None

    def _calibrate(self, args: Any, gathered: Sequence[Sequence[Sequence[TimedPass]]]) -> None:
        passes = [each for of_rank in gathered for of_micro_batch in of_rank for each in of_micro_batch]
        if MEETINGS[self._packs.layout] == "phase":
            # Ranks begin and end these passes together: of each, that of the rank with most to do, as the others wait.
            counted = phase_costs(self._counted, recompute=self._packs.recompute)
            passes = [
                max(alike, key=lambda each: float(counted[part](Load(*each.load))))
                for of_ranks in zip(*gathered, strict=False)
                for part, alike in zip(PARTS, zip(*of_ranks, strict=True), strict=True)
            ]
        given = self._packs.recompute
        levels = every_layer(given, len(self._counted.layers)) if isinstance(given, str) else given
        found = calibrate(self._counted, passes, levels, device=device_name(args.device))
        if found is None:  # on all ranks alike: all fit the same passes
            return
        before, now = self._packs.costs, phase_costs(found.apply(self._counted), recompute=self._packs.recompute)
        self._packs.costs = now
        if not self._trainer.is_world_process_zero():
            return
        told = (
            f"omnibal: steps {WARM_UP + 1} to {STEPS} measured: {found}; promised {self._promise(before).whole:.2f}x "
            f"the samples a second of random batches, {self._source}; now {self._promise(now).whole:.2f}x, by the "
            "measured costs"
        )
        path = Path(str(args.output_dir)) / FILE
        try:
            path.write_text(found.line())
        except OSError as error:
            told += f"; {path} cannot be written: {error}"
        print(told)
