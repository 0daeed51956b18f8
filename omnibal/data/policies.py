"""The choices that users make by name."""

from typing import Literal

Method = Literal["balanced", "isf", "random"]
"""How samples are packed and arranged."""

Oversized = Literal["alone", "error", "drop"]
"""What becomes of a sample that exceeds a limit on its own."""
