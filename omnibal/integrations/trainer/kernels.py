"""Which kernels a trainer's packs run on, and what is said of them: attention, compiled blocks, the head."""

from typing import Any, Final

from transformers import Trainer, TrainerCallback

from omnibal.errors import ConfigError, reporting
from omnibal.integrations.trainer.settings import model_of, sharding_of
from omnibal.packs.blocks import CompiledBlocks, compile_blocks
from omnibal.vlm.attention import PACKED_ATTENTION
from omnibal.vlm.flash import OWN, heads_of, use_newer

HALF: Final = ("bf16", "fp16")


def refuse_compiling(trainer: Trainer, *, padded: bool) -> None:
    """Refuse what compiled blocks would break, or be broken by."""
    refused = {
        "torch_compile": (trainer.args.torch_compile, "it compiles the whole model, compile=True its blocks"),
        "use_liger_kernel": (trainer.args.use_liger_kernel, "its kernels stand where blocks would be compiled"),
        "padded": (padded, "batches with padding would each want a graph"),
        # Tried with DeepSpeed 0.19: blocks train exactly, but no graph is made of them.
        "ZeRO 3": (sharding_of(trainer) == "zero3", "its hooks leave nothing of a block to compile"),
    }
    for name, (is_there, why) in refused.items():
        if is_there:
            raise ConfigError(f"{name} must be left out beside compile=True; {why}")


class ChoosesKernels(TrainerCallback):  # type: ignore[misc]
    """Behind the check of packs, says what they run on, and compiles blocks for the time of a training if asked to.

    Args:
        compiles: Whether blocks are compiled.
        all_rows: Why the head works on all rows; None where it works on those with a target alone.
    """

    def __init__(self, trainer: Trainer, *, compiles: bool, all_rows: str | None) -> None:
        self._trainer, self._compiles, self._all_rows = trainer, compiles, all_rows
        self._compiled = CompiledBlocks([], [])
        self._flash, config = OWN, model_of(trainer).config
        with reporting("the choice of kernels"):
            if not _drops_weights(config):  # newer kernels refuse to, also in an encoder's attention
                self._flash = use_newer(trainer.args.device, heads_of(config))

    def on_train_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Compile, and say what is used."""
        self._compiled.undo()  # what a training left that ended by an error
        if self._compiles:
            self._compiled = compile_blocks(model_of(self._trainer))
        if self._trainer.is_world_process_zero():
            head = "target rows" if self._all_rows is None else f"all rows ({self._all_rows})"
            told = [f"packs attend by {self._attention()}", f"the head works on {head}"]
            told += ["Liger's fused loss is not used"] * args.use_liger_kernel
            print("omnibal: " + "; ".join(told + [str(self._compiled)] * self._compiles))

    def on_train_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Leave the model as it was."""
        self._compiled.undo()

    def _attention(self) -> str:
        model, device = model_of(self._trainer), self._trainer.args.device
        found = model.config.get_text_config()._attn_implementation
        if found != PACKED_ATTENTION:
            return f"transformers' {found!r}"
        half = self._trainer.accelerator.mixed_precision in HALF or next(model.parameters()).dtype.itemsize == 2
        if device.type == "cuda" and half:
            return f"torch's kernel for packs, {self._flash}"
        return f"a product for each sample ({device.type}, {16 if half else 32} bits: no kernel for packs)"


def _drops_weights(config: Any) -> bool:
    parts = (config, config.get_text_config(), getattr(config, "vision_config", None))
    values = [vars(part) for part in parts if part is not None]
    return any(value for part in values for name, value in part.items() if "atten" in name and "drop" in name)
