"""Mixtures over map-style data: what each source gives (draws), what packs that takes (rates), and the packs."""

from omnibal.data.mixing.draw_schedule import Origin
from omnibal.data.mixing.draws import typical_lengths
from omnibal.data.mixing.mixed_packs import MixedPacks

__all__ = ["MixedPacks", "Origin", "typical_lengths"]
