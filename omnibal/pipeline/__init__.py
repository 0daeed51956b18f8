"""The pipeline on paper: where a model is cut, what its stages run in which order, and what a step takes.

The files, each of which needs none behind it:

    partition  the record of a cut; DeepSpeed's cuts, OmniBal's, and the best ones for given costs of stages
    schedule   what each stage runs, in order; with units, whose encoder has replicas of its own, too
    times      seconds of every layer for every micro-batch of a step; what an encoder on all devices adds to it
    events     the simulator: when each instruction starts and ends
    simulate   a schedule on given seconds, and a whole step under any layout
    search     the simulated seconds of a cut, bounds on them, and every method to find a good cut
"""
