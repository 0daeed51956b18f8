from hypothesis import settings

# The first call of a compiled function takes long, and so may any on a busy machine.
settings.register_profile("omnibal", deadline=None)
settings.load_profile("omnibal")
