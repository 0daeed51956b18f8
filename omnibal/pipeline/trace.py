"""Timelines in the trace format that Chrome (chrome://tracing) and Perfetto read."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from omnibal.pipeline.simulate import Simulation

_MICROSECONDS = 1e6


def chrome_trace(replicas: Iterable[Simulation]) -> dict[str, Any]:
    """Simulated pipelines as a trace: a process per replica, a thread per stage, a slice per instruction.

    Returns:
        What ``json.dump`` writes for the viewer. Times are microseconds.

    Source: "Trace Event Format", Google, complete (X) and metadata (M) events.
    """
    events: list[dict[str, Any]] = []
    for replica, simulation in enumerate(replicas):
        events.append(_name("process_name", f"replica {replica}", pid=replica))
        for stage in range(simulation.schedule.num_stages):
            events.append(_name("thread_name", f"stage {stage}", pid=replica, tid=stage))
        events += [
            {
                "name": f"{event.operation.name} {event.micro_batch}",
                "cat": event.operation.name,
                "ph": "X",
                "ts": event.start_seconds * _MICROSECONDS,
                "dur": (event.end_seconds - event.start_seconds) * _MICROSECONDS,
                "pid": replica,
                "tid": event.stage,
                "args": {"micro_batch": event.micro_batch},
            }
            for event in simulation.events
        ]
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _name(kind: str, name: str, *, pid: int, tid: int = 0) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": pid, "tid": tid, "args": {"name": name}}
