"""DeepSpeed's pipeline engine, fed with packs and cut where the plan says."""

from omnibal.errors import ENGINE_MODULES, require

require(*ENGINE_MODULES)
