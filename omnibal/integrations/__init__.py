"""Drop-ins: balanced packs for training loops that exist already."""
