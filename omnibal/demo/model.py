"""The demo's model folder: a tokenizer, a preprocessor and the configuration of a small InternVL, without weights."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import InternVLConfig, InternVLVisionConfig, PreTrainedTokenizerFast, Qwen2Config

TILE_SIZE, PATCH_SIZE = 56, 14
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<img>", "</img>", "<IMG_CONTEXT>", "<video>")
MAX_VOCABULARY = 1024
PREPROCESSOR = {
    "image_processor_type": "GotOcr2ImageProcessor", "crop_to_patches": True, "min_patches": 1, "max_patches": 4,
    "size": {"height": TILE_SIZE, "width": TILE_SIZE}, "image_mean": [0.1, 0.1, 0.1], "image_std": [0.3, 0.3, 0.3],
}  # fmt: skip

# ChatML as InternVL's own checkpoints write it: an image is its token and a line break.
CHAT_TEMPLATE = """{%- for message in messages -%}
{{- '<|im_start|>' + message['role'] + '\\n' -}}
{%- if message['content'] is string -%}{{- message['content'] -}}{%- else -%}
{%- for part in message['content'] -%}
{{- '<IMG_CONTEXT>\\n' if part['type'] == 'image' else part['text'] -}}
{%- endfor -%}{%- endif -%}
{{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"""


def write_model_folder(folder: Path, texts: Iterable[str]) -> None:
    """Write ``config.json``, ``preprocessor_config.json`` and a tokenizer whose merges are learned from the texts."""
    tokenizer = train_tokenizer(texts)
    tokenizer.save_pretrained(folder)
    small_config(tokenizer).save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(PREPROCESSOR, indent=2) + "\n")


def train_tokenizer(texts: Iterable[str]) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer like Qwen2's, which knows any text, and the words of ``texts`` as single tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    specials = [AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=MAX_VOCABULARY, special_tokens=specials, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    wrap: Any = PreTrainedTokenizerFast  # untyped in transformers
    return wrap(  # type: ignore[no-any-return]
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>", chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        extra_special_tokens={
            "start_image_token": "<img>", "end_image_token": "</img>", "context_image_token": "<IMG_CONTEXT>",
            "video_token": "<video>",
        },
    )  # fmt: skip


def small_config(tokenizer: PreTrainedTokenizerFast) -> InternVLConfig:
    """A small InternVL, 0.8 million parameters, that learns the demo's questions in minutes on a CPU."""
    # Matrices so small need larger initial weights than the usual 0.02, with which nothing is learned for many hundred
    # steps; ViT blocks that begin close to the identity (layer scale 0.1) let the projector see the patches at once.
    vision = InternVLVisionConfig(
        hidden_size=96, intermediate_size=192, num_hidden_layers=4, num_attention_heads=4, image_size=TILE_SIZE,
        patch_size=PATCH_SIZE, attention_bias=True, layer_scale_init_value=0.1, initializer_range=0.1,
    )  # fmt: skip
    text = Qwen2Config(
        vocab_size=len(tokenizer), hidden_size=96, intermediate_size=192, num_hidden_layers=4, num_attention_heads=6,
        num_key_value_heads=6, max_position_embeddings=2048, initializer_range=0.06, tie_word_embeddings=False,
        bos_token_id=None, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    return InternVLConfig(
        vision_config=vision,
        text_config=text,
        image_token_id=tokenizer.get_vocab()["<IMG_CONTEXT>"],
        # pixel shuffle makes one token of two by two patches
        image_seq_length=(TILE_SIZE // PATCH_SIZE // 2) ** 2,
        downsample_ratio=0.5,
        tie_word_embeddings=False,
        architectures=["InternVLForConditionalGeneration"],
    )
