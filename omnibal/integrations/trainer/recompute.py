"""Frees layers of a Trainer's model from recomputation, as many as the device can hold beside the fullest pack.

Limits bound every pack of a run, so its peak is known beforehand. transformers' layers recompute by a flag of their
own, ``gradient_checkpointing``: a layer without it keeps its activations, and nothing else changes.
"""

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import wraps
from typing import Any, Final, Literal

import torch
from transformers import PreTrainedModel, Trainer, TrainerCallback, TrainerState
from transformers.modeling_layers import GradientCheckpointingLayer

from omnibal.advise.memory import Filling, RankMemory, Word, free_levels
from omnibal.advise.wait import phase_costs
from omnibal.data.lengths import SampleLengths
from omnibal.data.limits import PackLimits, fullest_load
from omnibal.errors import ConfigError, reporting
from omnibal.integrations.trainer.hooks import PacksCallback
from omnibal.integrations.trainer.memory import GIB, is_full
from omnibal.integrations.trainer.settings import TrainerSettings, data_rank_of, model_of, wraps_layers
from omnibal.integrations.trainer.steps import module_of
from omnibal.packs.collator import without_adapters
from omnibal.profile.calibration import WARM_UP
from omnibal.profile.records import Level, ModelProfile, levels_from_words, levels_in_words
from omnibal.ranks import gather

Recompute = Literal["fill", "as_is"] | Mapping[str, Word]
PARTS: Final = ("vision", "sound", "language")
WORDS: Final = ("fill", "none", "full")
FLOAT32_SHARE: Final = 2.0  # bytes of activations over those in 16 bits, if all of them were float32
NORMS_SHARE: Final = 1.25  # the same where autocast has norms of 16-bit layers put out float32
FLAG: Final = "gradient_checkpointing"  # of transformers' layers
NAME: Final = "omnibal.FillsMemory"  # in Trainer's checkpoints
_DOING: Final = "measuring of memory"
REMEDY: Final = (
    'omnibal freed layers from gradient checkpointing: balance(trainer, recompute="as_is") frees none, a smaller '
    "memory_gib= fewer"
)


def may_fill(settings: TrainerSettings, recompute: Any) -> bool:
    """Whether layers may be freed from recomputation; words that ``recompute`` does not know are refused."""
    if isinstance(recompute, Mapping):
        for part, word in recompute.items():
            if part not in PARTS:
                raise ConfigError(f"recompute must name parts of {', '.join(PARTS)}, got {part!r}")
            if word not in WORDS:
                raise ConfigError(f"recompute[{part!r}] must be one of {', '.join(WORDS)}, got {word!r}")
        if settings.recompute == "none":
            raise ConfigError("gradient_checkpointing must be True to choose what recomputes, got False")
    elif recompute not in ("fill", "as_is"):
        raise ConfigError(f'recompute must be "fill", "as_is" or a word for each part, got {recompute!r}')
    return settings.recompute == "full" and recompute != "as_is"


def flagged_layers(model: Any, profile: ModelProfile) -> dict[int, Any]:
    """The modules that recompute by a flag of their own, by their layer's number in the profile."""
    flagged, blocks = dict[str, list[Any]](), dict[str, list[int]]()
    for name, module in without_adapters(model).named_modules():
        if isinstance(module, GradientCheckpointingLayer):
            flagged.setdefault(module_of(name), []).append(module)
    for index, layer in enumerate(profile.layers):
        if layer.kind.endswith("_block"):
            blocks.setdefault(layer.module, []).append(index)
    found = dict[int, Any]()
    for part, indices in blocks.items():
        modules = flagged.get(part, [])
        if len(modules) >= len(indices):  # LLaVA takes features before its ViT's last layer
            found |= zip(indices, modules, strict=False)
    return found


