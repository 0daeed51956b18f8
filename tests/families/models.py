"""A small model of each family: its transformers configuration and its image processor, neither with weights."""

import sys
from copy import deepcopy
from importlib.util import find_spec
from types import ModuleType
from unittest import mock

import torch
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing
from transformers import (
    AutoModelForImageTextToText,
    AutoTokenizer,
    AyaVisionConfig,
    DeepseekVLConfig,
    Gemma3Config,
    Gemma4Config,
    Glm4vConfig,
    Idefics3Config,
    InternVLConfig,
    InternVLProcessor,
    Lfm2VlConfig,
    LlavaConfig,
    LlavaNextConfig,
    LlavaNextProcessor,
    LlavaOnevisionConfig,
    LlavaOnevisionProcessor,
    LlavaProcessor,
    Mistral3Config,
    PaliGemmaConfig,
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLProcessor,
    Qwen2VLConfig,
    Qwen2VLProcessor,
    Qwen3_5Config,
    Qwen3VLConfig,
    Qwen3VLMoeConfig,
    Qwen3VLProcessor,
    SmolVLMConfig,
)
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.deepseek_vl.image_processing_pil_deepseek_vl import DeepseekVLImageProcessorPil
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
from transformers.models.llava_next.image_processing_pil_llava_next import LlavaNextImageProcessorPil
from transformers.models.llava_onevision.image_processing_pil_llava_onevision import LlavaOnevisionImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor

from omnibal.families import FAMILIES

if find_spec("torchvision") is None:  # Qwen2-VL's processor imports it where it is there or not
    stand_in = ModuleType("torchvision.transforms.v2.functional")
    names = ["torchvision", "torchvision.transforms", "torchvision.transforms.v2", stand_in.__name__]
    with mock.patch.dict(sys.modules, {name: ModuleType(name) for name in names} | {names[-1]: stand_in}):
        from transformers.models.qwen2_vl.video_processing_qwen2_vl import Qwen2VLVideoProcessor
else:
    from transformers.models.qwen2_vl.video_processing_qwen2_vl import Qwen2VLVideoProcessor

# As in the folders that are published: LLaVA's kin put a turn's images before its text; LLaVA 1.5 ends no answer,
# LLaVA-OneVision has a space in earlier turns that is not in its prompt; Qwen brackets images, its first ones add a
# system message.
PARTS = "{% for part in message['content'] if part['type'] == 'PART' %}"
LLAVA = (
    "{% for message in messages %}{{ message['role'].upper() + ': ' }}"
    f"{PARTS.replace('PART', 'image')}<image>\n{{% endfor %}}"
    f"{PARTS.replace('PART', 'text')}{{{{ part['text'] + ' ' }}}}{{% endfor %}}{{% endfor %}}"
    "{% if add_generation_prompt %}ASSISTANT:{% endif %}"
)
NEXT = (
    "{% for message in messages %}{% if message['role'] == 'user' %}[INST] "
    f"{PARTS.replace('PART', 'image')}<image>\n{{% endfor %}}"
    f"{PARTS.replace('PART', 'text')}{{{{ part['text'] }}}}{{% endfor %}} [/INST]"
    "{% else %} {{ message['content'][0]['text'] }}</s> {% endif %}{% endfor %}"
)
ONEVISION = (
    "{% for message in messages %}<|im_start|>{{ message['role'] + ' ' }}"
    f"{PARTS.replace('PART', 'image')}<image>{{% endfor %}}"
    f"{PARTS.replace('PART', 'text')}{{{{ '\n' + part['text'] }}}}{{% endfor %}}<|im_end|>{{% endfor %}}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
QWEN3 = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% for part in message['content'] %}{% if part['type'] == 'image' %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% elif part['type'] == 'video' %}"
    "<|vision_start|><|video_pad|><|vision_end|>{% else %}{{ part['text'] }}{% endif %}{% endfor %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SYSTEM = "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
QWEN = QWEN3.replace(
    "messages %}", f"messages %}}{{% if loop.first and message['role'] != 'system' %}}{SYSTEM}{{% endif %}}", 1
)
TEMPLATES = {
    "llava": LLAVA, "llava_next": NEXT, "llava_onevision": ONEVISION,
    "qwen2_vl": QWEN, "qwen2_5_vl": QWEN, "qwen3_vl": QWEN3,
}  # fmt: skip
BEGIN_TEXTS = ("llava", "llava_next")
"""Whose tokenizers put a token before each text."""
TILE, PATCH = 12, 4
TEXT = {
    "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 640, "head_dim": 6,
}  # fmt: skip
MROPE = {"rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 1]}}
TOWER = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
    "image_size": TILE, "patch_size": PATCH,
}  # fmt: skip
PINPOINTS = [[TILE * rows, TILE * columns] for rows in range(1, 7) for columns in range(1, 7)]


