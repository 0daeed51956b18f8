"""What ends a script: omnibal's own errors in one line, all others with their tracebacks."""

import subprocess
import sys

import pytest

from omnibal.errors import ConfigError, DataError, InfeasibleError, OmnibalError, message_alone

SCRIPT = """
import sys
from omnibal.errors import ConfigError, DataError, end_in_one_line
heard = []
show = sys.excepthook
sys.excepthook = lambda kind, error, traceback: (print("told:", error), show(kind, error, traceback))
end_in_one_line()
end_in_one_line()
try:
    {}["limits"]
except KeyError as cause:
    raise RAISED from cause
"""


def ended(raised):
    return subprocess.run(
        [sys.executable, "-c", SCRIPT.replace("RAISED", raised)], capture_output=True, text=True, check=False
    )


def test_a_refusal_ends_a_script_in_one_line():
    done = ended("ConfigError('limits must be two numbers, got 1')")
    assert done.returncode == 1
    assert done.stderr == "omnibal.errors.ConfigError: limits must be two numbers, got 1\n"
    assert done.stdout == "told: limits must be two numbers, got 1\n", "hooks that were there before hear of it"


def test_other_errors_keep_their_tracebacks():
    done = ended("ValueError('limits')")
    assert done.returncode == 1
    assert done.stderr.count("Traceback") == 2
    assert done.stderr.endswith("ValueError: limits\n")


@pytest.mark.parametrize("kind", [OmnibalError, ConfigError, DataError, InfeasibleError])
def test_what_a_worker_raised_is_said_without_its_traceback(kind):
    text = f"Caught {kind.__name__} in DataLoader worker process 0.\nOriginal Traceback (most recent call last):\n"
    error = kind(f"{text}  File ...\nomnibal.errors.{kind.__name__}: sample 3 must be read, got nothing\n")
    assert message_alone(error) == "sample 3 must be read, got nothing"
    assert message_alone(kind("sample 3")) == "sample 3"
