"""Hugging Face vision-language models as lists of pipeline layers."""

from omnibal.errors import require

require("torch", "transformers", "safetensors")

from omnibal.vlm.families import load_model
from omnibal.vlm.layers import VisionLanguageModel
from omnibal.vlm.payload import Payload

__all__ = ["Payload", "VisionLanguageModel", "load_model"]
