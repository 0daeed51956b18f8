"""How somebody trains today, read from the files that they train with.

Known are DeepSpeed's configuration, transformers' ``TrainingArguments``, and the arguments of LLaMA-Factory and
ms-swift. Keys that matter to time and memory are read, all others ignored; defaults are the framework's.

Sources: deepspeed.ai/docs/config-json; transformers ``TrainingArguments``; LLaMA-Factory ``src/llamafactory/hparams``
(``cutoff_len`` 2048, ``image_max_pixels`` 768 × 768, vision tower and projector frozen, recomputation on, unless told
otherwise); ms-swift "Command Line Parameters" (LoRA of rank 8, ViT and aligner frozen, recomputation on).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Final, Literal

from omnibal.advise.batches import Batching
from omnibal.advise.wait import MEETINGS, Trainer
from omnibal.data.mixture import Mixture
from omnibal.errors import ConfigError

Host = Literal["transformers", "llama-factory", "ms-swift", "deepspeed"]
Content = Mapping[str, Any]
_SWIFT: Final = ("train_type", "tuner_type", "freeze_vit", "freeze_aligner", "padding_free", "sft_type")
_FACTORY: Final = ("finetuning_type", "cutoff_len", "template", "freeze_vision_tower", "neat_packing")
_ARGUMENTS: Final = ("per_device_train_batch_size", "gradient_checkpointing", "learning_rate", "num_train_epochs")
OFFLOADS: Final = {"optimizer": "offload_optimizer", "parameters": "offload_param"}
"""Sections of DeepSpeed's ``zero_optimization`` that put something into the host's memory."""
LARGEST_IMAGE: Final = 768 * 768
"""Pixels, by LLaMA-Factory's default."""


@dataclass(frozen=True)
class Present:
    """The present way of training; None for what nothing says.

    Attributes:
        host: What trains.
        trainer: How ranks share their work.
        batch: Samples of a micro-batch.
        accumulation: Micro-batches per step and rank.
        step: Samples of a step of all ranks, for what of the two above is not said.
        batching: What shares a micro-batch.
        offloaded: What the host's memory holds: "optimizer", "parameters".
        cutoff: Most tokens of a sample, or of a pack under ``"packed"``.
        recompute: Whether layers recompute (gradient checkpointing).
        frozen: Modules that are not trained.
        lora: Rank of adapters.
        max_pixels: Of an image.
        model: Its name or folder.
        mixture: What share each source gets.
        said: What was read, key by key.
    """

    host: Host | None = None
    trainer: Trainer | None = None
    batch: int | None = None
    accumulation: int | None = None
    step: int | None = None
    batching: Batching | None = None
    offloaded: tuple[str, ...] | None = None
    cutoff: int | None = None
    recompute: bool | None = None
    frozen: tuple[str, ...] | None = None
    lora: int | None = None
    max_pixels: int | None = None
    model: str | None = None
    mixture: Mixture | None = None
    said: Mapping[str, str] = field(default_factory=dict)

    def over(self, other: "Present") -> "Present":
        """What this says, and what only the other does."""
        mine = {part.name: getattr(self, part.name) for part in fields(self) if part.name != "said"}
        given = {name: value for name, value in mine.items() if value is not None}
        return replace(other, **given, said={**other.said, **self.said})


def read_present(content: Content, load: Callable[[str], Content] | None = None) -> Present:
    """What a file that somebody trains with says.

    Args:
        content: Of the file.
        load: Gives the content of a file that this one names, such as a ds_config; None to know nothing of it.

    Raises:
        ConfigError: It is none of the known kinds, or a value that matters is wrong; the message names the key.

    >>> present = read_present({"zero_optimization": {"stage": 2}, "train_micro_batch_size_per_gpu": 4})
    >>> present.trainer, present.batch
    ('zero2', 4)
    """
    if any(key in content for key in _SWIFT):
        return _swift(content, load)
    if any(key in content for key in _FACTORY):
        return _factory(content, load)
    if any(key in content for key in _ARGUMENTS):
        return _arguments(content, load, "transformers")
    if "zero_optimization" in content or "train_micro_batch_size_per_gpu" in content or "bf16" in content:
        return _deepspeed(content)
    raise ConfigError(
        "today must be a trainer (ddp, zero1, zero2, zero3, fsdp) or a ds_config, TrainingArguments, or arguments of "
        f"LLaMA-Factory or ms-swift, got one with the keys {', '.join(list(content)[:8])}"
    )


def _deepspeed(content: Content) -> Present:
    zero = _section(content, "zero_optimization")
    stage = zero.get("stage", 0)
    if stage not in (0, 1, 2, 3, "auto"):
        raise ConfigError(f"zero_optimization.stage must be 0, 1, 2 or 3, got {stage!r}")
    trainer: Trainer | None = None if stage == "auto" else ("ddp" if stage == 0 else f"zero{stage}")  # type: ignore[assignment]
    keys = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "train_batch_size")
    batch, accumulation, step = (_count(content, key) for key in keys)
    if batch is not None and step is None and keys[1] not in content:
        accumulation = 1  # DeepSpeed's default
    offloaded = tuple(part for part, key in OFFLOADS.items() if _section(zero, key).get("device", "none") != "none")
    said = (
        {"zero_optimization.stage": str(stage)} | _said(content, keys) | {OFFLOADS[part]: "yes" for part in offloaded}
    )
    asked = _section(_section(content, "omnibal"), "data").get("mixture")
    # A draw of the data has the shares that its repetitions make.
    mixture = None if asked in (None, "repeat_time") else Mixture.of(asked)
    return Present(
        host="transformers" if _has_auto(content) else "deepspeed", trainer=trainer, batch=batch,
        accumulation=accumulation, step=step, offloaded=offloaded or None, mixture=mixture, said=said,
    )  # fmt: skip