@dataclass(frozen=True)
class LayerChoice(Filling):
    """What may be chosen of a model's recomputation."""

    flagged: tuple[int, ...]
    """Layers of the profile that recompute by a flag of their own."""

    @classmethod
    def of(
        cls,
        trainer: Trainer,
        settings: TrainerSettings,
        recompute: Recompute,
        costs: ModelProfile | None,
        memory: RankMemory | None,
    ) -> tuple["LayerChoice | None", list[str]]:
        """What may be chosen, or None; and why recomputation stays as it is, where that is to be said."""
        counted, words = settings.counted, recompute if isinstance(recompute, Mapping) else dict[str, Word]()
        if not may_fill(settings, recompute):
            return None, []
        flagged = {} if counted is None else flagged_layers(settings.model, counted)
        why = _left_alone(trainer, settings.model, counted, flagged)
        if why is not None or counted is None or costs is None:
            return None, [f"recomputation stays as it is: {why}"]
        lacking = [part for part in words if part not in {counted.layers[index].module for index in flagged}]
        if lacking:
            raise ConfigError(f"recompute must name parts whose layers have a flag, got {lacking[0]!r}")
        if memory is None and not words:
            return None, []
        given = free_levels(counted, flagged, _with_uncounted(settings.model, counted, words))
        if memory is not None and not trainer.is_deepspeed_enabled:
            memory = _under_autocast(memory, trainer.accelerator.mixed_precision)
        return cls(given, memory, costs, tuple(flagged)), []

    def told(
        self, lengths: SampleLengths, limits: PackLimits, memory: RankMemory | None, *, spare_bytes: float = 0
    ) -> str:
        """What recomputes, what that leaves, and what it brings, in words."""
        levels = self.levels(memory)
        again = [index for index in self.flagged if levels[index] == "full"]
        told = f"{len(again)} of {len(self.flagged)} layers recompute"
        if memory is not None:
            peak = float(memory.peak_bytes(fullest_load(lengths, limits))) - spare_bytes
            told += f"; {peak / GIB:.1f} of {memory.budget_bytes / GIB:.1f} GiB for the fullest pack, computed"
        every = self.seconds(lengths, ["full" if index in self.flagged else "none" for index in range(len(levels))])
        return f"{told}; expected {every / self.seconds(lengths, levels):.2f}x as fast as recomputing all"

    def apply(self, memory: RankMemory | None, model: Any) -> None:
        """Set the flags of a model's layers, and let encoders that train nothing run without gradients."""
        levels = self.levels(memory)
        for index, module in flagged_layers(model, self.costs).items():
            module.gradient_checkpointing = levels[index] == "full"
        for hooks, number, _ in _requiring_hooks(model):
            del hooks[number]


def _left_alone(trainer: Trainer, model: Any, counted: ModelProfile | None, flagged: Collection[int]) -> str | None:
    """Why nothing is chosen of a model's recomputation; None where something is."""
    if wraps_layers(trainer):
        return "FSDP's own activation_checkpointing wraps layers"
    if counted is None:
        return f"layers of {type(model).__name__} are not counted"
    if not flagged:
        return "the model's layers have no flag of their own"
    configs = [part.config for part in without_adapters(model).modules() if isinstance(part, PreTrainedModel)]
    if any(getattr(config, "_attn_implementation", None) == "eager" for config in configs):
        return "eager attention keeps scores, which are not counted"
    return None


def _under_autocast(memory: RankMemory, mixed_precision: str | None) -> RankMemory:
    """Count activations with a margin where some of them are in float32; the second step measures them."""
    if mixed_precision in (None, "no"):
        return memory
    factor = FLOAT32_SHARE if memory.precision.autocast else NORMS_SHARE
    layers = tuple(
        replace(layer, saved_bytes={level: cost * factor for level, cost in layer.saved_bytes.items()})
        for layer in memory.profile.layers
    )
    return replace(memory, profile=replace(memory.profile, layers=layers))


def _with_uncounted(model: Any, counted: ModelProfile, words: Mapping[str, Word]) -> Mapping[str, Word]:
    """The words, and "full" for parts that train without being counted so: adapters in an encoder are not counted."""
    trained = {module_of(name) for name, weight in model.named_parameters() if weight.requires_grad}
    reached = {layer.module for layer, is_reached in zip(counted.layers, counted.reached, strict=True) if is_reached}
    uncounted: dict[str, Word] = {part: "full" for part in PARTS if part in trained - reached}
    return uncounted | dict(words)


def _requiring_hooks(model: Any) -> list[tuple[dict[int, Any], int, Any]]:
    """Hooks by which encoders that train nothing run with gradients: a module's hooks, the number of one, and it."""
    # Gradient checkpointing in transformers has the embeddings of all parts put out what requires a gradient, for
    # layers that recompute reentrantly; a frozen ViT then runs forward twice and backward once. Without these hooks
    # nothing is kept or recomputed there, and no pass goes back.
    base = without_adapters(model)
    trained = {module_of(name) for name, parameter in base.named_parameters() if parameter.requires_grad}
    return [
        (module._forward_hooks, number, hook)
        for name, module in base.named_modules()
        if module_of(name) in ("vision", "sound") and module_of(name) not in trained
        for number, hook in module._forward_hooks.items()
        if getattr(hook, "__name__", "").startswith("make_inputs_require_grad")
    ]


@contextmanager
def _left_as_given(model: Any) -> Iterator[None]:
    """Give a model the flags and hooks back that it had, however the block ends."""
    flags = [(module, module.gradient_checkpointing) for module in model.modules() if hasattr(module, FLAG)]
    hooks = _requiring_hooks(model)
    try:
        yield
    finally:
        for module, flag in flags:
            setattr(module, FLAG, flag)
        for held, number, hook in hooks:
            held.setdefault(number, hook)


