"""Dataset formats: annotation files and images on disk as samples for training, and their lengths."""

from omnibal.errors import require

require("torch", "PIL")
