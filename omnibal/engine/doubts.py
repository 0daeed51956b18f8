"""What a run does all the same though its user may not want it, said once when it begins."""

import logging
from collections.abc import Mapping
from typing import Any, Final

from omnibal.data.lengths import SampleLengths
from omnibal.data.limits import PackLimits
from omnibal.plan import Plan

LOG: Final = logging.getLogger(__name__)


def warn_of_float32(device_name: str, dtype: str) -> None:
    """Say what float32 costs on a GPU, whose kernel for packs takes 16 bits only."""
    if device_name == "cuda" and dtype == "float32":
        LOG.warning(
            "bf16.enabled should be true on a GPU, got float32; it takes twice the memory, and attention runs sample "
            'by sample: set "bf16": {"enabled": true}'
        )


def warn_of_added_end(samples: Any) -> None:
    """Say that answers are trained with an end which the model's chat template does not write, if they are.

    Args:
        samples: As of ``initialize``: a dataset, a stream, or several streams by name.
    """
    sources = samples.values() if isinstance(samples, Mapping) else (samples,)
    for end in {getattr(source, "added_end", "") for source in sources} - {""}:
        LOG.warning(
            "the model's chat template should end answers, got one that writes nothing behind them (as Vicuna's): each "
            "answer is trained with %r behind it, the tokenizer's eos_token, or the model would not learn to stop; a "
            "template that ends answers itself decides otherwise",
            end,
        )


def warn_of_other_data(plan: Plan, lengths: SampleLengths) -> None:
    """Say that a plan was made for other samples, if it was."""
    if plan.made_from.get("lengths", lengths.content_hash) != lengths.content_hash:
        LOG.warning(
            "omnibal.pipeline.plan should be made for this run's data, got one made for other data; its packs and "
            "times may not suit these: `omnibal plan --write` makes another"
        )


def warn_of_long_samples(config: Any, lengths: SampleLengths, limits: PackLimits) -> None:
    """Say that samples are longer than what the model has learned positions for, if some are."""
    positions, longest = getattr(config.text_config, "max_position_embeddings", None), lengths.summary.max_llm_tokens
    if positions is not None and longest > positions:
        LOG.warning(
            "samples should have at most the model's %d positions, got one of %d tokens, which is trained whole; a "
            "smaller omnibal.data.max_tiles makes samples shorter, omnibal.packing.oversized 'drop' leaves out those "
            "beyond omnibal.packing.llm_tokens (%d)",
            positions,
            longest,
            limits.llm_tokens,
        )
