"""The errors that omnibal raises on purpose.

Messages follow one form: ``<name> must <rule>, got <value>[; <remedy>]``.
"""


class OmnibalError(Exception):
    """Base of every error that omnibal raises on purpose."""


class ConfigError(OmnibalError, ValueError):
    """A setting is wrong: an argument, a key of a configuration file, a plan that does not fit."""


class DataError(OmnibalError, ValueError):
    """A dataset or one of its samples is wrong; the message names the file and the line or the sample."""


class InfeasibleError(OmnibalError):
    """No solution exists under the given limits; the message says by how much they are missed."""
