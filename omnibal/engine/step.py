"""One optimizer step as the plan of the epoch has it: which loads, how many samples, how well balanced."""

from dataclasses import dataclass

import numpy as np

from omnibal.cost import Load


@dataclass(frozen=True)
class Step:
    """What all ranks together process before the next optimizer update.

    Attributes:
        epoch: From 0.
        index: Of the step in its epoch, from 0.
        num_samples: In all packs of the step.
        load: Vision units and LLM tokens of every pack, in arrays of shape (num_replicas, micro_batches).
    """

    epoch: int
    index: int
    num_samples: int
    load: Load

    @property
    def llm_tokens(self) -> int:
        """LLM tokens in all packs of the step."""
        return int(np.sum(self.load.llm_tokens))

    def balance(self) -> dict[str, float]:
        """Mean load of a pack over the largest one, for vision units and LLM tokens: 1 where all packs are alike.

        Packs of one rank count as well as packs of different ranks: the former hold up each other in the pipeline,
        the latter at the end of the step.
        """
        return {"vision": _evenness(self.load.vision_units), "llm": _evenness(self.load.llm_tokens)}


def _evenness(values: object) -> float:
    loads = np.asarray(values, dtype=np.float64)
    largest = loads.max(initial=0.0)
    return float(loads.mean() / largest) if largest > 0 else 1.0
