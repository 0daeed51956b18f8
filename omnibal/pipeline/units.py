"""Units: encoder and LLM with devices, and numbers of replicas, of their own.

Micro-batch m of the LLM's replica d has the number ``n = m · replicas + d`` in the whole step. LLM replica ``n mod
replicas`` runs it, and so does encoder replica ``n mod encoder replicas``: as one number divides the other, either an
encoder serves several LLMs, or several encoders serve one in turns.

    encoder 0   F0 F1 F2 F3 …             encoder 0   F0 F2 …
    LLM 0          F0    F2 …             encoder 1   F1 F3 …
    LLM 1             F1    F3 …          LLM 0          F0 F1 F2 F3 …

Source: Zhang et al., DistTrain, SIGCOMM 2025, section 4, which brokers micro-batches between units; here they follow
from their numbers.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from omnibal.cluster import Encoder, Layout
from omnibal.cost import Load
from omnibal.errors import ConfigError
from omnibal.pipeline.schedule import SCHEDULES, Schedule, ScheduleName, stage_order


def check_units(layout: Layout) -> Encoder:
    """Refuse a layout that gives the encoder no devices of its own, or numbers of replicas that do not divide."""
    encoder = layout.encoder
    if encoder is None or encoder.placement != "own":
        raise ConfigError(f"layout must give the encoder devices of its own, got {layout}")
    if not layout.has_even_units:
        raise ConfigError(
            f"replicas of encoder and LLM must divide each other, got {encoder.num_replicas} and {layout.num_replicas}"
            "; omnibal.pipeline.encoder says the encoder's"
        )
    return encoder


def encoder_schedule(layout: Layout, micro_batches: int) -> Schedule:
    """What the stages of an encoder's replica run, its own micro-batches numbered from 0: 1F1B, as deep as units need.

    ``micro_batches`` are those of an LLM's replica. An encoder that serves k replicas keeps k micro-batches for each
    stage behind it in flight; one of k encoders that serve the same replica keeps a k-th.
    """
    encoder = check_units(layout)
    behind = layout.num_stages - encoder.num_stages
    served = -(-behind * layout.num_replicas // encoder.num_replicas)
    own = -(-micro_batches * layout.num_replicas // encoder.num_replicas)
    depths = [served + encoder.num_stages - stage for stage in range(encoder.num_stages)]
    return Schedule.of_orders(tuple(stage_order(depth, own) for depth in depths), own)


@lru_cache(maxsize=64)
def schedule_of(layout: Layout, micro_batches: int, schedule: ScheduleName) -> Schedule:
    """What all stages of a layout run in one step; stages of units run the micro-batches of their own replica.

    Args:
        layout: Where the encoder has devices of its own, its stages run `encoder_schedule`.
        micro_batches: Micro-batches of one of the LLM's replicas in a step.
        schedule: What the LLM's stages run.

    Raises:
        ConfigError: Neither number of replicas divides the other, or the encoder's cannot share the step alike.

    Example:
        >>> from omnibal.cluster import Encoder
        >>> print(schedule_of(Layout(2, 2, encoder=Encoder(num_stages=1, num_replicas=1)), 2, "1f1b"))
        F0 F1 F2 BW0 F3 BW1 BW2 BW3
        F0 BW0 F1 BW1
    """
    if not layout.has_units:
        return SCHEDULES[schedule](layout.num_stages, micro_batches)
    encoder, step = encoder_schedule(layout, micro_batches), micro_batches * layout.num_replicas
    own = layout.shape(0)[0]
    if step % own:
        raise ConfigError(
            f"omnibal.pipeline.encoder.num_replicas must divide the {step} packs of a step (micro-batches "
            f"{micro_batches}, replicas of the language model {layout.num_replicas}), got {own}"
        )
    behind = SCHEDULES[schedule](layout.num_stages - encoder.num_stages, micro_batches)
    replicas = tuple(layout.shape(stage)[0] for stage in range(layout.num_stages))
    return Schedule.of_orders(encoder.stages + behind.stages, micro_batches, replicas, encoder.num_stages)


def numbered(load: Load) -> Load:
    """The micro-batches of a step, (replicas, micro-batches), in the order of their numbers."""
    replicas, micro_batches = load.shape
    numbers = np.arange(replicas * micro_batches)
    return load[numbers % replicas, numbers // replicas]
