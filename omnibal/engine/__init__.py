"""DeepSpeed's pipeline engine, fed with packs and cut where the plan says."""

from omnibal.errors import require

require("torch", "transformers", "safetensors", "deepspeed")
