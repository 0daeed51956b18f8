"""LLaMA-Factory's supervised fine-tuning on packs, started as ``llamafactory-cli train`` is.

    OMNIBAL_LIMITS=16384,8192 torchrun ... -m omnibal.integrations.plugins.llama_factory train.yaml

The limits are those of vision units (patches or tiles) and LLM tokens. Leave ``neat_packing`` and ``packing`` off.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from omnibal.integrations.loops import replace_loader
from omnibal.integrations.plugins import given_limits
from omnibal.packs.collator import PER_IMAGE, PER_SOUND, PER_TOKEN
from omnibal.packs.losses import loss_per_target

KEPT = (*PER_TOKEN, *PER_IMAGE, "attention_mask")


def one_sample(
    items: Sequence[dict[str, Any]],
    collate: Callable[..., Any],
    image_token: int | None,
    video_token: int | None = None,
) -> dict[str, Any]:
    """LLaMA-Factory's batch of one sample, without its positions and what blank input it hides by the mask.

    Args:
        collate: LLaMA-Factory's collator, which removes fields from its argument.
        image_token: Id of what stands for a piece of an image.
        video_token: Id of what stands for a piece of a video.
    """
    batch = collate([dict(item) for item in items])
    # Newer models with a grid of patches ask for types, to count positions by themselves.
    if {"image_grid_thw", "video_grid_thw"} & batch.keys():
        ids = batch["input_ids"]
        batch["mm_token_type_ids"] = (ids == image_token).long()
        if video_token is not None:
            batch["mm_token_type_ids"] += 2 * (ids == video_token).long()
    seen, heard = (
        any(item.get(kind) for item in items for kind in kinds) for kinds in (("images", "videos"), ("audios",))
    )
    hidden = {name for name in PER_IMAGE if not (heard if name in PER_SOUND else seen)}
    return {name: batch[name] for name in KEPT if name in batch and name not in hidden}


def use_packs(trainer: Any) -> None:
    """Change a trainer's training data and loss; evaluation keeps its collator."""
    own = trainer.data_collator
    image_token, video_token = (getattr(trainer.model.config, f"{kind}_token_id", None) for kind in ("image", "video"))
    trainer.data_collator = partial(one_sample, collate=own, image_token=image_token, video_token=video_token)
    replace_loader(trainer, given_limits(), model=trainer.model)
    trainer.data_collator = own
    trainer.compute_loss_func = loss_per_target


def main() -> None:
    """Train as the file on the command line says."""
    from llamafactory.train.sft import workflow
    from llamafactory.train.tuner import run_exp

    class PackTrainer(workflow.CustomSeq2SeqTrainer):  # type: ignore[misc]
        """LLaMA-Factory's own trainer, on packs."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            if self.args.do_train:
                use_packs(self)

    workflow.CustomSeq2SeqTrainer = PackTrainer
    run_exp()


if __name__ == "__main__":
    main()
