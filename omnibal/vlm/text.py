"""The language model's pipeline layers, shared by all families, around transformers' own modules."""

from collections.abc import Sequence
from functools import partial

from torch import Tensor, nn
from torch.nn import functional

from omnibal.errors import DataError
from omnibal.families.base import LayerRecord
from omnibal.loss import WHOLE, LogitsOf, Vocabulary, evaluation_statistics, summed_loss
from omnibal.vlm.attention import ExactRotary, attention_kwargs, sample_lengths
from omnibal.vlm.layers import LayerRecipe, PartsLayer
from omnibal.vlm.payload import Payload, counts_of
from omnibal.vlm.tensor import VocabularyPart, copy_of


class TextEmbedding(PartsLayer):
    embed_tokens: nn.Embedding

    def forward(self, payload: Payload) -> Payload:
        """From features (image_tokens, width) to hidden states (1, tokens, width)."""
        features = payload.hidden
        embedded: Tensor = self.embed_tokens(payload.input_ids)
        image = payload.input_ids == self.config.image_token_id
        # Counts that the host knows spare it a wait for the device.
        counts = counts_of([payload.cu_seq_lens])
        image_tokens = None if counts is None else counts.image_tokens
        image_tokens = int(image.sum()) if image_tokens is None else image_tokens
        if image_tokens != len(features):
            raise DataError(
                f"image tokens must be as many as image features, got {image_tokens} image tokens in input_ids "
                f"and {len(features)} features"
            )
        # Image tokens stand in the order of the features, image after image.
        merged = embedded.masked_scatter(image[..., None], features.to(embedded.dtype))
        return payload.replace(hidden=merged.contiguous())


class TiedEmbedding(TextEmbedding):
    """Embedding and head in one module, for models that tie them; its input says which of the two it is."""

    # A pipeline engine ties whole modules, and calls the same module at both ends of the model.
    tied_weights = ("embed_tokens.weight",)
    at_once = True
    vocabulary: Vocabulary = WHOLE

    def forward(self, payload: Payload) -> Payload:
        """Embed 2-D image features; judge 3-D hidden states, as ``Head`` does."""
        if payload.hidden.dim() == 2:
            return super().forward(payload)
        weight = self.embed_tokens.weight
        return _judged(self, payload, partial(functional.linear, weight=weight), list(self.embed_tokens.parameters()))


class DecoderBlock(PartsLayer):
    block: nn.Module
    rotary: ExactRotary

    def forward(self, payload: Payload) -> Payload:
        # transformers' own layer; the bounds keep attention within samples, in place of a mask.
        hidden = self.block(
            payload.hidden,
            position_ids=payload.position_ids,
            position_embeddings=self.rotary(payload.hidden, payload.position_ids, sample_lengths(payload.cu_seq_lens)),
            **attention_kwargs(payload.cu_seq_lens),
        )
        return payload.replace(hidden=hidden.contiguous())


class FinalNorm(PartsLayer):
    norm: nn.Module

    def forward(self, payload: Payload) -> Payload:
        return payload.replace(hidden=self.norm(payload.hidden).contiguous())


class Head(PartsLayer):
    """The head of a model that does not tie it to its embedding, and the loss."""

    at_once = True  # computes its gradients in the forward pass: `omnibal.loss.summed_loss`
    vocabulary: Vocabulary = WHOLE  # tensor ranks have a part of it
    lm_head: nn.Module

    def forward(self, payload: Payload) -> Payload:
        """From hidden states (1, tokens, width) to the sum of losses (), or when evaluating EVALUATION_STATISTICS."""
        return _judged(self, payload, self.lm_head, list(self.lm_head.parameters()))


def _judged(layer: Head | TiedEmbedding, payload: Payload, head: LogitsOf, parameters: list[nn.Parameter]) -> Payload:
    if "targets" not in payload.integers:  # logits of all rows, (1, tokens, vocab), for answers
        return payload.replace(hidden=head(payload.hidden).contiguous())
    # Before the product: of rows without a target nothing is computed.
    rows, words = payload.hidden[0].index_select(0, payload.integers["target_rows"]), layer.vocabulary
    if isinstance(words, VocabularyPart):
        rows = copy_of(rows, words.ranks)
    if layer.training:
        targets = payload.integers["targets"]
        return payload.replace(hidden=summed_loss(head, parameters, rows, targets, vocabulary=words))
    return payload.replace(hidden=evaluation_statistics(head, rows, payload.integers, words))


def text_recipes(records: Sequence[LayerRecord]) -> tuple[LayerRecipe, ...]:
    """Recipes of the layers from text embedding to head, the last of ``records``."""
    num_blocks, tied = [record.kind for record in records].count("decoder_block"), records[-1].tied_key is not None
    language_model = "model.language_model"  # where transformers' vision-language models have it
    embed_tokens = {"embed_tokens": f"{language_model}.embed_tokens"}
    rotary = {"rotary": f"{language_model}.rotary_emb"}
    return (
        LayerRecipe(TiedEmbedding if tied else TextEmbedding, embed_tokens),
        *(LayerRecipe(DecoderBlock, {"block": f"{language_model}.layers.{i}"} | rotary) for i in range(num_blocks)),
        LayerRecipe(FinalNorm, {"norm": f"{language_model}.norm"}),
        LayerRecipe(TiedEmbedding, embed_tokens) if tied else LayerRecipe(Head, {"lm_head": "lm_head"}),
    )
