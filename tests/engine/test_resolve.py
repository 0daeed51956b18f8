import json
from dataclasses import replace

import pytest

from omnibal.cluster import Cluster, Encoder, Layout
from omnibal.config import layout_of
from omnibal.config.section import OmnibalSection
from omnibal.data.lengths import SampleLengths
from omnibal.data.limits import PackLimits, paper_limits
from omnibal.demo import write_demo
from omnibal.errors import ConfigError
from omnibal.families.base import encoder_layers
from omnibal.formats.conversations import open_dataset
from omnibal.memory.footprint import StageMemory
from omnibal.pipeline.partition import Partition, cut_parts
from omnibal.plan import Plan, Prediction, StagePrediction
from omnibal.vlm import load_model
from omnibal.workspace import Workspace
from tests.engine.small import NUM_LAYERS, small_config

LENGTHS = SampleLengths([1, 3, 5, 1], [300, 900, 1400, 290])


@pytest.fixture(scope="module")
def vlm():
    return load_model(small_config())


def section(**parts):
    return OmnibalSection.model_validate(parts)


CONFIG = {"gradient_accumulation_steps": 4}


def plan_of(vlm, num_stages=2, **parts):
    workspace = Workspace(CONFIG, section(**parts))
    return workspace.resolve_plan(vlm.records, layout_of(CONFIG, num_stages, 1), LENGTHS)


def shape_of(section, num_layers, num_processes):
    layout = Workspace({}, section).layout_on(num_processes, "processes", num_layers)
    return layout.num_stages, layout.num_replicas


def test_number_of_stages():
    assert shape_of(section(), 10, 8) == (8, 1)
    assert shape_of(section(pipeline={"num_stages": 4}), 10, 8) == (4, 2)
    with pytest.raises(ConfigError, match="num_stages must divide the 8 processes, got 3"):
        shape_of(section(pipeline={"num_stages": 3}), 10, 8)
    with pytest.raises(ConfigError, match="num_stages must be at most the model's 10 layers, got 16"):
        shape_of(section(), 10, 16)


def test_the_encoders_own_devices_are_not_those_of_the_other_stages():
    def layout(num_processes, num_layers=10, **pipeline):
        return Workspace({}, section(pipeline=pipeline)).layout_on(num_processes, "processes", num_layers)

    encoder = {"num_stages": 1, "num_replicas": 2}
    assert str(layout(8, num_stages=4, encoder=encoder)) == "1 stage × 2 replicas, then 3 stages × 2 replicas"
    assert str(layout(8, encoder=encoder)) == "1 stage × 2 replicas, then 6 stages × 1 replica"  # one pipeline
    message = (
        r"num_stages without the encoder's 1 must divide the 6 processes that .*\(1 stage × 2 replicas\) leaves of 8"
    )
    with pytest.raises(ConfigError, match=f"{message}, got 4"):
        layout(8, num_stages=5, encoder=encoder)
    with pytest.raises(ConfigError, match="num_stages must be at most the model's 6 layers, got 7"):
        layout(8, 6, encoder=encoder)
    with pytest.raises(ConfigError, match="encoder and LLM must divide each other, got 2 and 3"):
        layout(8, num_stages=3, encoder=encoder)


def test_a_spread_encoder_is_on_all_processes_and_has_no_stage():
    def layout(num_processes, num_layers=10, **pipeline):
        asked = section(pipeline=pipeline | {"encoder": "spread"})
        return Workspace({}, asked).layout_on(num_processes, "processes", num_layers)

    assert layout(8, num_stages=4) == replace(layout_of({}, 4, 2), encoder=Encoder.on_all(8))
    assert str(layout(8)) == "8 stages × 1 replica, encoder on all"
    with pytest.raises(ConfigError, match="num_stages must divide the 8 processes, got 3"):
        layout(8, num_stages=3)


def test_methods_cut_the_language_model_alone_behind_a_spread_encoder(vlm):
    border = encoder_layers(vlm.records)
    layout = replace(layout_of({}, 2, 1), encoder=Encoder.on_all(2))
    weights = [1] * border + [5, 1, 1, 1, 1]
    for method, cut in ((None, (0, border + 1, NUM_LAYERS)), (lambda each, stages: (0, 2, 5), (0, border + 2, 10))):
        assert cut_parts(vlm.records, weights, layout, method).boundaries == cut
    too_many = replace(layout, num_stages=6, encoder=Encoder.on_all(6))
    with pytest.raises(ConfigError, match="stages of the language model must be at most its 5 layers, got 6"):
        cut_parts(vlm.records, weights, too_many)


