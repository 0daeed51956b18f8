"""What the processes of the test of cuts run: training under the plan that a ds_config names."""

from omnibal.engine.initialize import initialize
from tests.engine.cases import SmallDataset, weights_of


def train_under(configs, steps):
    """Boundaries in use, losses and final weights of this stage, for each configuration."""
    return [_train(config, steps) for config in configs]


def _train(config, steps):
    engine, *_ = initialize(config=config, dataset=SmallDataset())
    losses = [engine.train_batch().item() for _ in range(steps)]
    return {"boundaries": tuple(engine.module.parts), "losses": losses, "weights": weights_of(engine)}
