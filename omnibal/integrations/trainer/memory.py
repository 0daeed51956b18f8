"""What a Trainer's ranks hold of a model: dtypes of weights, gradients and optimizer; and what their devices have."""

from dataclasses import replace
from typing import Any, Final, NamedTuple

import torch

from omnibal.advise.memory import USUAL, TrainingPrecision, optimizer_of
from omnibal.advise.present import OFFLOADS
from omnibal.advise.wait import Sharding
from omnibal.device import usable_bytes
from omnibal.memory.footprint import REDUCED_AT_ONCE
from omnibal.profile.records import ELEMENT_BYTES, FLOAT16, FLOAT32, ModelProfile
from omnibal.ranks import gather

GIB: Final = 2**30
FULL: Final = "out of memory"


class HeldBytes(NamedTuple):
    """How a trainer's ranks hold a model."""

    precision: TrainingPrecision
    dtype: str
    """Dtype in which layers compute."""
    offloaded: tuple[str, ...]
    """What the host's memory holds, as in ``RankMemory``."""
    buffered: float | None = 0.0
    """Elements of gradients that wait in buffers to be sent, in the dtype of layers; None for a copy of all."""

    def buffer_bytes(self, profile: ModelProfile) -> int:
        """Bytes of those buffers, for costs in the dtype of layers."""
        if self.buffered is None:
            held = self.precision.applied(profile, "ddp")
            return sum(layer.gradient_bytes for layer in held.layers)
        return round(self.buffered * ELEMENT_BYTES[profile.dtype])

    @classmethod
    def of(cls, trainer: Any, model: Any, sharding: Sharding) -> "HeldBytes":
        """Read the model's dtypes, the trainer's arguments and its DeepSpeed or FSDP plugin."""
        kept = {bits for bits in (4, 8) if getattr(model, f"is_loaded_in_{bits}bit", False)}
        precision = TrainingPrecision(
            optimizer_of(_optimizer_name(trainer)) or USUAL.optimizer, weight_bits=min(kept, default=USUAL.weight_bits)
        )
        of_host = _in_deepspeed if trainer.is_deepspeed_enabled else _in_torch
        return of_host(trainer, model, sharding, precision)


def _in_deepspeed(trainer: Any, model: Any, sharding: Sharding, precision: TrainingPrecision) -> HeldBytes:
    config = trainer.accelerator.state.deepspeed_plugin.deepspeed_config
    engines = [section for name in ("bf16", "fp16") if (section := config.get(name) or {}).get("enabled") is True]
    if not engines and sharding == "ddp":
        return _in_torch(trainer, model, sharding, precision)
    # The engine casts weights to its dtype. ZeRO updates float32 copies, whatever the weights are.
    said = {name: value for section in engines for name, value in section.items()}
    zero = config.get("zero_optimization") or {}
    bucket = zero.get("reduce_bucket_size", REDUCED_AT_ONCE) if sharding != "ddp" else 0
    if bucket == "auto":  # Trainer's own rule, when training begins
        bucket = model.config.get_text_config().hidden_size ** 2
    # ZeRO 1 and 2 fill one buffer while the other is sent; ZeRO 3 has one.
    twice = bool(zero.get("overlap_comm")) and sharding in ("zero1", "zero2")
    devices = {part: (zero.get(name) or {}).get("device") for part, name in OFFLOADS.items()}
    return HeldBytes(
        replace(
            precision,
            master=not any(said.get(f"{name}_master_weights_and_grads") for name in ("bf16", "fp16")),
            state_bytes=FLOAT16 if said.get("bf16_optimizer_states") else FLOAT32,
        ),
        "bfloat16" if engines or _main_dtype(model) != torch.float32 else "float32",
        tuple(part for part, device in devices.items() if device not in (None, "none")),
        bucket * (1 + twice),
    )


def _in_torch(trainer: Any, model: Any, sharding: Sharding, precision: TrainingPrecision) -> HeldBytes:
    in_float32, mixed = _main_dtype(model) == torch.float32, trainer.accelerator.mixed_precision not in (None, "no")
    offloaded: tuple[str, ...] = ()
    if trainer.is_fsdp_enabled:
        offload = trainer.accelerator.state.fsdp_plugin.cpu_offload
        # FSDP 1 has an object with a switch, FSDP 2 a policy, that of offloading with a field of its own.
        is_offloaded = getattr(offload, "offload_params", hasattr(offload, "pin_memory"))
        offloaded = ("optimizer", "parameters") if is_offloaded else ()
        if mixed:  # Accelerate shards float32 weights, and layers are gathered in 16 bits: as masters under DeepSpeed
            return HeldBytes(precision, "bfloat16", offloaded)
    # torch's optimizers update the weights themselves, and keep their own numbers in the dtype of these.
    if _main_dtype(model, trained=True) != torch.float32:
        precision = replace(precision, master=False, state_bytes=FLOAT16)
    # DDP sums gradients in buckets, which hold all of them beside the gradients themselves.
    ddp = not (trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled) and trainer.args.world_size > 1
    views = trainer.accelerator.ddp_handler is not None and trainer.accelerator.ddp_handler.gradient_as_bucket_view
    return HeldBytes(
        replace(precision, autocast=in_float32 and mixed),
        "float32" if in_float32 and not mixed else "bfloat16",
        offloaded,
        None if ddp and not views else 0.0,
    )


def _main_dtype(model: Any, *, trained: bool = False) -> torch.dtype:
    """The dtype of most of a model's weights, or of most that are trained; quantized weights are no numbers."""
    sizes = dict[torch.dtype, int]()
    for weight in model.parameters():
        if weight.is_floating_point() and (weight.requires_grad or not trained):
            # ZeRO 3 leaves an empty tensor of a weight that it has shared out.
            sizes[weight.dtype] = sizes.get(weight.dtype, 0) + int(getattr(weight, "ds_numel", weight.numel()))
    return max(sizes, key=lambda dtype: sizes[dtype], default=torch.float32)


def _optimizer_name(trainer: Any) -> str:
    """The ds_config's goes before one that was given, and that before the arguments'."""
    config = trainer.accelerator.state.deepspeed_plugin.deepspeed_config if trainer.is_deepspeed_enabled else {}
    if named := (config.get("optimizer") or {}).get("type"):
        return str(named)
    if trainer.optimizer is not None:
        return type(trainer.optimizer).__name__
    return str(getattr(trainer.args.optim, "value", trainer.args.optim))


def device_gib(device: torch.device) -> float | None:
    """What a run may take of the smallest device of all ranks, less a margin; None where one has no own memory."""
    # All ranks together.
    own = torch.cuda.mem_get_info(device)[1] if device.type == "cuda" else None
    found = gather(own)
    totals = [total for total in found if total is not None]
    if len(totals) < len(found):
        return None
    return usable_bytes(min(totals)) / GIB


def is_full(error: BaseException) -> bool:
    """Whether memory did not suffice; libraries of CUDA tell so in errors of their own."""
    text = f"{type(error).__name__}: {error}"
    return isinstance(error, torch.OutOfMemoryError) or any(
        each in text for each in (FULL, "OutOfMemoryError", "CUBLAS_STATUS_ALLOC_FAILED")
    )
