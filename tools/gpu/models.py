"""Public models by their sizes, with random weights: what the measurements run."""

from transformers import InternVLConfig, InternVLVisionConfig, LlamaConfig, PretrainedConfig, Qwen2Config

from omnibal.vlm import load_model
from omnibal.vlm.layers import VisionLanguageModel

IMAGE_TOKEN = 3
_VIT_300M = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}
_VIT_6B = {"hidden_size": 3200, "num_hidden_layers": 45, "num_attention_heads": 25, "intermediate_size": 12800}
_NORMS_6B = {"use_qk_norm": True, "norm_type": "rms_norm", "attention_bias": False}


def _model(
    vision: dict[str, object], text: PretrainedConfig, *, tile: int = 448, tokens: int = 256
) -> VisionLanguageModel:
    config = InternVLConfig(
        vision_config=InternVLVisionConfig(image_size=tile, patch_size=14, **vision),
        text_config=text,
        image_token_id=IMAGE_TOKEN,
        image_seq_length=tokens,
        downsample_ratio=0.5,
        tie_word_embeddings=text.tie_word_embeddings,
    )
    return load_model(config)


def qwen2(width: int, layers: int, heads: int, kv_heads: int, intermediate: int, **others: object) -> Qwen2Config:
    """A Qwen2 language model."""
    return Qwen2Config(
        hidden_size=width, num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=kv_heads,
        intermediate_size=intermediate, vocab_size=151674, max_position_embeddings=32768, **others,
    )  # fmt: skip


def models(*, small: bool) -> dict[str, VisionLanguageModel]:
    """The models by name; small ones to try the measurements without a GPU."""
    if small:
        vit = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 128}
        text = Qwen2Config(
            hidden_size=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2, intermediate_size=128,
            vocab_size=512, max_position_embeddings=4096, tie_word_embeddings=False,
        )  # fmt: skip
        return {"tiny": _model(vit, text, tile=56, tokens=4)}
    internlm2 = LlamaConfig(
        hidden_size=6144, num_hidden_layers=48, num_attention_heads=48, num_key_value_heads=8, intermediate_size=16384,
        vocab_size=92553, max_position_embeddings=32768, tie_word_embeddings=False,
    )  # fmt: skip
    return {
        "1B (InternViT-300M, Qwen2.5-0.5B)": _model(_VIT_300M, qwen2(896, 24, 14, 2, 4864, tie_word_embeddings=True)),
        "8B (InternViT-300M, Qwen2.5-7B)": _model(_VIT_300M, qwen2(3584, 28, 28, 4, 18944, tie_word_embeddings=False)),
        "26B (InternViT-6B, InternLM2-20B)": _model({**_VIT_6B, **_NORMS_6B}, internlm2),
    }
