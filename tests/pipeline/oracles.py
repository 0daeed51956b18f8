"""Slow, obvious twins of the compiled code, and schedules from their letters."""

from omnibal.pipeline.schedule import Instruction, Operation, Schedule

SENDS = {Operation.SEND_ACTIVATION: 1, Operation.SEND_GRADIENT: -1}


def schedule_of(text):
    """What ``str(schedule)`` writes, back again: a line per stage."""
    words = [[(word.rstrip("0123456789"), word) for word in line.split()] for line in text.strip().splitlines()]
    stages = tuple(
        tuple(Instruction(Operation[letters], int(word.removeprefix(letters))) for letters, word in line)
        for line in words
    )
    return Schedule(stages, micro_batches=1 + max((i.micro_batch for stage in stages for i in stage), default=-1))


def longest_paths(edges, nodes):
    """When each node ends: ``edges[node]`` are the nodes it waits for, ``nodes[node]`` its duration."""
    ends = {}

    def end(node, open_nodes=()):
        assert node not in open_nodes, "deadlock"
        if node not in ends:
            ends[node] = max((end(before, (*open_nodes, node)) for before in edges[node]), default=0.0) + nodes[node]
        return ends[node]

    for node in nodes:
        end(node)
    return ends


def computation_seconds(operation, *times):
    f, b, w = times
    return {Operation.F: f, Operation.BW: b + w, Operation.B: b, Operation.W: w}[operation]


def rendezvous_ends(schedule, forward, backward, weight, transfer):
    """End of each (stage, operation, micro-batch), by longest paths; a transfer is one node that both sides run."""
    nodes, edges = {}, {}

    def node_of(stage, operation, m):
        if not operation.is_transfer:
            return (stage, operation, m)
        if operation in SENDS:
            return ("message", stage, stage + SENDS[operation], m)
        sender = stage - 1 if operation == Operation.RECEIVE_ACTIVATION else stage + 1
        return ("message", sender, stage, m)

    for stage, instructions in enumerate(schedule.blocking):
        before = None
        for operation, m in instructions:
            node = node_of(stage, operation, m)
            if operation.is_transfer:
                nodes[node] = transfer[m, min(node[1:3])]
            else:
                nodes[node] = computation_seconds(operation, forward[m, stage], backward[m, stage], weight[m, stage])
            edges.setdefault(node, [])
            if before is not None:
                edges[node].append(before)
            before = node
    ends = longest_paths(edges, nodes)
    return {
        (stage, operation, m): ends[node_of(stage, operation, m)]
        for stage, instructions in enumerate(schedule.blocking)
        for operation, m in instructions
    }


def overlap_ends(schedule, forward, backward, weight, transfer):
    """End of each computation, by longest paths; a link's transfers in one direction follow one another."""
    nodes, edges = {}, {}
    links = {}
    for stage, instructions in enumerate(schedule.stages):
        before = None
        for operation, m in instructions:
            node = (stage, operation, m)
            nodes[node] = computation_seconds(operation, forward[m, stage], backward[m, stage], weight[m, stage])
            edges[node] = [] if before is None else [before]
            before = node
            direction = {Operation.F: 1, Operation.BW: -1, Operation.B: -1}.get(operation, 0)
            if direction and 0 <= stage + direction < schedule.num_stages:
                message = ("message", stage, stage + direction, m)
                nodes[message] = transfer[m, min(stage, stage + direction)]
                edges[message] = [node, *links.get((stage, direction), [])]
                links[stage, direction] = [message]
    for node in list(nodes):
        if node[0] != "message" and node[1] != Operation.W:
            stage, operation, m = node
            sender = stage - 1 if operation == Operation.F else stage + 1
            if ("message", sender, stage, m) in nodes:
                edges[node].append(("message", sender, stage, m))
    return {node: end for node, end in longest_paths(edges, nodes).items() if node[0] != "message"}
