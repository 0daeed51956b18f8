"""What a GPU is asked with, tried on a CPU: each part's own way to a row, and what becomes of failures."""

import re
import time
from pathlib import Path

import psutil
import pytest

from omnibal.data.lengths import SampleLengths
from omnibal.integrations.trainer.clock import LEAST_TIMED, Kernel
from omnibal.integrations.trainer.compare import spread
from tools.dropin.ways import Task, by_tokens
from tools.gpu import ladder, promises
from tools.gpu.cells import rows_of
from tools.gpu.jobs import Jobs
from tools.gpu.kernels import by_kind, kind_of, longest, profiled
from tools.gpu.ladder import SETTINGS, SMALL, Setting, Way, compiled, trained, ways
from tools.gpu.measure import PARTS
from tools.gpu.models import TINY, made_lengths
from tools.gpu.one_device import rank_environment
from tools.gpu.ranks import composed_rows, measured, ways_of
from tools.gpu.report import RESULTS, Report, rebuild, tables_of, with_ratios

ROOT = Path(__file__).parents[2]
KERNELS = {
    "products": (
        "nvjet_tst_128x256_64x4_1x2_h_bz_coopA_NNT",
        "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1_execute_segment_k_off_kernel__5x",
        "void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16_16x16_128x2_tn_align8>(Params)",
        "void cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloat16, float>(...)",
    ),
    "attention": (
        "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128, 64, 64, 4, cutlass::bfloat16_t>>(...)",
        "cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_3_64x128x128_4x1x1_cga1x1x1_kernel0_0",
        "fmha_cutlassF_bf16_aligned_64x128_rf_sm80(PyTorchMemEffAttention::AttentionKernel<...>::Params)",
    ),
    "loss": (
        "void at::native::(anonymous namespace)::cunn_SoftMaxForward<8, float, float, float, LogSoftMax>",
        "void at::native::(anonymous namespace)::nll_loss_forward_reduce_cuda_kernel_2d<float, float, long>(...)",
    ),
    "optimizer": (
        "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<FusedOptimizerTensorListMetadata<4>, "
        "at::native::(anonymous namespace)::FusedAdamMathFunctor<c10::BFloat16, 4, (ADAM_MODE)1, false>, float>",
        "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<TensorListMetadata<1>, LpNormFunctor<...>>",
    ),
    "copies": (
        "Memcpy HtoD (Pinned -> Device)",
        "void at::native::unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda(...)::{lambda()#3}>",
        "void at::native::(anonymous namespace)::CatArrayBatchedCopy<OpaqueType<2u>, unsigned int, 3, 64, 64>(...)",
    ),
    "elementwise and norms": (
        "void at::native::vectorized_elementwise_kernel<8, at::native::CUDAFunctor_add<c10::BFloat16>>(int, ...)",
        "void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<c10::BFloat16, float, false>(...)",
        "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::MeanOps<float, float>>>(...)",
    ),
    "other": ("spin_kernel",),
}


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, names in KERNELS.items() for name in names])
def test_kernels_are_told_apart_by_their_names(kind, name):
    assert kind_of(name) == kind


def test_seconds_of_a_step_are_those_of_each_kind_and_gaps_where_nothing_runs():
    # Two streams side by side for a second; nothing from 5 to 6.
    kernels = [Kernel("gemm", 0, 4), Kernel("Memcpy HtoD", 3, 5), Kernel("gemm", 6, 7)]
    row = by_kind(kernels, 10.0, 2)
    assert {name: seconds for name, seconds in row.items() if seconds} == {
        "step s": 5.0, "products": 2.5, "copies": 1.0, "host gaps": 2.0,
    }  # fmt: skip
    assert longest(kernels, 1)[0] == {"kernel": "gemm", "kind": "products", "calls": 2, "s": 5}


def test_ranks_wait_in_each_phase_or_once_a_step():
    # Two ranks, one micro-batch of 4 phases; under DDP one's long ViT makes up for the other's long LLM.
    alike = [[[1.0, 1.0, 1.0, 1.0]], [[1.0, 1.0, 1.0, 1.0]]]
    unlike = [[[2.0, 1.0, 1.0, 2.0]], [[1.0, 2.0, 2.0, 1.0]]]
    rows = {
        "random": [{"seconds": unlike, "tokens": 120, "peaks": [3.0, 1.0]}],
        "balance": [{"seconds": alike, "tokens": 120, "peaks": [2.0, 2.0]}] * 2,
        "group_by_length": [],
    }
    random, balanced = composed_rows(rows)
    assert random == {
        "batches": "random", "step": "all 1", "busy s": 12.0, "ZeRO 3, times random": 1.0, "ZeRO 3 waits": 0.25,
        "DDP, times random": 1.0, "DDP waits": 0.0, "fullest rank GiB": 3.0, "mean rank GiB": 2.0,
    }  # fmt: skip
    assert balanced["ZeRO 3, times random"] == 2.0  # 8 seconds of the two ranks become 4 each
    assert balanced["DDP, times random"] == 1.5
    assert (balanced["ZeRO 3 waits"], balanced["fullest rank GiB"]) == (0.0, 2.0)


