"""Transfers end whatever NCCL makes of the order in which they are started: recorded from the engine, and replayed."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from omnibal.cluster import Encoder, Layout
from omnibal.engine.engine import OmnibalEngine
from omnibal.engine.transfers import describe, read_description
from omnibal.pipeline.schedule import one_f_one_b, schedule_of, zero_bubble, zero_bubble_lean
from omnibal.vlm.payload import PackCounts, note_counts
from tests.engine.nccl import ALL_RULES, MILDEST, STRICTEST, Kernel, Post, Rules, Wait, deadlock
from tests.engine.recording import RecordedEngine, record

TABLES = {
    "1F1B as a table": one_f_one_b,
    "zero-bubble": zero_bubble,
    "zero-bubble-lean": zero_bubble_lean,
    "zero-bubble of uneven lags": lambda stages, micro_batches: zero_bubble(
        stages, micro_batches, max_lag=tuple((3 * stage + 1) % 5 for stage in range(stages))
    ),
}


@pytest.mark.parametrize("counts", [None, PackCounts(7, (3, 1, 12)), PackCounts(0, (1,) * 1000)])
def test_a_description_tells_shapes_and_counts(counts):
    payload = torch.zeros(4, 0, 3), torch.zeros(1, 9, dtype=torch.int64), torch.zeros(3, dtype=torch.int32)
    note_counts(payload, counts)
    shapes, told = read_description(describe(payload))
    assert shapes == [(torch.float32, (4, 0, 3)), (torch.int64, (1, 9)), (torch.int32, (3,))]
    assert told == counts


def test_counts_that_do_not_fit_into_a_description_are_left_out():
    payload = (torch.zeros(3),)
    note_counts(payload, PackCounts(0, (1,) * 4086))
    assert read_description(describe(payload))[1] is not None
    note_counts(payload, PackCounts(0, (1,) * 4087))
    assert read_description(describe(payload)) == ([(torch.float32, (3,))], None)


def test_a_micro_batch_is_copied_to_the_device_while_the_host_goes_on():
    copies = []

    class Copies(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            copies.append((function, kwargs["non_blocking"]))
            return function(*args, **kwargs)

    inputs = (torch.zeros(3),)
    engine = SimpleNamespace(
        device=torch.device("meta"),
        _next_batch=lambda: (inputs, ()),
        is_first_stage=lambda: True,
        is_last_stage=lambda: False,
        pipe_buffers={"inputs": [None]},
    )
    engine._on_device = partial(OmnibalEngine._on_device, engine)
    with Copies():
        OmnibalEngine._exec_load_micro_batch(engine, 0)
    assert copies == [(torch.ops.aten._to_copy.default, True)]


def plan_of(table, num_stages, micro_batches):
    """What the engine asks a plan for; without a table it runs DeepSpeed's 1F1B."""
    schedule = "1f1b" if table is None else "a table"
    return SimpleNamespace(
        schedule=schedule,
        runs_table=table is not None,
        make_schedule=lambda: table,
        predicted=None,
        num_stages=num_stages,
        micro_batches=micro_batches,
    )


def sizes():
    """Stages and micro-batches: fewer than fill the pipeline, as many, and more."""
    for num_stages in (2, 3, 4):
        yield from ((num_stages, micro_batches) for micro_batches in sorted({1, 2, num_stages, num_stages + 2}))
    yield from ((5, 3), (8, 10), (16, 17))


