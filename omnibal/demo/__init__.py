"""Data and a model to try everything on: questions about coloured shapes, written as users have their own."""

from omnibal.errors import require

require("tokenizers", "transformers")

from omnibal.demo.write import DemoPaths, majority_accuracy, write_demo

__all__ = ["DemoPaths", "majority_accuracy", "write_demo"]
