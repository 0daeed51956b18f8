"""Random training runs: models, cuts, packs and settings; and what their processes run."""

from random import Random

from transformers import LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from tests.engine.cases import engine_of, weights_of
from tests.engine.small import NUM_LAYERS, SHAPES, Case

STEPS = 3
CLIPPING = 0.05
# Adam divides by the size of a gradient: its usual epsilon would make full steps of a zero that rounding blurs.
ADAM = {"lr": 3e-3, "betas": [0.9, 0.99], "weight_decay": 0.01, "eps": 1e-3}
TEXT_CLASSES = (Qwen2Config, Qwen3Config, LlamaConfig, MistralConfig)
VISION_OPTIONS = (
    {},
    {"norm_type": "rms_norm", "use_qk_norm": True, "attention_bias": True},
    {"use_mask_token": True, "use_mean_pooling": False},
)
VISION, TEXT = ("patch_embedding", "vision_block"), ("text_embedding", "decoder_block", "final_norm", "head")
FROZEN = ((), (), VISION, (*VISION, "projector"), TEXT, (*VISION, *TEXT), ("decoder_block",), ("projector",))
BFLOAT16 = {"bf16": {"enabled": True}}
PRECISIONS = {
    "float32": {},
    "bfloat16": BFLOAT16,
    "bfloat16, summed in float32": BFLOAT16 | {"data_types": {"grad_accum_dtype": "fp32"}},
}


def random_model(random):
    """Options of a small model."""
    return {
        "tied": random.random() < 0.5,
        "text_class": random.choice(TEXT_CLASSES),
        **random.choice(VISION_OPTIONS),
    }


def random_case(random, num_processes, model):
    """A run on all processes, in one of the ways in which stages and replicas can share them."""
    num_stages = random.choice([stages for stages in range(1, num_processes + 1) if num_processes % stages == 0])
    num_replicas, micro_batches = num_processes // num_stages, random.randint(1, 4)
    zero_stage, precision = random.choice([(0, "float32"), (0, "bfloat16"), *((1, name) for name in PRECISIONS)])
    clips = random.random() < 0.5 and not (num_stages > 1 and zero_stage == 0 and precision == "float32")
    schedule = random.choice(("1f1b", "zero-bubble", "zero-bubble-lean"))
    packs, *later = [random_packs(random, num_replicas, micro_batches) for _ in range(STEPS)]
    settings = {"optimizer": {"type": "AdamW", "params": ADAM | {"torch_adam": True}}, **PRECISIONS[precision]}
    return Case(
        (0, *sorted(random.sample(range(1, NUM_LAYERS), num_stages - 1)), NUM_LAYERS),
        packs,
        model,
        tuple(random.choice(("none", "selective", "full")) for _ in range(NUM_LAYERS)),
        zero_stage,
        STEPS,
        settings | {"gradient_clipping": CLIPPING if clips else 0.0},
        schedule,
        random.choice(FROZEN),
        pending_bytes=random.choice((None, 0, 3000, 30_000)),
        later_packs=later,
    )


def random_packs(random, num_replicas, micro_batches):
    """All samples on packs, some of which stay empty; only some replicas get pictures."""
    packs = [[[] for _ in range(micro_batches)] for _ in range(num_replicas)]
    with_pictures = random.sample(packs, random.randint(1, num_replicas))
    for sample, (tiles, _) in enumerate(SHAPES):
        random.choice(random.choice(with_pictures if tiles else packs)).append(sample)
    return packs


def cases_of(seed, count, num_processes, folder_of):
    """``count`` cases, the same ones for the same seed.

    Args:
        folder_of: From a model's options to its folder.
    """
    random = Random(seed)
    return [random_case(random, num_processes, folder_of(random_model(random))) for _ in range(count)]


def train_all(cases):
    """Losses, gradient norms (None where the optimizer finds none) and final weights, as this rank has them."""
    return [_train(case) for case in cases]


def _train(case):
    engine = engine_of(case)
    losses, norms = [], []
    for _ in range(case.steps):
        losses.append(engine.train_batch().item())
        norm = engine.get_global_grad_norm()
        norms.append(None if norm is None else float(norm))
    return {"losses": losses, "norms": norms, "weights": weights_of(engine), "skipped": engine.skipped_steps}
