import pytest
import torch
from accelerate.utils import memory


@pytest.fixture(autouse=True)
def no_garbage_is_collected_at_the_end_of_a_training(monkeypatch):
    """Trainers collect it, which takes as long as a small training; a GPU's memory is needed again."""
    if not torch.cuda.is_available():
        monkeypatch.setattr(memory, "clear_device_cache", lambda garbage_collection=False: None)
