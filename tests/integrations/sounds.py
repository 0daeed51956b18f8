"""Small models that hear, and samples with sounds, images, both and neither."""

import json
from copy import deepcopy

import torch
from tokenizers import Tokenizer
from transformers import (
    AutoTokenizer,
    PreTrainedTokenizerFast,
    Qwen2_5OmniThinkerConfig,
    Qwen2_5OmniThinkerForConditionalGeneration,
    Qwen2AudioConfig,
    Qwen2AudioForConditionalGeneration,
    Qwen2AudioProcessor,
    WhisperFeatureExtractor,
)
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from tests.families.models import MROPE, NATIVE_MLP, PATCH, TEXT

SOUND_MODELS = {
    "qwen2_audio": Qwen2AudioForConditionalGeneration,
    "qwen2_5_omni_thinker": Qwen2_5OmniThinkerForConditionalGeneration,
}
IMAGE_TOKEN, VIDEO_TOKEN, SOUND_TOKEN = 600, 601, 602
IMAGE_BEGINS, IMAGE_ENDS, SOUND_BEGINS, SOUND_ENDS = 603, 604, 605, 606
MELS, FRAMES = 8, 60
HEARING = {
    "num_mel_bins": MELS, "d_model": 16, "encoder_layers": 2, "encoder_attention_heads": 2, "encoder_ffn_dim": 24,
    "max_source_positions": FRAMES // 2,
}  # fmt: skip
SOUNDS = [
    ([33], [(4, 4)], 7),
    ([], [], 5),
    ([60, 7], [], 9),
    ([], [(2, 6), (4, 8)], 4),
    ([12], [(6, 4)], 6),
    ([21], [], 12),
    ([], [], 30),
    ([50], [(4, 4)], 5),
    ([9], [], 8),
    ([], [(8, 4)], 11),
    ([44], [], 6),
]
"""Of each sample the frames of its sounds, the (rows, columns) of its images' patches, and its words."""


def sound_config(model_type):
    """The configuration of a small model."""
    text = TEXT | {"num_hidden_layers": 2}
    if model_type == "qwen2_audio":
        return Qwen2AudioConfig(
            audio_config=dict(HEARING), text_config={"model_type": "qwen2", **text}, audio_token_index=SOUND_TOKEN
        )
    tokens = {"audio_token_index": SOUND_TOKEN, "image_token_index": IMAGE_TOKEN, "video_token_index": VIDEO_TOKEN}
    tokens |= {"vision_start_token_id": IMAGE_BEGINS, "audio_start_token_id": SOUND_BEGINS}
    return Qwen2_5OmniThinkerConfig(
        audio_config=HEARING | {"n_window": 10, "output_dim": 24},
        vision_config=NATIVE_MLP | {"window_size": 32, "fullatt_block_indexes": [1, 3]},
        text_config=deepcopy(text | MROPE) | {"num_hidden_layers": 2},  # the class writes its defaults into it
        **tokens,
    )


def sound_items(model_type):
    """Samples for such a model; Qwen2-Audio sees no images."""
    generator = torch.Generator().manual_seed(7)
    return [
        sound_item(sounds, [] if model_type == "qwen2_audio" else images, words, generator)
        for sounds, images, words in SOUNDS
    ]


def sound_item(sounds, images, words, generator):
    """A sample with sounds of so many frames and images of so many patches, words between; the last half is learned."""
    text = torch.randint(4, IMAGE_TOKEN, (words,), generator=generator).tolist()
    ids = text[:1]
    for frames in sounds:
        ids += [SOUND_BEGINS, *[SOUND_TOKEN] * ((((frames - 1) // 2 + 1) - 2) // 2 + 1), SOUND_ENDS]
    for rows, columns in images:
        ids += [IMAGE_BEGINS, *[IMAGE_TOKEN] * (rows * columns // 4), IMAGE_ENDS]
    ids += text[1:]
    labels = [-100] * (len(ids) - words // 2) + ids[len(ids) - words // 2 :]
    # Qwen2.5-Omni counts positions in three rows only where it gets a mask.
    item = {"input_ids": torch.tensor(ids), "labels": torch.tensor(labels), "attention_mask": torch.ones(1, len(ids))}
    item["pixel_values"] = None
    if sounds:
        mask = (torch.arange(FRAMES) < torch.tensor(sounds)[:, None]).long()
        item["input_features"] = torch.randn(len(sounds), MELS, FRAMES, generator=generator) * mask[:, None]
        item["feature_attention_mask"] = mask
    if images:
        patches = sum(rows * columns for rows, columns in images)
        item["pixel_values"] = torch.randn(patches, 3 * 2 * PATCH**2, generator=generator)
        item["image_grid_thw"] = torch.tensor([(1, *sides) for sides in images])
    return item


def sound_items_of_kinds(kinds):
    """A sample of each kind, such as ``"image+sound"``, of unlike sizes."""
    generator = torch.Generator().manual_seed(5)
    return [
        sound_item(
            [11 + 7 * (number % 6)] * kind.count("sound"),
            [(2 + 2 * (number % 3), 4)] * kind.count("image"),
            6 + number % 5,
            generator,
        )
        for number, kind in enumerate(kinds)
    ]


OMNI_TEMPLATE = (
    "{% for message in messages %}{% if loop.first and message['role'] != 'system' %}<|im_start|>system\n"
    "You are a helpful assistant.<|im_end|>\n{% endif %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}<|im_end|>\n{% else %}"
    "{% for content in message['content'] %}{% if content['type'] == 'image' %}<|vision_bos|><|IMAGE|><|vision_eos|>"
    "{% elif content['type'] == 'audio' %}<|audio_bos|><|AUDIO|><|audio_eos|>"
    "{% elif 'text' in content %}{{ content['text'] }}{% endif %}{% endfor %}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""As published, without the numbers of pictures that it may write."""


def save_sound_folder(model_type, folder, demo, *, seconds=2, weights=False):
    """Saves a small model that hears as people have it; returns its tokenizer and its feature extractor."""
    backend = Tokenizer.from_str(AutoTokenizer.from_pretrained(demo).backend_tokenizer.to_str())
    backend.add_special_tokens([f"<|{name}|>" for name in (*BRACKETS, "AUDIO", "IMAGE")])
    template = OMNI_TEMPLATE
    if model_type == "qwen2_audio":
        template = Qwen2AudioProcessor.default_chat_template.fget(None)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, chat_template=template, pad_token="<|endoftext|>", eos_token="<|im_end|>"
    )
    config = sound_config(model_type)
    config.audio_token_index = backend.token_to_id("<|AUDIO|>")
    config.image_token_index = backend.token_to_id("<|IMAGE|>")
    config.text_config.vocab_size = len(tokenizer)
    extractor = WhisperFeatureExtractor(feature_size=MELS, chunk_length=seconds)
    config.audio_config.max_source_positions = 50 * seconds
    for part in (SOUND_MODELS[model_type](config) if weights else config, tokenizer, extractor):
        part.save_pretrained(folder)
    if model_type == "qwen2_5_omni_thinker":  # published folders keep both in one file
        images = Qwen2VLImageProcessorPil(patch_size=PATCH, min_pixels=8**2, max_pixels=32**2)
        settings = {**images.to_dict(), **extractor.to_dict()}
        (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    return tokenizer, extractor


BRACKETS = ("audio_bos", "audio_eos", "vision_bos", "vision_eos")