@pytest.mark.parametrize("name", TABLES)
def test_a_tables_transfers_end_under_all_of_nccls_rules(name):
    for size in sizes():
        for frozen_stages in (0, size[0] // 2):
            programs = record(plan_of(TABLES[name](*size), *size), frozen_stages=frozen_stages)
            for rules in STRICTEST:
                assert deadlock(programs, rules) == [], (size, rules, frozen_stages)


# Replicas of the encoder, and of the LLM.
UNITS = [(1, 2), (1, 3), (2, 1), (2, 4), (4, 2)]


@pytest.mark.parametrize("name", ["zero-bubble", "zero-bubble-lean"])
@pytest.mark.parametrize(("encoder_stages", "llm_stages"), [(1, 1), (1, 3), (2, 2)])
def test_transfers_of_units_end_under_all_of_nccls_rules(name, encoder_stages, llm_stages):
    num_stages = encoder_stages + llm_stages
    for encoder_replicas, replicas in UNITS:
        layout = Layout(num_stages, replicas, encoder=Encoder(encoder_stages, encoder_replicas))
        for frozen_stages in (0, encoder_stages):
            plan = SimpleNamespace(
                schedule=name,
                runs_table=True,
                make_schedule=partial(schedule_of, layout, 6, name),
                predicted=None,
                num_stages=num_stages,
                micro_batches=6,
                layout=layout,
            )
            programs = record(plan, steps=1, frozen_stages=frozen_stages)
            for rules in STRICTEST:
                assert deadlock(programs, rules) == [], (layout, rules, frozen_stages)


@pytest.mark.parametrize("forward_only", [False, True], ids=["1F1B", "evaluation"])
def test_deepspeeds_own_transfers_end_under_all_of_nccls_rules(forward_only):
    for size in sizes():
        for frozen_stages in (0,) if forward_only else (0, size[0] // 2):
            programs = record(plan_of(None, *size), forward_only=forward_only, frozen_stages=frozen_stages)
            for rules in STRICTEST:
                assert deadlock(programs, rules) == [], (size, rules, frozen_stages)


@pytest.mark.parametrize("table", [None, zero_bubble(4, 6)], ids=["1F1B", "zero-bubble"])
def test_what_ends_under_the_strictest_rules_ends_under_each(table):
    programs = record(plan_of(table, 4, 6))
    assert [rules for rules in ALL_RULES if deadlock(programs, rules)] == []


class TooEarly(RecordedEngine):
    """A step's first gradient is expected as soon as there is one to come."""

    def _run_forward(self, micro_batch):
        super()._run_forward(micro_batch)
        if not self.is_last_stage():
            self._expect_gradients()


class TooLate(RecordedEngine):
    """A step's first gradient is expected where it is needed, behind an activation that its sender cannot take yet."""

    def __init__(self, **arguments):
        super().__init__(**arguments)
        self._first_gradient_before = None


@pytest.mark.parametrize("engine_class", [RecordedEngine, TooEarly, TooLate])
@pytest.mark.parametrize("num_stages", [2, 3])
def test_a_first_gradient_that_is_expected_at_the_wrong_time_is_seen(engine_class, num_stages):
    programs = record(plan_of(zero_bubble(num_stages, 6), num_stages, 6), engine_class=engine_class)
    stuck = {rules for rules in ALL_RULES if deadlock(programs, rules)}
    if engine_class is TooEarly and num_stages == 3:
        # Links are tried before the first step, so that no communicator is made in one.
        assert stuck == {*ALL_RULES} - {MILDEST, MILDEST._replace(lazy=True)}
    elif engine_class is TooLate:
        assert stuck == {rules for rules in ALL_RULES if rules.drains == "everywhere"}
    else:
        assert not stuck


def swap(group_of_second, *, first_sends):
    """Two ranks send each other a tensor; each rank starts its send or its receive first."""
    programs = []
    for rank, sends in enumerate(first_sends):
        first, second = (Post(group, 1 - rank, way, on_device=True) for group, way in ((0, sends), (0, not sends)))
        if group_of_second:
            first, second = (post._replace(group=rank if post.sends else 1 - rank) for post in (first, second))
        programs.append([first, second, Wait(0), Wait(1), Kernel("F")])
    return programs


def test_a_communicators_transfers_wait_for_each_other_in_order():
    assert not deadlock(swap(False, first_sends=(True, False)), MILDEST)
    assert deadlock(swap(False, first_sends=(True, True)), MILDEST)
    assert not deadlock(swap(True, first_sends=(True, True)), MILDEST)


@pytest.mark.parametrize("rules", [MILDEST._replace(lazy=True), MILDEST._replace(drains="everywhere")])
def test_a_host_that_waits_in_a_transfer_cannot_start_the_next(rules):
    assert not deadlock(swap(True, first_sends=(True, False)), rules)
    assert deadlock(swap(True, first_sends=(True, True)), rules)


def test_a_transfer_that_holds_computations_must_not_need_them():
    receive, send = Post(0, 1, sends=False, on_device=True), Post(1, 1, sends=True, on_device=True)
    echo = [Post(1, 0, sends=False, on_device=True), Wait(0), Post(0, 0, sends=True, on_device=True)]
    holds = Rules(lazy=False, drains="nowhere", transfers_hold=True)
    early, late = [receive, Kernel("F"), send], [Kernel("F"), send, receive]
    assert not deadlock([early, echo], MILDEST)
    assert deadlock([early, echo], holds)
    assert not deadlock([late, echo], holds)


def test_a_message_between_hosts_stops_only_the_host_that_waits_for_it():
    message = Post(0, 1, sends=True, on_device=False), Post(0, 0, sends=False, on_device=False)
    answer = [Wait(0), Kernel("F")]
    assert not deadlock([[message[0], Kernel("F")], [message[1], *answer]], STRICTEST[1])
    crossed = [
        [Post(1, 1 - rank, sends=False, on_device=False), Wait(0), message[0]._replace(peer=1 - rank, group=1)]
        for rank in (0, 1)
    ]
    assert deadlock(crossed, MILDEST)
