"""Whether packs of a model are exact, before a training on them begins."""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, Final
from warnings import warn

import torch
from torch import Tensor

from omnibal.errors import ConfigError
from omnibal.packs.apart import KINDS, StatefulLayers, attend_by_bounds, mask_images, rotate_by_sample
from omnibal.packs.collator import FAMILIES, PackCollator, as_alone, positions_of
from omnibal.packs.leaks import PackingCheck, compare
from omnibal.packs.row_lengths import HEEDED, WINDOWS, base_of, refuse_other_parts, shown_by_samples
from omnibal.packs.small_models import scaled_model

CHECKED_TOKENS: Final = 8


def check_packed(
    model: torch.nn.Module,
    collator: PackCollator,
    items: Sequence[Any],
    *,
    device: torch.device | None = None,
    rounded: bool = False,
) -> None:
    """Check that a pack gives each sample the logits that it gets alone.

    From then on, layers that would let a state, an image or a sample's length across keep samples apart.

    The model is wrapped if it is trained so: where layers gather their weights from other ranks, all ranks check the
    same items at the same time. ``rounded``: it computes in 16 bits whatever its logits come in, as under autocast.
    With more than two items each module is looked at, whatever the logits are.
    """
    by_bounds = _check_long_rows(model)
    samples = [collator.sample(item) for item in items]
    alone, packed = [as_alone(sample) for sample in samples], collator.pack(samples)
    check = partial(compare, model, alone, packed, device=device, rounded=rounded, isolation=len(samples) > 2)
    found = _kept_apart(model, check, by_bounds=by_bounds)
    if not found.is_exact:
        raise ConfigError(
            f"packed samples must get the logits that they get alone, got {found.errors}, through {found.through}; "
            "such packs cannot train it, but balance(..., padded=True) trains it on balanced batches with padding"
        )


def _kept_apart(model: torch.nn.Module, check: Callable[..., PackingCheck], *, by_bounds: bool) -> PackingCheck:
    """What a check finds once a model's layers keep samples apart; ``by_bounds``: attention may do so by bounds."""
    mask_images(model)
    rotate_by_sample(model)
    found = _found(check, attend_by_bounds(model) if by_bounds else None)
    if _leaks_states(found):
        layers = StatefulLayers(model, found.leaks)
        found = check(isolation=True)
        if layers.by_kernels and not found.is_exact:
            layers.by_kernels = False
            found = check()
    return found


def _check_long_rows(model: torch.nn.Module) -> bool:
    """Check what only long samples show, in a small model of the same kind for which those of a few words are long.

    Returns:
        Whether attention by bounds was exact there: kernels know windows, but no chunks.
    """
    base = base_of(model)
    refuse_other_parts(base)
    long = shown_by_samples(base)
    if not long:
        return True
    names = " or ".join(map(str, long))
    try:
        small = scaled_model(base, 2 * CHECKED_TOKENS - 2, long)
    except (ConfigError, ValueError, TypeError, RuntimeError, LookupError, AttributeError) as error:
        if not all(each.word in HEEDED for each in long):
            warn(f"packs beyond {names} have not been tried: no small model could be made ({error})", stacklevel=2)
        return all(each.word == WINDOWS for each in long)
    collator, texts = _texts(small.config, (1, 3, 2))
    samples = [collator.sample(text) for text in texts]
    check = partial(compare, small, [*map(as_alone, samples)], collator.pack(samples))
    found = _kept_apart(small, check, by_bounds=True)
    if not found.is_exact:
        raise ConfigError(
            f"samples beyond {names} must get the logits in a pack that they get alone, got {found.errors} in a small "
            f"model with random weights, through {found.through}; balance(..., padded=True) trains on padded batches"
        )
    return bool(small.config.get_text_config()._attn_implementation != "sdpa")


def _found(check: Callable[[], PackingCheck], undo: Callable[[], None] | None) -> PackingCheck:
    """Check; where attention by bounds is not exact, undo it and check the model with its own attention."""
    try:
        found = check()
        if undo is None or found.is_exact or _leaks_states(found):
            return found
    except ConfigError:  # raised by attention that is no plain scaled dot product
        if undo is None:
            raise
    undo()
    return check()


def _leaks_states(found: PackingCheck) -> bool:
    """Whether all that leaks are states, which `StatefulLayers` keep apart."""
    return bool(found.leaks) and {leak.kind for leak in found.leaks} <= KINDS


def two_texts(config: Any) -> tuple[PackCollator, list[list[int]]]:
    """A collator and two made-up texts, the same on all ranks: to check a model before anything is drawn."""
    if config.model_type not in FAMILIES:
        raise ConfigError(
            f"model_type must be one of {', '.join(FAMILIES)} to pack samples that nobody has read yet, got "
            f"{config.model_type!r}; packs of a dataset that is read by index may prove exact, and padded=True works"
        )
    return _texts(config, (1, 2))


def _texts(config: Any, sizes: Sequence[int]) -> tuple[PackCollator, list[list[int]]]:
    """A collator and made-up texts of so many times ``CHECKED_TOKENS`` words."""
    special = {value for name, value in config.to_dict().items() if name.endswith("token_id")}
    ids = [token for token in range(config.get_text_config().vocab_size) if token not in special]
    bounds = [CHECKED_TOKENS * sum(sizes[:number]) for number in range(len(sizes) + 1)]
    texts = [ids[start:stop] for start, stop in pairwise(bounds)]
    return PackCollator(_text, positions_of(config)), texts


def _text(items: list[list[int]]) -> dict[str, Tensor]:
    (ids,) = torch.tensor(items)[:, None]
    return {"input_ids": ids, "labels": ids}
