from accelerate.utils import memory


def pytest_runtest_setup():
    """Trainers collect garbage at their ends, which takes as long as a small training."""
    memory.clear_device_cache = lambda garbage_collection=False: None
