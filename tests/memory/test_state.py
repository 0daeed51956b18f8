"""Bytes of parameters, gradients and optimizer state by hand; tests/engine/test_memory.py has those of DeepSpeed."""

import pytest

from omnibal.cluster import Layout
from omnibal.memory.footprint import TrainingState
from tests.memory.models import block, model


def state_of(*, dtype, numbers=120, frozen=0, **layout):
    """Of a layer with so many trained parameters and a frozen one."""
    size = {"bfloat16": 2, "float32": 4}[dtype]
    optimizer = numbers * (8 if size == 4 else 12)  # two moments, and master weights
    layers = [
        block("block.0", parameter_bytes=size * numbers, gradient_bytes=size * numbers, optimizer_bytes=optimizer),
        block("block.1", parameter_bytes=size * frozen, trainable=False),
    ]
    return TrainingState(model(layers, dtype=dtype), Layout(precision=dtype, **layout))


@pytest.mark.parametrize(
    ("dtype", "setup", "parameters", "gradients", "optimizer", "update"),
    [
        ("float32", {"zero_stage": 0}, 4, 4, 8, 4),  # gradients on their way
        ("float32", {"zero_stage": 1}, 4, 4, 12, 12 - 4),  # master weights too; a flat gradient, two temporaries
        ("bfloat16", {"zero_stage": 0}, 2, 2 + 2, 12, 12),
        ("bfloat16", {"zero_stage": 1, "accumulate_float32": False}, 2, 2, 12, 12 - 2),
        ("bfloat16", {"zero_stage": 1}, 2, 2 + 4, 12, 8),
        ("bfloat16", {"zero_stage": 1, "accumulate_float32": True}, 2, 2 + 4, 12, 8),
        ("float32", {"zero_stage": 0, "num_replicas": 3}, 4, 4, 8, 4),
        ("float32", {"zero_stage": 1, "num_replicas": 3}, 4, 4, 12 / 3, 4),
        ("bfloat16", {"zero_stage": 0, "num_replicas": 3}, 2, 2 + 2, 12 / 3, 12 / 3),
        ("bfloat16", {"zero_stage": 1, "num_replicas": 3, "accumulate_float32": False}, 2, 2, 12 / 3, 2),
        ("bfloat16", {"zero_stage": 1, "num_replicas": 12, "accumulate_float32": True}, 2, 2 + 4, 1, 2),
    ],
)
def test_bytes_of_a_trained_parameter(dtype, setup, parameters, gradients, optimizer, update):
    state = state_of(dtype=dtype, frozen=7, **setup)
    found = [matrix[0, 1] / 120 for matrix in (state.parameters, state.gradients, state.optimizer, state.update)]
    assert found == [parameters, gradients, optimizer, update]
    assert state.whole[0, 2] == state.whole[0, 1] + state.parameters[1, 2]
    assert state.parameters[1, 2] == 7 * parameters
    assert state.gradients[1, 2] == state.optimizer[1, 2] == state.update[1, 2] == 0


def test_deepspeed_reduces_so_many_gradients_at_once():
    state = state_of(dtype="bfloat16", numbers=2 * 10**9, num_replicas=64)
    assert state.update[0, 1] == 10**9