def test_a_plan_of_a_spread_encoder_is_of_as_many_devices_as_the_run(tmp_path, vlm):
    path = tmp_path / "plan.json"
    layout = replace(layout_of({}, 2, 2), encoder=Encoder.on_all(4))
    plan = Plan(
        PackLimits(5, 2000), 2, Partition((0, 7, NUM_LAYERS)), ("none",) * NUM_LAYERS, layout=layout,
        cluster=Cluster.parse("4xA100-80GB"),
    )  # fmt: skip
    plan.save(path)
    assert Plan.load(path) == plan
    for asked in ({}, {"encoder": "spread"}):
        workspace = Workspace({"gradient_accumulation_steps": 2}, section(pipeline={"plan": str(path), **asked}))
        assert workspace.layout_on(4, "processes", NUM_LAYERS) == layout
        assert workspace.resolve_plan(vlm.records, layout, LENGTHS) == plan
        half = workspace.layout_on(2, "processes", NUM_LAYERS)
        assert half == replace(layout_of({}, 2, 1), encoder=Encoder.on_all(2))
        with pytest.raises(ConfigError, match="layout of the plan must be that of the run, num_replicas 1"):
            workspace.resolve_plan(vlm.records, half, LENGTHS)


def test_methods_cut_encoder_and_language_model_apart(vlm):
    layout = replace(layout_of({}, 4, 1), encoder=Encoder(2, 1))

    def boundaries(method):
        workspace = Workspace({}, section(pipeline={"partition": method}))
        return workspace.resolve_plan(vlm.records, layout, LENGTHS).partition.boundaries

    border = encoder_layers(vlm.records)
    for method in ("uniform", "parameters", [0, 3, 7, 9, NUM_LAYERS]):
        assert (boundaries(method)[2] == border) == isinstance(method, str)
    with pytest.raises(ConfigError, match=f"stages of the encoder must be at most its {border} layers, got 7"):
        cut_parts(vlm.records, [1] * NUM_LAYERS, replace(layout, num_stages=8, encoder=Encoder(7, 1)))


def test_a_plan_knows_the_encoders_own_replicas(tmp_path, vlm):
    path, lengths = tmp_path / "plan.json", LENGTHS
    layout = replace(layout_of({}, 2, 1), encoder=Encoder(1, 2), precision="float32", zero_stage=0)
    plan = Plan(PackLimits(5, 2000), 2, Partition((0, 5, NUM_LAYERS)), ("none",) * NUM_LAYERS, layout=layout)
    planned = replace(plan, cluster=Cluster.parse("3xA100-80GB"))
    planned.save(path)
    assert Plan.load(path) == planned
    config = {"gradient_accumulation_steps": 2}
    for asked in ({}, {"encoder": {"num_replicas": 2}}):
        workspace = Workspace(config, section(pipeline={"plan": str(path), **asked}))
        assert workspace.layout_on(3, "processes", NUM_LAYERS) == layout
        assert workspace.resolve_plan(vlm.records, layout, lengths) == planned
    workspace = Workspace(config, section(pipeline={"plan": str(path), "encoder": {"num_replicas": 1}}))
    with pytest.raises(ConfigError, match=r"layout of the plan must .*encoder 1 stage × 1 replica, got .*2 replicas"):
        workspace.resolve_plan(vlm.records, workspace.layout_on(2, "processes", NUM_LAYERS), lengths)
    plan.save(path)  # a plan for no cluster is one for any layout
    workspace = Workspace(config, section(pipeline={"plan": str(path)}))
    assert workspace.resolve_plan(vlm.records, layout_of({}, 2, 1), lengths).layout == layout_of({}, 2, 1)


