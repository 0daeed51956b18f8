"""The loop of the README on real processes: exact gradients, no rank alone in the ViT, no plan of one's own."""

import pytest

from omnibal.data.limits import PackLimits
from omnibal.errors import ConfigError
from omnibal.feeds.sampler import BalancedBatchSampler
from omnibal.ranks import new_gloo_group
from tests.engine.launch import launch
from tools.synthetic import tiled_lengths

torch = pytest.importorskip("torch")
dist = torch.distributed

RANKS, MICRO_BATCHES = 2, 2
LENGTHS = tiled_lengths(60, seed=13, text_share=0.5)  # of which some packs have no image, some rank always has one


class Model(torch.nn.Module):
    """A ViT and an LLM of a weight each; a sample's loss is not linear in them."""

    def __init__(self):
        super().__init__()
        self.vit = torch.nn.Linear(1, 1, bias=False).double()
        self.llm = torch.nn.Linear(1, 1, bias=False).double()
        for layer in (self.vit, self.llm):
            torch.nn.init.constant_(layer.weight, 0.5)

    def forward(self, samples, dummy_tile):
        """The sum over the target tokens of some samples."""
        loss = self.llm.weight.sum() * 0  # an empty pack passes the LLM as well
        if dummy_tile:
            loss = loss + 0 * self.vit(torch.zeros(1, 1, dtype=torch.float64)).sum()
        for sample in samples:
            hidden = torch.full((1, 1), LENGTHS.llm_tokens[sample] / 1000, dtype=torch.float64)
            if LENGTHS.vision_units[sample]:
                hidden = hidden + self.vit(torch.full_like(hidden, float(LENGTHS.vision_units[sample])))
            loss = loss + int(LENGTHS.target_tokens[sample]) * self.llm(hidden).tanh().sum()
        return loss


def gradients(model):
    return [parameter.grad.item() for parameter in model.parameters()]


def sampler_of(rank, **options):
    options = {"num_replicas": RANKS, "rank": rank, "micro_batches": MICRO_BATCHES, "method": "isf", **options}
    return BalancedBatchSampler(LENGTHS, PackLimits(5, 1600), **options)


def gather(record):
    records = [None] * dist.get_world_size()
    dist.all_gather_object(records, record, group=new_gloo_group())
    return records


def check_gradients(rank):
    """Every step's gradients are those of all its samples in one process."""
    sampler = sampler_of(rank)
    sampler.verify(gather)
    loader = torch.utils.data.DataLoader(range(len(LENGTHS)), batch_sampler=sampler, collate_fn=list, num_workers=1)
    batches, model = iter(loader), torch.nn.parallel.DistributedDataParallel(Model())
    dummies = 0
    for index in range(sampler.steps_done, sampler.epoch_steps):
        step = sampler.step(index)
        needs = step.needs_dummy_tile()
        model.zero_grad()
        for micro_batch in range(MICRO_BATCHES):
            samples = next(batches)
            assert samples == step.pack(rank, micro_batch).tolist()
            loss = model(samples, needs[rank, micro_batch])
            (loss * RANKS / step.target_tokens).backward()
        alone = Model()
        (alone(step.packs.samples.tolist(), dummy_tile=False) / step.target_tokens).backward()
        assert gradients(model) == pytest.approx(gradients(alone), rel=1e-12)
        dummies += int(needs.sum())
    assert dummies  # without them DDP, as FSDP and ZeRO-3, would wait for the rank without an image


def check_odd_plan(rank):
    with pytest.raises(ConfigError, match="rank 1: seed must be the same on all ranks, got 1 where rank 0 has 0"):
        sampler_of(rank, seed=rank).verify(gather)


def work():
    for check in (check_gradients, check_odd_plan):
        check(dist.get_rank())
    return "done"


@pytest.mark.distributed
def test_the_readmes_loop_on_processes():
    assert launch(RANKS, f"{__name__}:work") == ["done"] * RANKS