class FillsMemory(TrainerCallback):  # type: ignore[misc]
    """Sets layers' flags while a trainer trains, keeps the choice in checkpoints, and corrects it once, as measured."""

    # Results do not depend on the choice, so that a run may go on with another one.

    def __init__(self, trainer: Trainer, choice: LayerChoice, packs: PacksCallback) -> None:
        self._trainer, self._choice, self._packs = trainer, choice, packs
        self._lengths, self._limits = packs.sampler.lengths, packs.sampler.limits
        self._memory = choice.chosen(self._lengths, self._limits)
        self._tell_packs()
        self._steps, self._spare = 0, 0.0
        train = trainer.train

        @wraps(train)
        def explained(*args: Any, **options: Any) -> Any:
            with _left_as_given(model_of(trainer)):
                try:
                    return train(*args, **options)
                except Exception as error:
                    if is_full(error):
                        error.add_note(REMEDY)  # below the traceback
                    raise

        vars(trainer)["train"] = explained

    @property
    def levels(self) -> tuple[Level, ...]:
        return self._choice.levels(self._memory)

    def on_train_begin(self, args: Any, state: TrainerState, control: Any, **others: Any) -> None:
        """Take the choice of a checkpoint that fits, and set flags: Trainer has set all by now."""
        self._steps = 0
        kept: Any = state.stateful_callbacks
        found = gather(kept.get(NAME) if state.global_step else None)[0]  # each host may have files of its own
        if found is not None and self._memory is not None:
            self._go_on(found)
        self._use()
        self._keep(state)

    def _go_on(self, kept: Mapping[str, Any]) -> None:
        levels, spare = levels_from_words(kept["recompute"]), float(kept["spare_bytes"])
        is_alike = len(levels) == len(self._choice.given) and all(
            given in (None, level) for given, level in zip(self._choice.given, levels, strict=True)
        )
        if self._memory is None or not is_alike:
            return
        tried = replace(self._memory, recompute=levels)
        if tried.peak_bytes(fullest_load(self._lengths, self._limits)) <= tried.budget_bytes + spare:
            self._memory, self._spare = tried, spare
        else:
            self._say(f"the checkpoint's recomputation does not fit: {self.told}")

    def on_step_begin(self, args: Any, state: TrainerState, control: Any, **others: Any) -> None:
        self._steps += 1
        if self._steps == WARM_UP:  # the optimizer's state is there from the second step on
            with reporting(_DOING):
                begin_peak(args.device)

    def on_step_end(self, args: Any, state: TrainerState, control: Any, **others: Any) -> None:
        """Choose again, once, by the peak of the second step; all ranks together."""
        if self._steps != WARM_UP or self._memory is None:
            return
        own: float | None = None
        with reporting(_DOING):
            own = self._spare_bytes(args.device, state)
        found = gather(own)
        spares = [spare for spare in found if spare is not None]
        if len(spares) < len(found):
            return
        before, self._spare = self.levels, min(spares)
        self._memory = self._choice.chosen(self._lengths, self._limits, spare_bytes=self._spare)
        self._keep(state)
        if self.levels != before:
            self._use()
            self._say(
                f"step {WARM_UP} had {abs(self._spare) / GIB:.1f} GiB {'more' if self._spare > 0 else 'less'} to spare "
                f"than counted: {self.told}"
            )

    def _spare_bytes(self, device: torch.device, state: TrainerState) -> float | None:
        """What the device has beyond what is counted for the fullest pack, by this rank's peak in the step."""
        measured, memory = peak_of(device), self._memory
        if measured is None or memory is None:
            return None
        # The peak is of tensors, without what a process holds beside them.
        loads = self._packs.held(state)[0][data_rank_of(self._trainer)[0]]
        counted, overhead = float(memory.peak_bytes(loads).max()), memory.cluster.overhead_bytes
        spare = counted - overhead - measured
        if spare >= 0:
            return spare
        # All that is missing is laid to activations, of which the fullest pack has more.
        activations, room = counted - memory.state_bytes, memory.budget_bytes - memory.state_bytes
        return room * spare / (activations - spare)

    @property
    def told(self) -> str:
        return self._choice.told(self._lengths, self._limits, self._memory, spare_bytes=self._spare)

    def _use(self) -> None:
        self._choice.apply(self._memory, model_of(self._trainer))
        self._tell_packs()

    def _tell_packs(self) -> None:
        self._packs.recompute = self.levels
        self._packs.costs = phase_costs(self._choice.costs, recompute=self.levels)

    def _keep(self, state: TrainerState) -> None:
        # Not under the callback's own name: Trainer makes callbacks anew of what it finds under their names.
        kept: Any = state.stateful_callbacks
        kept[NAME] = {"recompute": levels_in_words(self.levels), "spare_bytes": self._spare}

    def _say(self, told: str) -> None:
        if self._trainer.is_world_process_zero():
            print(f"omnibal: {told}")


def begin_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def peak_of(device: torch.device) -> int | None:
    """Bytes of tensors at the peak since ``begin_peak``; None where nobody counts them."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