def test_a_plan_knows_its_number_of_stages(tmp_path):
    path = str(tmp_path / "plan.json")
    Plan(PackLimits(5, 2000), 4, Partition((0, 4, NUM_LAYERS)), ("none",) * NUM_LAYERS).save(path)
    assert shape_of(section(pipeline={"plan": path}), NUM_LAYERS, 8) == (2, 4)
    assert shape_of(section(pipeline={"plan": path, "num_stages": 4}), NUM_LAYERS, 8) == (4, 2)  # refused with the plan
    with pytest.raises(ConfigError, match="num_stages must divide the 3 processes, got 2"):
        shape_of(section(pipeline={"plan": path}), NUM_LAYERS, 3)


def test_limits_are_given_or_ruled(vlm):
    ruled = paper_limits(LENGTHS)
    assert plan_of(vlm).limits == ruled
    assert plan_of(vlm, packing={"vision_units": 9}).limits == PackLimits(9, ruled.llm_tokens)
    given = {"vision_units": 9, "llm_tokens": 4096}
    assert plan_of(vlm, packing=given).limits == PackLimits(9, 4096)


def test_partitions(vlm):
    assert plan_of(vlm, pipeline={"partition": "uniform"}).partition == Partition.uniform(NUM_LAYERS, 2)
    assert plan_of(vlm, pipeline={"partition": [0, 3, NUM_LAYERS]}).partition.boundaries == (0, 3, NUM_LAYERS)
    parameters = [record.sizes["parameters"] for record in vlm.records]
    (_, cut, _) = plan_of(vlm, pipeline={"partition": "parameters"}).partition.boundaries
    sums = [abs(sum(parameters[:boundary]) - sum(parameters[boundary:])) for boundary in range(1, NUM_LAYERS)]
    assert sums[cut - 1] == min(sums)


def test_frozen_parameters_do_not_count(vlm):
    frozen = {"frozen": ["text_embedding", "decoder_block", "final_norm", "head"]}
    (_, cut, _) = plan_of(vlm, model=frozen, pipeline={"partition": "parameters"}).partition.boundaries
    trained = [record.sizes["parameters"] for record in vlm.records[:5]]
    assert cut <= 4
    assert abs(sum(trained[:cut]) - sum(trained[cut:])) == min(
        abs(sum(trained[:boundary]) - sum(trained[boundary:])) for boundary in range(1, 5)
    )
    with pytest.raises(ConfigError, match="frozen must hold kinds"):
        plan_of(vlm, model={"frozen": ["visoin"]})


