"""A small model one of whose blocks of the ViT puts out a feature that a decoder block reads, as later families do."""

from omnibal.vlm import load_model
from omnibal.vlm.layers import VisionLanguageModel
from omnibal.vlm.payload import SentTensors

MADE, READ = 2, 7
"""Layers: a block of the ViT, the second decoder block."""


class DeepModel(VisionLanguageModel):
    """InternVL with that feature."""

    def __init__(self, folder):
        self.__dict__ = load_model(folder).__dict__

    def sent_tensors(self, boundary):
        return SentTensors(features=("deep",) if MADE < boundary <= READ else ())

    def build_layer(self, index, **options):
        layer = super().build_layer(index, **options)
        if index in (MADE, READ):
            layer.register_forward_hook(put_out if index == MADE else read)
        return layer


def put_out(layer, arguments, payload):
    return payload.replace(features={"deep": payload.hidden.mean(1)})


def read(layer, arguments, payload):
    return payload.replace(hidden=payload.hidden + 0.1 * payload.features["deep"].square().sum())