CLIP = {"model_type": "clip_vision_model", **TOWER}
SIGLIP = {"model_type": "siglip_vision_model", "vision_use_head": False, **TOWER}
TILES = TOWER | {"image_size": [16, 16]}
NATIVE = {"depth": 4, "num_heads": 4, "patch_size": PATCH, "hidden_size": 32}
NATIVE_MLP = NATIVE | {"intermediate_size": 48, "out_hidden_size": 24}
DEEP = {"num_position_embeddings": 16, "deepstack_visual_indexes": [2, 0]}
SEEING = tuple(model_type for model_type, family in FAMILIES.items() if family.sound_rule is None)
"""Those that hear are in tests/integrations/sounds.py."""
CONFIGS = {
    "internvl": (InternVLConfig, TILES, {"model_type": "qwen2"}, {"tie_word_embeddings": False}),
    "llava": (LlavaConfig, CLIP, {"model_type": "llama"}, {}),
    "deepseek_vl": (DeepseekVLConfig, SIGLIP, {"model_type": "llama"}, {"tie_word_embeddings": False}),  # from outside
    "llava_next": (LlavaNextConfig, CLIP, {"model_type": "mistral"}, {"image_grid_pinpoints": PINPOINTS}),
    "llava_onevision": (LlavaOnevisionConfig, SIGLIP, {"model_type": "qwen2"}, {"image_grid_pinpoints": PINPOINTS}),
    "qwen2_vl": (Qwen2VLConfig, NATIVE | {"embed_dim": 32, "hidden_size": 24, "mlp_ratio": 2}, MROPE, {}),
    "qwen2_5_vl": (Qwen2_5_VLConfig, NATIVE_MLP | {"window_size": 32, "fullatt_block_indexes": [1, 3]}, MROPE, {}),
    "qwen3_vl": (Qwen3VLConfig, NATIVE_MLP | DEEP, MROPE, {}),
}
"""The configuration's class, its vision and text parts, and what else it says."""
# Families that a pipeline does not know: drop-ins train them.
SQUARE = TOWER | {"image_size": 16}
UNNAMED = {"pad_token_id": None}
HEADLESS = {"model_type": "siglip_vision_model", "vision_use_head": False}
ROPE = {"rope_parameters": MROPE["rope_parameters"] | {"rope_theta": 1e4}}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LINEAR = {"linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 2}
PATCHES = {name: TOWER[name] for name in TOWER if name != "image_size"}
LFM = {"model_type": "lfm2", "full_attn_idxs": [1], "block_auto_adjust_ff_dim": False}
PIXTRAL = {"model_type": "pixtral", "image_size": 64, "head_dim": 8}
DROPPED_IN = {
    "idefics3": (Idefics3Config, SQUARE, {"model_type": "llama"}, {"scale_factor": 2}),
    "smolvlm": (SmolVLMConfig, SQUARE, {"model_type": "llama"}, {"scale_factor": 2}),
    "gemma3": (
        Gemma3Config, SQUARE | {"vision_use_head": False}, {"sliding_window": 6}, {"mm_tokens_per_image": 4}
    ),
    "gemma4": (
        Gemma4Config,
        {"pooling_kernel_size": 2, "num_key_value_heads": 4, "head_dim": 8, "position_embedding_size": 64} | PATCHES,
        {"use_bidirectional_attention": "vision", "sliding_window": 6, "hidden_size_per_layer_input": 4}
        | {"vocab_size_per_layer_input": 640, "global_head_dim": 8, "pad_token_id": 0},
        {"audio_config": None},
    ),
    "paligemma": (
        PaliGemmaConfig, SQUARE | HEADLESS | {"projection_dim": 24}, {"model_type": "gemma"}, {"projection_dim": 24}
    ),
    "qwen3_vl_moe": (Qwen3VLMoeConfig, NATIVE_MLP | DEEP, MROPE | EXPERTS, {}),
    "qwen3_5": (
        Qwen3_5Config, NATIVE_MLP | {"num_position_embeddings": 16}, LINEAR | ROPE | {"num_hidden_layers": 4}, {}
    ),
    "aya_vision": (AyaVisionConfig, SQUARE | HEADLESS, {"model_type": "cohere2"}, {}),
    "glm4v": (Glm4vConfig, NATIVE_MLP | {"image_size": 16}, ROPE, {}),
    "lfm2_vl": (
        Lfm2VlConfig, SQUARE | HEADLESS | {"model_type": "siglip2_vision_model", "num_patches": 16}, LFM,
        {"projector_hidden_size": 32},
    ),
    "mistral3": (Mistral3Config, SQUARE | PIXTRAL, {"model_type": "mistral"}, {}),
}  # fmt: skip
IMAGE_TOKEN_INDEX = ("llava", "llava_next", "llava_onevision", "gemma3", "paligemma", "aya_vision", "mistral3")
"""Families that call the image token's id so."""


def small_config(model_type, *, image_token_id=600, text_tied=False, vision=None, text=None, **options):
    """The configuration of a small model; ``vision`` and ``text`` change that of its ViT and of its language model."""
    config_class, own_vision, own_text, further = (CONFIGS | DROPPED_IN)[model_type]
    tied = {"tie_word_embeddings": text_tied} if model_type in CONFIGS else UNNAMED
    # Classes write their defaults into what they are given: the next family's configuration must not find them there.
    vision, text = deepcopy((own_vision | (vision or {}), TEXT | tied | own_text | (text or {})))
    token = {"image_token_index" if model_type in IMAGE_TOKEN_INDEX else "image_token_id": image_token_id}
    video = {"video_token_id": image_token_id + 1} if "qwen" in model_type else {}
    return config_class(vision_config=vision, text_config=text, **further | token | video | options)


def image_processor(model_type):
    """The processor that comes with such a model."""
    square = {"height": TILE, "width": TILE}
    match model_type:
        case "internvl":
            tiles = {"crop_to_patches": True, "min_patches": 1, "max_patches": 6}
            return GotOcr2ImageProcessorPil(size={"height": 16, "width": 16}, **tiles)
        case "llava":
            return CLIPImageProcessorPil(size={"shortest_edge": TILE}, crop_size=square)
        case "deepseek_vl":
            return DeepseekVLImageProcessorPil(size=square, min_size=PATCH)
        case "llava_next":
            return LlavaNextImageProcessorPil(
                size={"shortest_edge": TILE}, crop_size=square, image_grid_pinpoints=PINPOINTS
            )
        case "llava_onevision":
            return LlavaOnevisionImageProcessorPil(size=square, image_grid_pinpoints=PINPOINTS)
    return Qwen2VLImageProcessorPil(patch_size=PATCH, size={"shortest_edge": 16 * 16, "longest_edge": 64 * 64})


VIDEO_PROCESSORS = {
    "qwen2_vl": Qwen2VLVideoProcessor, "qwen2_5_vl": Qwen2VLVideoProcessor, "qwen3_vl": Qwen3VLVideoProcessor,
}  # fmt: skip
PROCESSORS = {
    "internvl": InternVLProcessor,
    "llava": LlavaProcessor,
    "llava_next": LlavaNextProcessor,
    "llava_onevision": LlavaOnevisionProcessor,
    "qwen2_vl": Qwen2VLProcessor,
    "qwen2_5_vl": Qwen2_5_VLProcessor,
    "qwen3_vl": Qwen3VLProcessor,
    "qwen3_vl_moe": Qwen3VLProcessor,
}


def video_processor(model_type, **options):
    """The video processor that comes with such a model; it samples two frames a second."""
    size = {"shortest_edge": 16 * 16, "longest_edge": 64 * 64 * (4 if model_type == "qwen3_vl" else 1)}
    sampling = {"fps": 2, "do_sample_frames": True, "min_frames": 2, "max_frames": 10, "cap_pixels_per_frame": False}
    return VIDEO_PROCESSORS[model_type](**{"patch_size": PATCH, "size": size} | sampling | options)


def whole_processor(model_type, images, *, token="I"):
    """The part of transformers' own processor that expands image tokens: most of them need torchvision to be made."""
    processor = object.__new__(PROCESSORS[model_type])
    vars(processor).update(image_processor=images, image_token=token)
    if model_type == "internvl":
        vars(processor).update(image_seq_length=4, start_image_token="", end_image_token="")
    elif "llava" in model_type:
        strategy = "full" if model_type == "llava_onevision" else "default"
        vars(processor).update(
            patch_size=PATCH,
            num_additional_image_tokens=1,
            vision_feature_select_strategy=strategy,
            num_image_tokens=(TILE // PATCH) ** 2,
            vision_aspect_ratio="anyres_max_9",
        )
    return processor


def image_token(model_type):
    """What stands for a piece of an image in a text."""
    return "<|image_pad|>" if "qwen" in model_type else "<image>"


def tokenizer_of(model_type, folder):
    """The demo's tokenizer with a family's tokens and chat template."""
    backend = Tokenizer.from_str(AutoTokenizer.from_pretrained(folder).backend_tokenizer.to_str())
    brackets = ["<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|video_pad|>"]
    backend.add_special_tokens(["<s>", "</s>", "<image>", *brackets])
    named = {"eos_token": "<|im_end|>"}
    if model_type in BEGIN_TEXTS:
        backend.post_processor = TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", backend.token_to_id("<s>"))]
        )
        named = {"bos_token": "<s>", "eos_token": "</s>"}
    template = TEMPLATES.get(model_type, LLAVA)
    return PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=template, pad_token="<|endoftext|>", **named)


def save_folder(model_type, folder, demo, *, weights=False):
    """Saves a small model as people have it, with random weights if asked for; returns its tokenizer.

    ``demo`` is the demo's folder, whose tokenizer's words it gets.
    """
    tokenizer = tokenizer_of(model_type, demo)
    config = small_config(model_type, image_token_id=tokenizer.convert_tokens_to_ids(image_token(model_type)))
    config.text_config.vocab_size = len(tokenizer)
    videos = []
    if model_type in VIDEO_PROCESSORS:
        config.video_token_id = tokenizer.convert_tokens_to_ids("<|video_pad|>")
        videos = [video_processor(model_type)]
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        setattr(config.text_config, name, None)
    config.text_config.initializer_range = 0.3  # with smaller weights, positions hardly matter to so small a model
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config) if weights else config
    for part in (model, tokenizer, image_processor(model_type), *videos):
        part.save_pretrained(folder)
    return tokenizer
