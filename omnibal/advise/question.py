"""What somebody asks: their data, model, machines and present way of training, and what balancing would bring them."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Final, Literal

from omnibal.advise.batches import Batching
from omnibal.advise.changes import Advice, advise
from omnibal.advise.costs import adapted_profile
from omnibal.advise.estimate import Setting, Way
from omnibal.advise.measuring import Measured, measure
from omnibal.advise.models import Model
from omnibal.advise.present import Host, Present
from omnibal.advise.reading import read_model
from omnibal.cluster import Cluster
from omnibal.data.limits import MOST, PackLimits
from omnibal.errors import ConfigError
from omnibal.profile.counted import analytic_profile
from omnibal.profile.records import ModelProfile

LORA_RANK: Final = 16
"""Of adapters where nothing else is said."""
BATCH: Final = 1
ACCUMULATION: Final = 8
"""Where nothing is said."""
OFFERED: Final[dict[Host, tuple[Batching | Literal["head"], ...]]] = {
    "transformers": ("head", "group_by_length", "batch_rebalance"),
    "llama-factory": ("group_by_length", "packed"),
    "ms-swift": ("group_by_length", "flattened"),
    "deepspeed": ("group_by_length",),
}
"""What each trainer has by one setting or call; for a loop of one's own transformers has a sampler."""


@dataclass(frozen=True, eq=False)
class Question:
    """All that an answer depends on.

    Attributes:
        measured: Lengths of the data, and where they come from.
        model: Its sizes.
        cluster: The machines; all devices are ranks.
        present: How they are used today.
        costs: What layers cost by measurement; None to count it.
        data: What the data is called.
        model_path: Its folder; ``FOLDER`` in its place where a known name is all that was given.
    """

    measured: Measured
    model: Model
    cluster: Cluster
    present: Present
    costs: ModelProfile | None = None
    data: str = "data"
    model_path: str = "FOLDER"

    def __post_init__(self) -> None:
        if self.present.batching == "packed" and self.present.cutoff is None:
            raise ConfigError("cutoff must say how many tokens a pack holds, got none")
        if self.costs is not None:
            self._check_costs(self.costs)

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
        costs: ModelProfile | None = None,
    ) -> "Question":
        """Read data and model; a thousand samples are drawn where data is not measured yet. No torch is loaded.

        Args:
            data: As ``measure`` takes it.
            cluster: The machines.
            present: How they are used today, as ``read_today`` reads it.
            model: A known name, a Hugging Face folder, or a config.json; by default what ``present`` names.
            images: What the paths of images are relative to; by default the folder of the data.
            max_image: Most tiles of an image, or most pixels at native resolution.
            costs: What layers cost by measurement.

        Raises:
            ConfigError: The model is not known, or the costs are of something else.
            DataError: The lengths of the data cannot be told.
        """
        name = model or present.model
        if name is None:
            raise ConfigError("model must be named, got none; give a known name, a folder or a config.json")
        paths = [data] if isinstance(data, Path) else list(data)
        named = read_model(name)
        measured = measure(paths, named, present, images=images, max_image=max_image)
        return cls(
            measured,
            named.model,
            cluster,
            present,
            costs,
            " ".join(map(str, paths)),
            str(named.folder or cls.model_path),
        )

    @cached_property
    def way(self) -> Way:
        """The present way."""
        present = self.present
        packed = present.batching == "packed"
        return Way(
            present.trainer or "ddp", present.batching or "random", *self._batches(),
            "none" if present.recompute is False else "full",
            PackLimits(MOST, present.cutoff or MOST) if packed else None, offloaded=present.offloaded or (),
        )  # fmt: skip

    def _batches(self) -> tuple[int, int]:
        """Samples of a micro-batch, and micro-batches of a rank's step; what is not said follows as in DeepSpeed."""
        batch, accumulation, step = self.present.batch, self.present.accumulation, self.present.step
        if step is None or (batch and accumulation):
            return batch or BATCH, accumulation or ACCUMULATION
        ranks = self.cluster.num_devices
        known = batch or accumulation or 1
        if step % (ranks * known):
            raise ConfigError(
                f"train_batch_size must be a multiple of {ranks} devices times {known}, got {step}; is --cluster right?"
            )
        other = step // (ranks * known)
        return (other, known) if batch is None else (known, other)

    @cached_property
    def setting(self) -> Setting:
        """What stays whatever way is taken."""
        devices, way, lengths = self.cluster.num_devices, self.way, self.measured.lengths
        per_step = devices * way.micro_batches * way.batch
        if way.limits is not None:  # as many as its packs hold
            mean = max(float(lengths.llm_tokens.mean()), 1.0)
            per_step = max(round(devices * way.micro_batches * way.limits.llm_tokens / mean), 1)
        # in loops of their own packs have another loss, and Liger's kernels take the place of a head on target rows
        known = lengths.target_tokens is not None and not self.present.fused_loss
        spares_rows = self.present.host != "deepspeed" and known
        return Setting(
            lengths, self.costs or self._counted(), self.cluster, per_step, adapted=self._adapted(),
            spares_rows=spares_rows, offered=self._offered(spares_rows), cutoff=self.present.cutoff,
            precision=self.present.precision,
        )  # fmt: skip

    def _offered(self, spares_rows: bool) -> tuple[Batching | Literal["head"], ...]:
        """What the trainer has by one setting or call; samplers have no say over a stream."""
        offered = OFFERED[self.present.host or "transformers"]
        if not spares_rows:
            offered = tuple(name for name in offered if name != "head")
        return tuple(name for name in offered if name == "head") if self.measured.is_stream else offered

    def answer(self, *, with_pipeline: bool = False) -> Advice:
        """Where the time goes, and what would bring how much; arguments and errors as of ``changes.advise``."""
        return advise(self.setting, self.way, with_pipeline=with_pipeline)

    def _counted(self) -> ModelProfile:
        if self.present.lora:
            return adapted_profile(self.model.records, self.cluster.device, rank=self.present.lora)
        return analytic_profile(self.model.records, self.cluster.device, frozen=self.present.frozen or ())

    def _adapted(self) -> ModelProfile | None:
        """What adapters would cost, where they are not what is trained already; for what would fit."""
        if self.present.lora or self.costs is not None:
            return None
        return adapted_profile(self.model.records, self.cluster.device, rank=LORA_RANK)

    def _check_costs(self, costs: ModelProfile) -> None:
        """Refuse costs of another device, another model, or of other parts that are trained.

        Raises:
            ConfigError: Says what differs.
        """
        if not costs.is_of(self.cluster.device):
            raise ConfigError(f"profile must be of {self.cluster.device.name}, got one of {costs.device}")
        if self.present.lora:
            if not costs.adapter_parameters:
                raise ConfigError("profile must be of adapters where LoRA is trained, got one without any")
            return
        costs.check_matches(records=self.model.records, frozen=self.present.frozen or ())