def test_a_step_of_ranks_is_measured():
    way = ways_of(TINY, 2, 1)[1]
    (row,) = measured((TINY, 400, way.padded, way.steps[0]))
    assert [len(rank) for rank in row["seconds"]] == [1, 1]
    assert all(seconds > 0 for rank in row["seconds"] for batch in rank for seconds in batch)
    samples = [sample for rank in way.steps[0] for batch in rank for sample in batch]
    assert row["tokens"] == made_lengths(TINY, 400).llm_tokens[samples].sum()


@pytest.mark.parametrize("name", ["group_by_length", "packed by tokens"])
def test_a_way_of_a_trainer_is_measured(name):
    (row,) = trained((SMALL[0], Way(name), 0.0, True))
    assert row["steps"] == LEAST_TIMED
    assert row["tokens/s"] == pytest.approx(row["samples/s"] * made_lengths(TINY, 240).llm_tokens.mean(), rel=0.5)
    assert (row["real tokens"] == 1) == (name == "packed by tokens")
    assert 0 < row["waiting for data"] < 1


def test_adapters_of_balance_are_measured_beside_what_it_promised():
    (row,) = trained((SMALL[1], Way("balance, all savings"), 0.0, True))
    assert row["promised times random"] > 0 and re.fullmatch(r"\d+ vision units and \d+ tokens", row["a pack holds"])


def test_a_profile_sees_products_and_gaps():
    first, *others = profiled((Setting(TINY, batch=2, accumulation=2), Way("balance"), True))
    assert first["products"] > 0 and first["host gaps"] > 0
    assert {"kernel", "kind", "calls", "s"} == others[0].keys()


def test_where_memory_does_not_suffice_half_the_batch_is_tried():
    class Full:
        def rows(self, job, seconds, **names):
            setting = job[0]
            yield names | ({"tokens/s": 1.0} if setting.batch == 1 else {"failed": "out of memory: CUDA"})

    assert [*ladder._rows(Full(), Setting("8B"), Way("random"), (1.0, False), 60.0)] == [
        {"batches": "random", "batch": "4 x 4", "failed": "out of memory: CUDA"},
        {"batches": "random", "batch": "2 x 8", "failed": "out of memory: CUDA"},
        {"batches": "random", "batch": "1 x 16", "tokens/s": 1.0},
    ]


def test_each_saving_of_balance_is_measured_alone():
    options = {way.name: dict(way.options) for way in (*ways(SETTINGS[0]), compiled(SETTINGS[0]))}
    assert options == {
        "random": {},
        "group_by_length": {},
        "balance": {"recompute": "as_is", "head": "all"},
        "balance, all savings": {},
        "balance, recompute": {"head": "all"},
        "balance, head": {"recompute": "as_is"},
        "packed by tokens": {"recompute": "as_is", "head": "all"},
        "balance, compiled blocks, 8B, gradient checkpointing": {"recompute": "as_is", "head": "all", "compile": True},
    }


def test_any_first_steps_are_spread_over_all():
    assert spread(5) == [0, 4, 2, 1, 3]
    assert sorted(spread(237)) == [*range(237)]
    assert sorted(spread(64)[:4]) == [0, 16, 32, 48]


def test_packs_by_tokens_hold_each_sample_once_and_as_many_tokens_as_a_batch():
    lengths = SampleLengths([1] * 400, [*range(300, 700)])
    way = by_tokens(Task(lengths, 2, 3))
    packs = [pack for step in way.steps for rank in step for pack in rank]
    held = [sum(int(lengths.llm_tokens[sample]) for sample in pack) for pack in packs]
    assert max(held) <= 2060 and sum(held) / len(held) > 1900  # 4 x 499.5 / 0.97
    samples = [sample for pack in packs for sample in pack]
    assert len(set(samples)) == len(samples) > 360
    assert {len(step) for step in way.steps} == {2} and {len(rank) for step in way.steps for rank in step} == {3}


def test_a_job_that_fails_hangs_or_ends_its_process_is_a_row():
    jobs = Jobs("tests.tools.answers:answers")
    try:
        found = {
            job: [*jobs.rows(job, 1.0 if job == "hangs" else 60.0, batches=job)]
            for job in ("full", "one", "fails", "ends", "hangs")
        }
    finally:
        jobs.end()
    assert {job: rows[-1] for job, rows in found.items()} == {
        "full": {"batches": "full", "failed": "out of memory: CUDA out of memory."},
        "one": {"batches": "one", "answer": "one"},
        "fails": {"batches": "fails", "failed": "ValueError: no such kernel"},
        "ends": {"batches": "ends", "failed": "its process ended with 3"},
        "hangs": {"batches": "hangs", "failed": "its 1 s were up"},
    }
    assert found["fails"][0] == {"batches": "fails", "answer": "fails"}


