"""What all tests share."""

from hypothesis import settings

# The first call of a compiled function takes long, and so may any on a busy machine.
settings.register_profile("omnibal", deadline=None)
settings.load_profile("omnibal")


def pytest_collection_modifyitems(items):
    """Let files that start processes run first: they take longest, and both workers then end together."""
    starting = {item.path for item in items if item.get_closest_marker("distributed")}
    items.sort(key=lambda item: item.path not in starting)
