"""What somebody asks: their data, model, machines and present way of training, and what balancing would bring them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from omnibal.advise.changes import MOST_SCALED, SAME_STEP, Advice, advise
from omnibal.advise.estimate import Recipe, Scenario
from omnibal.advise.measuring import MeasuredLengths, measure
from omnibal.advise.models import Model, adapted_profile, read_model
from omnibal.advise.paste import offered_by
from omnibal.advise.present import Present
from omnibal.cluster import Cluster
from omnibal.data.limits import MOST, PackLimits
from omnibal.device import Device
from omnibal.errors import ConfigError, InfeasibleError
from omnibal.profile.calibration import Calibration
from omnibal.profile.counted import analytic_profile
from omnibal.profile.records import Level, ModelProfile

if TYPE_CHECKING:
    from omnibal.advise.layouts import LayoutAnswer

# Where nothing is said: the rank of adapters, samples of a micro-batch, micro-batches of a rank's step.
LORA_RANK: Final = 16
BATCH: Final = 1
ACCUMULATION: Final = 8
MEASURED: Final = "tensor ranks must have costs that are counted of the model, got costs of one device"


@dataclass(frozen=True, eq=False)
class Question:
    """All that an answer depends on."""

    measured: MeasuredLengths  # lengths of the data, and where they come from
    model: Model  # sizes of the model
    cluster: Cluster  # the machines; every device is a rank
    present: Present  # how the machines are used today
    costs: ModelProfile | None = None  # what layers cost by measurement; None to count it
    data: str = "data"  # what the data is called
    model_path: str = "FOLDER"  # the model's folder; FOLDER where a known name is all that was given

    def __post_init__(self) -> None:
        if self.present.batching == "packed" and self.present.cutoff is None:
            raise ConfigError("cutoff must say how many tokens a pack holds, got none")
        costs, lora = self.costs, self.present.lora
        if costs is None:
            return
        if not costs.is_of(self.cluster.device):
            raise ConfigError(f"profile must be of {self.cluster.device.name}, got one of {costs.device}")
        if lora and not costs.adapter_parameters:
            raise ConfigError("profile must be of adapters where LoRA is trained, got one without any")
        if not lora:
            costs.check_matches(records=self.model.records, frozen=self.present.frozen or ())

    @classmethod
    def read(
        cls,
        data: Path | Sequence[Path],
        cluster: Cluster,
        present: Present,
        *,
        model: str | None = None,
        images: Path | None = None,
        max_image: int | None = None,
        costs: ModelProfile | Calibration | None = None,
    ) -> Question:
        """Read data and model; a thousand samples are drawn where data is not measured yet. No torch is loaded.

        Args:
            data: Annotations, lengths or a stream, as ``omnibal.advise.measuring.measure`` takes them.
            cluster: The machines.
            present: How they are used today, as ``read_today`` reads it.
            model: A known name, a Hugging Face folder, or a config.json; by default what ``present`` names.
            images: What the paths of images are relative to; by default the folder of the data.
            max_image: Most tiles of an image, or most pixels at native resolution.
            costs: What layers cost by measurement, or by what a run's first steps make of counted costs.

        Raises:
            ConfigError: The model is not known, or the costs are of something else.
            DataError: The lengths of the data cannot be told.
        """
        name = model or present.model
        if name is None:
            raise ConfigError("model must be named, got none; give a known name, a folder or a config.json")
        paths, known = [data] if isinstance(data, Path) else list(data), read_model(name)
        if isinstance(costs, Calibration):
            device = Device.named(costs.counted_for)
            costs = costs.apply(_counted(known, device, present))
        measured = measure(paths, known, present, images=images, max_image=max_image)
        text, folder = " ".join(map(str, paths)), str(known.folder or cls.model_path)
        return cls(measured, known, cluster, present, costs, text, folder)

    def answer(self, *, must_fit: bool = True) -> Advice:
        """Where the time goes, and what would bring how much.

        Raises:
            InfeasibleError: Today's mean rank needs more memory than there is, and ``must_fit``.
        """
        try:
            return advise(self.scenario, self.recipe, must_fit=must_fit)
        except InfeasibleError as refusal:
            if not self.measured.images:
                raise
            raise InfeasibleError(
                f"{refusal}; counted are {self.measured.images}", missing_bytes=refusal.missing_bytes
            ) from None

    def layouts(self, report: Callable[[str], object] = lambda doing: None) -> LayoutAnswer:
        """The fastest layout of every kind (ZeRO, pipelines, a spread encoder, units), whether it runs today or not.

        Args:
            report: Called with what is being done: it takes seconds for eight devices, minutes for hundreds.

        Of a model that hears, ZeRO alone is weighed, with samples as they are packed and rearranged.

        Raises:
            ConfigError: There is one device, or a step has fewer samples than there are devices.
        """
        from omnibal.advise.layouts import weigh_layouts  # its loops are compiled, which no other advice needs

        if self.costs is not None:
            self.costs.check_matches(tensor_parallel=1)
        return weigh_layouts(self.scenario, self.tensor_profile, report=report)

    def tensor_profile(self, encoder: int, language: int) -> ModelProfile:
        """Counted costs where so many devices share each layer of the encoder, and of the LLM."""
        if self.costs is not None:
            raise ConfigError(MEASURED)
        present, device, degrees = self.present, self.cluster.device, {"vision": encoder, "language": language}
        return _counted(self.model, device, present, tensor_parallel=degrees)

    @cached_property
    def recipe(self) -> Recipe:
        """The present way of training."""
        present = self.present
        limits = PackLimits(MOST, present.cutoff or MOST) if present.batching == "packed" else None
        sharding, batching = present.sharding or "ddp", present.batching or "random"
        recompute: Level = "none" if present.recompute is False else "full"
        return Recipe(sharding, batching, *self._batches(), recompute, limits, offloaded=present.offloaded or ())

    def _batches(self) -> tuple[int, int]:
        """Samples of a micro-batch, and micro-batches of a rank's step; what is not said follows as in DeepSpeed."""
        batch, accumulation, step = self.present.batch, self.present.accumulation, self.present.step
        if step is None or (batch and accumulation):
            return batch or BATCH, accumulation or ACCUMULATION
        ranks, known = self.cluster.num_devices, batch or accumulation or 1
        if step % (ranks * known):
            raise ConfigError(
                f"train_batch_size must be a multiple of {ranks} devices times {known}, got {step}; is --cluster right?"
            )
        other = step // (ranks * known)
        return (other, known) if batch is None else (known, other)

    @cached_property
    def scenario(self) -> Scenario:
        """What all recipes are estimated for."""
        present, device, recipe, lengths = self.present, self.cluster.device, self.recipe, self.measured.lengths
        per_step = self.cluster.num_devices * recipe.micro_batches * recipe.batch
        # In loops of their own packs have another loss, and Liger's kernels take the place of a head on target rows.
        knows_targets = lengths.target_tokens is not None and not present.fused_loss
        spares_rows = present.host != "deepspeed" and knows_targets
        offered = offered_by(present.host or "transformers", has_targets=spares_rows)
        if self.measured.is_stream:  # samplers have no say over a stream
            offered = tuple(each for each in offered if each == "head")
        adapted = None
        counted = self.costs or _counted(self.model, device, present)
        if self.costs is None and not present.lora:
            adapted = adapted_profile(self.model.records, device, rank=LORA_RANK)  # what would fit
        asked = Scenario(
            lengths,
            counted,
            self.cluster,
            per_step,
            adapted=adapted,
            spares_rows=spares_rows,
            fills=present.host in (None, "transformers") and not self.measured.is_stream,
            offered=offered,
            cutoff=present.cutoff,
            precision=present.precision,
            masks=present.masks is not False,
            is_whole=self.measured.is_whole,
        )
        if recipe.limits is None:
            return asked
        # Packs of random samples are not full: a step has the samples that these hold. Other samples are drawn for a
        # step of another size, so the size is corrected until a step has about as many samples as were assumed.
        for _ in range(MOST_SCALED):
            held = asked.estimate(recipe).samples_per_step
            if abs(held / asked.samples_per_step - 1) <= SAME_STEP / 2:
                break
            asked = replace(asked, samples_per_step=max(round(held), 1))
        return asked


def _counted(model: Model, device: Device, present: Present, **tensor_ranks: Any) -> ModelProfile:
    """Counted costs, with what is trained today."""
    if present.lora:
        return adapted_profile(model.records, device, rank=present.lora, **tensor_ranks)
    return analytic_profile(model.records, device, frozen=present.frozen or (), **tensor_ranks)