def _has_auto(value: Any) -> bool:
    """Whether a value is left to transformers, which alone fills in ``"auto"``."""
    return value == "auto" or (isinstance(value, Mapping) and any(map(_has_auto, value.values())))


def _arguments(content: Content, load: Callable[[str], Content] | None, host: Host) -> Present:
    """Of transformers, whose keys the others share."""
    strategy = "group_by_length" if content.get("group_by_length") else content.get("train_sampling_strategy")
    keys = (
        "per_device_train_batch_size", "gradient_accumulation_steps", "group_by_length", "train_sampling_strategy",
        "gradient_checkpointing", "activation_checkpointing", "fsdp", "model_name_or_path", "model",
    )  # fmt: skip
    batch, accumulation = _count(content, keys[0]), _count(content, keys[1])
    own = Present(
        host=host,
        trainer="fsdp" if content.get("fsdp") else None,
        batch=8 if batch is None else batch,
        accumulation=accumulation or 1,
        batching=strategy if strategy in ("group_by_length", "batch_rebalance") else "random",  # type: ignore[arg-type]
        recompute=bool(content.get("activation_checkpointing") or content.get("gradient_checkpointing")),
        model=content.get("model_name_or_path") or content.get("model"),
        said=_said(content, keys),
    )
    return own.over(_beside(content.get("deepspeed"), load))


def _beside(named: Any, load: Callable[[str], Content] | None) -> Present:
    """What the named ds_config says: in place, in a file, or one of ms-swift's by its name."""
    if not named:
        return Present(trainer="ddp")
    if isinstance(named, Mapping):
        return _deepspeed(named)
    name = str(named)
    for trainer in MEETINGS:
        if name == trainer or name.startswith(f"{trainer}_offload"):
            parts = ("optimizer", "parameters") if trainer == "zero3" else ("optimizer",)
            return Present(trainer=trainer, offloaded=None if name == trainer else parts, said={"deepspeed": name})
    if load is None:
        raise ConfigError(f"deepspeed must be a configuration here, got the file {name}")
    return _deepspeed(load(name))


def _factory(content: Content, load: Callable[[str], Content] | None) -> Present:
    kind = content.get("finetuning_type", "lora")
    packing = "packed" if content.get("packing") or content.get("neat_packing") else None
    frozen = [
        module
        for key, module, default in (
            ("freeze_vision_tower", "vision", True),
            ("freeze_multi_modal_projector", "projector", True),
            ("freeze_language_model", "language", False),
        )
        if content.get(key, default)
    ]
    keys = ("finetuning_type", "cutoff_len", "packing", "neat_packing", "lora_rank", "freeze_vision_tower",
            "freeze_multi_modal_projector", "freeze_language_model", "disable_gradient_checkpointing",
            "image_max_pixels")  # fmt: skip
    own = Present(
        batching=packing,  # type: ignore[arg-type]
        cutoff=_count(content, "cutoff_len") or 2048,
        recompute=not content.get("disable_gradient_checkpointing", False),
        frozen=tuple(frozen),
        lora=(_count(content, "lora_rank") or 8) if kind == "lora" else None,
        max_pixels=_count(content, "image_max_pixels") or LARGEST_IMAGE,
        said=_said(content, keys),
    )
    return own.over(_arguments(content, load, "llama-factory"))


def _swift(content: Content, load: Callable[[str], Content] | None) -> Present:
    kind = content.get("tuner_type", content.get("train_type", content.get("sft_type", "lora")))
    frozen = [
        module
        for key, module, default in (
            ("freeze_vit", "vision", True),
            ("freeze_aligner", "projector", True),
            ("freeze_llm", "language", False),
        )
        if content.get(key, default)
    ]
    batching = "packed" if content.get("packing") else "flattened" if content.get("padding_free") else None
    keys = ("train_type", "tuner_type", "lora_rank", "max_length", "packing", "padding_free", "freeze_vit",
            "freeze_aligner", "freeze_llm", "max_pixels", "deepspeed")  # fmt: skip
    own = Present(
        batch=_count(content, "per_device_train_batch_size") or 1,
        batching=batching,  # type: ignore[arg-type]
        cutoff=_count(content, "max_length"),
        recompute=bool(content.get("gradient_checkpointing", True)),
        frozen=tuple(frozen),
        lora=(_count(content, "lora_rank") or 8) if kind == "lora" else None,
        max_pixels=_count(content, "max_pixels"),
        said=_said(content, keys),
    )
    return own.over(_arguments(content, load, "ms-swift"))


def _section(content: Content, key: str) -> Content:
    found = content.get(key, {})
    if not isinstance(found, Mapping):
        raise ConfigError(f"{key} must be an object, got {found!r}")
    return found


def _count(content: Content, key: str) -> int | None:
    value = content.get(key)
    if value is None or value == "auto":
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{key} must be a positive integer, got {value!r}")
    return value


def _said(content: Content, keys: Any) -> dict[str, str]:
    return {key: str(content[key]) for key in keys if content.get(key) not in (None, "auto", "", [])}
