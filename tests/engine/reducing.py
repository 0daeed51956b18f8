"""What the processes of the reduction tests run: steps whose gradients leave early, and as DeepSpeed sends them."""

from contextlib import contextmanager
from dataclasses import replace

import pytest
from deepspeed.runtime.pipe import schedule

from omnibal.engine import reduction, table
from omnibal.engine.engine import OmnibalEngine
from omnibal.engine.reduction import Reduction
from tests.engine.cases import engine_of, weights_of


def train_both(cases):
    """What each case makes of this stage, and what it does under 1F1B with DeepSpeed's own reduction."""
    return [(train(case), train_with_deepspeeds(replace(case, schedule="1f1b"))) for case in cases]


def train_with_deepspeeds(case):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(table, "exchange_of", lambda *given: None)
        return train(case)


def train(case):
    """Losses, norms, a step's gradients, the last weights, and in which order the last step did what."""
    found, order = {}, []
    own = {"on_gradient": lambda name, gradient: found.update({name: gradient.clone()})}
    engine = engine_of(replace(case, own=own))
    losses, norms = [], []
    for _ in range(case.steps):
        order.clear()
        with _written_down(engine, order):
            losses.append(engine.train_batch().item())
        norms.append(engine.get_global_grad_norm())
    exchange = engine.exchange
    return {
        "coming": 0 if exchange is None else len(exchange.weights._coming),
        "losses": losses,
        "norms": [None if norm is None else float(norm) for norm in norms],
        "gradients": found,
        "weights": weights_of(engine),
        "order": order,
        "stage": engine.stage_id,
    }


@contextmanager
def _written_down(engine, order):
    """In which order a step finds gradients of which layers ("gradient") and starts to add them up ("reduce")."""
    queue, start = engine.weight_gradients, Reduction.start
    accumulate, places, handles = queue.accumulate, {}, []
    for place, layer in enumerate(engine.module.forward_funcs):
        for parameter in filter(lambda parameter: parameter.requires_grad, layer.parameters()):
            places.setdefault(parameter, place)  # of a tied weight the first use, whose pass comes last

    def found(parameter):
        if parameter in places:
            order.append(("gradient", places[parameter]))

    def started(gradients, layer):
        left = gradients.left
        start(gradients, layer)
        if gradients.left < left:
            order.append(("reduce", layer))

    def deferred(parameter, gradient):
        found(parameter)
        accumulate(parameter, gradient)

    def ended(engine):
        order.append(("passes end", None))
        OmnibalEngine._exec_reduce_tied_grads(engine)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reduction, "_ALONE", 1000)  # of which some are longer, some shorter
        patch.setattr(Reduction, "start", started)
        patch.setattr(queue, "accumulate", deferred)
        instructions = {**OmnibalEngine._INSTRUCTION_MAP, schedule.ReduceTiedGrads: ended}
        patch.setattr(engine, "_INSTRUCTION_MAP", instructions)
        handles = [parameter.register_post_accumulate_grad_hook(found) for parameter in places]
        yield
    for handle in handles:
        handle.remove()
