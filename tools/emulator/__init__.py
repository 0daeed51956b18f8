"""A cluster of sleeping devices around DeepSpeed's real engine."""

from omnibal.errors import ENGINE_MODULES, require

require(*ENGINE_MODULES)