def test_tests_are_rows_and_end_with_their_reader(tmp_path):
    file = tmp_path / "test_some.py"
    file.write_text(
        "import os, pathlib, time\n"
        "def test_good(): pass\n"
        "def test_bad(): raise AssertionError('rank 1:\\nthe cause\\nrank 0:\\nanother')\n"
        f"def test_hangs(): pathlib.Path({str(tmp_path / 'pid')!r}).write_text(str(os.getpid())); time.sleep(600)\n"
    )
    rows = rows_of(["-q", "-p", "no:cacheprovider", str(file)], 120, {})
    good, bad = next(rows), next(rows)
    assert (good["outcome"], bad["outcome"]) == ("passed", "failed")
    assert bad["failed"] == "AssertionError: rank 1:\nthe cause"
    while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
        time.sleep(0.01)
    rows.close()
    assert not psutil.pid_exists(int((tmp_path / "pid").read_text()))


def test_a_report_holds_what_there_is(tmp_path):
    report = Report(tmp_path, "ladder", "a card", 60)

    def failing():
        yield {"batches": "random", "tokens/s": 2.0, "seconds": [1, 2]}
        raise ValueError("broken")

    report.add("One", "Why.", failing)
    report.add("Two", "Why.", lambda: [{"batches": "packs", "failed": "out | of memory"}])
    Report(tmp_path, "ranks", "another card", 0).add("Three", "Why.", lambda: [{"never": 1}])
    with (tmp_path / RESULTS).open("a") as file:
        file.write('{"part": "ranks", "ti')  # a process was killed
    rebuild(tmp_path)
    text = (tmp_path / "REPORT.md").read_text()
    assert report.failures == 2
    assert "a card\n\n| batches | tokens/s | times random |\n|---|---:|---:|\n| random | 2 | 1 |\n" in text
    assert "ValueError: broken" in text and "| packs | out / of memory |" in text
    assert "Left out: the time was up." in text and "never" not in text

    with (tmp_path / RESULTS).open("a") as file:
        file.write("\n")
    Report(tmp_path, "ladder", "a card", 60).add("Two", "Why.", lambda: [{"batches": "packs", "tokens/s": 3.0}])
    assert [(table.title, len(table.rows)) for table in tables_of(tmp_path)] == [("One", 1), ("Two", 1), ("Three", 0)]


def test_rows_are_compared_with_random_and_grouped_batches():
    rows = [
        {"batches": "random", "failed": "out of memory"},
        {"batches": "random", "tokens/s": 10.0},
        {"batches": "group_by_length", "tokens/s": 20.0},
        {"batches": "balance", "tokens/s": 30.0},
    ]
    found = with_ratios(rows)
    assert found[0] == rows[0]
    assert found[-1] == {"batches": "balance", "tokens/s": 30.0, "times random": 3.0, "times grouped": 1.5}


def test_ranks_share_a_device_only_where_there_are_too_few():
    assert rank_environment(1, 2, num_devices=2) == {"LOCAL_RANK": "1"}
    shared = rank_environment(1, 2, num_devices=1)
    assert (shared["LOCAL_RANK"], shared["NCCL_HOSTID"], shared["NCCL_NET"]) == ("0", "host1", "Socket")


def test_the_command_knows_every_part():
    text = (ROOT / "tools/gpu/run.sh").read_text()
    assert re.search(r"^# Parts: (.*) \(by default all", text, re.M)[1].split() == [*PARTS]
    assert re.search(r"^ +(.*)\) parts\+=", text, re.M)[1].split(" | ") == [*PARTS]
    assert re.search(r"\|\| parts=\((.*)\)", text)[1].split() == [*PARTS]


def test_counted_gains_are_near_measured_ones_and_nearer_than_without_masks():
    for name, found, before, after in promises.rows():
        # "As printed" is over all batches, and the GPU timed a few with other shares of padding.
        assert abs(after / found - 1) < (0.13 if "as printed" in name else 0.1), name
        assert abs(after / found - 1) <= abs(before / found - 1), name


def test_counted_layers_take_about_what_they_took():
    off = {name: counted / measured - 1 for name, measured, counted, _ in promises.layer_rows()}
    blocks = [f"{model}, {kind} block" for model in ("8B", "26B") for kind in ("vision", "decoder")]
    assert max(abs(off[name]) for name in blocks) < 0.06
    assert max(abs(off["8B, head"]), abs(off["26B, head"])) < 0.02
