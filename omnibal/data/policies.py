"""What users choose by name, and what is chosen where they do not."""

from typing import Final, Literal

from omnibal.cost import CostModel

Method = Literal["balanced", "isf", "random"]
"""How samples are packed and arranged."""

Oversized = Literal["alone", "error", "drop"]
"""What becomes of a sample that exceeds a limit on its own."""

DEFAULT_COST: Final = CostModel(llm_tokens=24576, llm_tokens_squared=1)
"""Forward operations of a decoder layer with 4096 hidden units and a fourfold MLP, 24 h² l + 4 h l², over 4 h."""

ITERATIONS: Final = 10
"""Rounds of ISF: as many as the paper takes in practice."""

EXCHANGE_STEPS: Final = 64
"""Consecutive steps that may exchange samples for the sake of balance: more have not made steps more alike."""

MOST_EXCHANGE_STEPS: Final = 2**20

MOST_ITERATIONS: Final = 10_000
