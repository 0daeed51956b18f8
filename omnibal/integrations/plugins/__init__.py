"""Files that hosts are told to load; a folder of their own, since hosts put it on Python's path."""

import os

from omnibal.data.limits import PackLimits
from omnibal.errors import ConfigError


def given_limits() -> PackLimits:
    """Limits as the environment names them, vision units and LLM tokens: ``OMNIBAL_LIMITS=16384,8192``."""
    text = os.environ.get("OMNIBAL_LIMITS", "")
    try:
        vision_units, llm_tokens = map(int, text.split(","))
    except ValueError:
        raise ConfigError(
            f"OMNIBAL_LIMITS must be the vision units and LLM tokens of a pack, such as 16384,8192, got {text!r}"
        ) from None
    return PackLimits(vision_units, llm_tokens)