def test_recompute_levels(vlm):
    assert plan_of(vlm).recompute == ("none",) * NUM_LAYERS
    assert plan_of(vlm, pipeline={"recompute": "full"}).recompute == ("full",) * NUM_LAYERS
    levels = ["full", "none"] * (NUM_LAYERS // 2)
    assert plan_of(vlm, pipeline={"recompute": levels}).recompute == tuple(levels)


def test_a_plan_for_other_frozen_layers_is_refused(vlm, tmp_path):
    plan = Plan(PackLimits(5, 2000), 4, Partition((0, 4, NUM_LAYERS)), ("none",) * NUM_LAYERS)
    replace(plan, made_from={"frozen": ["vision_block"]}).save(tmp_path / "plan.json")
    named = {"plan": str(tmp_path / "plan.json")}
    with pytest.raises(ConfigError, match=r"frozen parts of the plan must be \[\] as .*, got \['vision_block'\]"):
        plan_of(vlm, pipeline=named)
    assert plan_of(vlm, pipeline=named, model={"frozen": ["vision_block"]}).partition == plan.partition


def test_a_plan_for_another_layout_is_refused_in_one_line(vlm, tmp_path):
    plan = Plan(PackLimits(5, 2000), 4, Partition((0, 4, NUM_LAYERS)), ("none",) * NUM_LAYERS)
    named = {"plan": str(tmp_path / "plan.json")}
    for layout, cluster, message in (
        (Layout(2, 1, zero_stage=0, precision="float32"), "2xA100-80GB", None),
        (Layout(2, 4), None, None),  # nobody predicted it
        (Layout(2, 2), "4xA100-80GB", "num_replicas 1, zero_stage 0, precision float32, sums_float32 False, got "
         "num_replicas 2, zero_stage 1, precision bfloat16, sums_float32 True; plan again for this run"),
        (Layout(2, 1, zero_stage=1, precision="float32"), "2xA100-80GB", "zero_stage 0, got zero_stage 1; plan again"),
    ):  # fmt: skip
        known = None if cluster is None else Cluster.parse(cluster)
        replace(plan, layout=layout, cluster=known).save(tmp_path / "plan.json")
        if message is None:
            run = layout_of({"gradient_accumulation_steps": 4}, 2, 1)
            assert plan_of(vlm, pipeline=named).layout == (run if cluster is None else layout)
        else:
            with pytest.raises(ConfigError, match=f"layout of the plan must be that of the run, {message}"):
                plan_of(vlm, pipeline=named)


def test_a_plan_file_takes_the_place_of_all(vlm, tmp_path):
    plan = Plan(PackLimits(5, 2000), 4, Partition((0, 4, NUM_LAYERS)), ("none", "full") * (NUM_LAYERS // 2))
    plan.save(tmp_path / "plan.json")
    found = plan_of(vlm, pipeline={"plan": str(tmp_path / "plan.json"), "partition": "uniform"})
    assert found == replace(plan, layout=layout_of(CONFIG, 2, 1)), "a plan without a cluster names no layout"


def test_micro_batches_are_the_plans(tmp_path):
    plan = Plan(PackLimits(5, 2000), 4, Partition((0, 4, NUM_LAYERS)), ("none",) * NUM_LAYERS)
    plan.save(tmp_path / "plan.json")
    for named, micro_batches in (({}, 1), ({"plan": str(tmp_path / "plan.json")}, 4)):
        for config in ({}, {"gradient_accumulation_steps": "auto"}):
            assert Workspace(config, section(pipeline=named)).micro_batches == micro_batches
    followed = Workspace({"gradient_accumulation_steps": 5, "train_batch_size": 5}, section(pipeline=named))
    assert followed.run_config == {"gradient_accumulation_steps": 4, "train_batch_size": "auto"}
    assert followed.replaced_batch == "gradient_accumulation_steps 5, train_batch_size 5"
    for config, asked in (
        ({"gradient_accumulation_steps": 4}, named),
        ({"gradient_accumulation_steps": 5}, {}),
        ({}, named),
    ):
        assert Workspace(config, section(pipeline=asked)).replaced_batch == ""


STAGE = StagePrediction(1.0, 2.0, 0.0, 0.1, 5, StageMemory(*range(9)))


def test_a_schedule_that_is_named_goes_before_the_plans(vlm, tmp_path):
    plan = Plan(PackLimits(5, 2000), 4, Partition((0, 4, NUM_LAYERS)), ("none",) * NUM_LAYERS, schedule="zero-bubble")
    plan = replace(plan, predicted=Prediction(1.0, 8.0, 0.1, (STAGE, STAGE)), layout=layout_of(CONFIG, 2, 1))
    plan.save(tmp_path / "plan.json")
    named = {"plan": str(tmp_path / "plan.json")}
    assert plan_of(vlm, pipeline=named) == plan_of(vlm, pipeline=named | {"schedule": "zero-bubble"}) == plan
    assert plan_of(vlm, pipeline=named | {"schedule": "1f1b"}) == replace(plan, schedule="1f1b", predicted=None)
    assert plan_of(vlm).schedule == "1f1b"
    assert plan_of(vlm, pipeline={"schedule": "zero-bubble"}).schedule == "zero-bubble"


def test_a_run_reads_what_lengths_are_measured_of(tmp_path):
    """InternVL's meta files, and annotations with a folder of images, as `omnibal lengths` does."""
    demo = write_demo(tmp_path / "demo", samples=20, held_out=20)
    entry = next(iter(json.loads(demo.meta.read_text()).values()))
    annotation, images = (demo.meta.parent / entry[key] for key in ("annotation", "root"))

    def read(**data):
        run = section(model={"path": str(demo.model)}, data=data, run={"output": str(tmp_path / "run")})
        return Workspace({}, run).dataset("train").lengths()

    assert read(train=str(demo.meta)).content_hash == open_dataset(demo.meta, demo.model).lengths().content_hash
    expected = open_dataset(annotation, demo.model, image_folder=images).lengths()
    assert read(train=str(annotation), images=str(images)).content_hash == expected.content_hash
    with pytest.raises(ConfigError, match="image_folder must be left out for a meta file"):
        read(train=str(demo.meta), images=str(images))
