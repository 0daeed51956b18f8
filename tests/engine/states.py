"""What the processes of the test of memory run: steps under many optimizers, measured."""

from deepspeed.runtime.pipe import schedule

from omnibal.engine.engine import OmnibalEngine
from omnibal.engine.measured import held_tensors
from omnibal.passes import StorageMeter, storage_bytes
from tests.engine.cases import engine_of


def held_and_updated(cases):
    """For each case: bytes of parameters, of what stays between steps, the end of a step's peak, and a step's."""
    return [_measure(case) for case in cases]


def _measure(case):
    engine = engine_of(case)
    engine.train_batch()
    peaks = []

    def metered(run):
        def metered_run(engine, **options):
            before = storage_bytes(held_tensors(engine))
            with StorageMeter() as meter:
                run(engine, **options)
            peaks.append(before + meter.peak_bytes)

        return metered_run

    engine._INSTRUCTION_MAP = OmnibalEngine._INSTRUCTION_MAP | {
        schedule.ReduceGrads: metered(OmnibalEngine._exec_reduce_grads),
        schedule.OptimizerStep: metered(OmnibalEngine._exec_optimizer_step),
    }
    engine.train_batch()
    engine._INSTRUCTION_MAP = OmnibalEngine._INSTRUCTION_MAP
    return {
        "stage": engine.stage_id,
        "numbers": sum(parameter.numel() for parameter in engine.module.parameters()),
        "held": storage_bytes(held_tensors(engine)),
        "update_peaks": peaks,
        "peak": engine.measured_batch()[1].step[engine.stage_id],
    }
