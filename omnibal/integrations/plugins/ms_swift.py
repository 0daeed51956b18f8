r"""A plugin of ms-swift that trains on packs: name this file, and say what a pack may hold.

    OMNIBAL_LIMITS=16384,8192 swift sft ... --padding_free true --strict true \
        --external_plugins $(python -c "import omnibal; print(omnibal.__path__[0])")/integrations/plugins/ms_swift.py

The limits are those of vision units (patches or tiles) and LLM tokens. Under ``--padding_free`` its template makes one
sequence of a pack; without, it pads. Each sample is read once before training, to count it; ``--strict`` keeps broken
samples from being replaced by others.
"""

from importlib.util import find_spec
from typing import Any

from omnibal.integrations.loops import PackLoader, replace_loader
from omnibal.integrations.plugins import given_limits


def get_train_dataloader(trainer: Any, skip_batches: int = 0) -> PackLoader:
    """What takes the place of the trainer's own, in all epochs and where a run goes on."""
    args = trainer.args
    loader = replace_loader(trainer, given_limits())
    # Training has begun, and reads from these arguments how many micro-batches a step has.
    args.gradient_accumulation_steps = trainer.args.gradient_accumulation_steps
    trainer.args = args
    return loader


if find_spec("swift") is not None:  # elsewhere the file is only read
    from swift.trainers.mixin import DataLoaderMixin

    DataLoaderMixin.get_train_dataloader = get_train_dataloader
