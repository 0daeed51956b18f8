"""How the processes of a launch meet."""

import os

import pytest
from accelerate import Accelerator, DeepSpeedPlugin
from accelerate.utils import DistributedType
from deepspeed.comm import comm

from omnibal.engine.initialize import meet
from omnibal.errors import ConfigError
from tests.engine.launch import launch


def test_a_process_without_a_launcher_is_told_of_it(monkeypatch):
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    with pytest.raises(ConfigError, match="processes must be started by a launcher, got no LOCAL_RANK"):
        meet("gloo")


def kind_of_accelerator(*, plugin):
    """On each process, as a Trainer with DeepSpeed and one without make it."""
    os.environ["LOCAL_WORLD_SIZE"] = os.environ["WORLD_SIZE"]
    plugins = {"deepspeed_plugin": DeepSpeedPlugin(zero_stage=2)} if plugin else {}
    return Accelerator(cpu=not plugin, **plugins).distributed_type


def with_deepspeed():
    return kind_of_accelerator(plugin=True)


def without_deepspeed():
    return kind_of_accelerator(plugin=False)


def shared_memory():
    return comm.cdb.shm_comm_op


def test_no_extension_is_compiled_to_meet():
    assert launch(2, "tests.engine.test_meeting:shared_memory") == [None, None]


def test_a_launch_leaves_nothing_of_its_trainers_to_the_next_one():
    kinds = [launch(2, f"tests.engine.test_meeting:{name}") for name in ("with_deepspeed", "without_deepspeed")]
    assert kinds == [[DistributedType.DEEPSPEED] * 2, [DistributedType.MULTI_CPU] * 2]
