"""What only a GPU can show. Each test says so in the skip line where there is none."""

import importlib.util
import os
import shutil
import signal
import statistics
import subprocess
import time
from itertools import product

import pytest
import torch
from helpers import (
    CHAPTERS,
    FSDP_OPTIONS,
    ROOT,
    STEPS,
    TORCHRUN,
    Ladder,
    Run,
    assert_same_tensors,
    children,
    full,
    make_variant,
    plant,
    read_metrics,
    register,
    run_script,
    selected_runs,
    tensors,
)
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._pytree import tree_leaves, tree_map
from transformers import AutoConfig, AutoModelForCausalLM

from common import checkpoint
from common.inputs.models import causal_attention
from common.launch import SINGLE_PROCESS
from fp8 import FP8_CAPABILITY

FP16, FP16_IN_DDP = ("float16", "loss-scaling"), ("autocast", "float16", "loss-scaling")
SCRIPT = "01-single-gpu/train_llm.py"
FEW = ("--max-steps", 20, "--log-freq", 1, "--eval-freq", 10, "--eval-sequences", 64)


def train_in_shell(tmp_path, name: str, *command: object, **env: object) -> list[dict]:
    """Run 20 steps of a script, or of torchrun; return what they logged."""
    done = run_script(*command, *FEW, "--save-dir", tmp_path, "-e", name, **env)
    assert done.returncode == 0, done.stderr
    return read_metrics(tmp_path / name)


def column(metrics: list[dict], key: str) -> list[float]:
    return [line[key] for line in metrics if key in line]


def assert_close(expected: list[dict], found: list[dict], loss: float, norm: float) -> None:
    """Compare each loss, evaluated loss and norm of the gradients; the bounds are relative."""
    for key, rel in (("loss", loss), ("eval_loss", loss), ("grad_norm", norm)):
        assert column(found, key) == pytest.approx(column(expected, key), rel=rel), key


@pytest.mark.gpu
@pytest.mark.parametrize(
    "args",
    [
        (),
        ("-m", "llama-tiny"),
        ("-m", "gpt2", "-s", 128, "-b", 4, "--global-batch-size", 8, "--lr", 3e-4),
    ],
    ids=["defaults", "llama-tiny", "gpt2-124m"],
)
def test_first_20_losses_agree_with_the_cpu(tmp_path, args):
    gpu, cpu = (
        train_in_shell(tmp_path, name, SCRIPT, *args, CUDA_VISIBLE_DEVICES=visible)
        for name, visible in (("gpu", "0"), ("cpu", ""))
    )
    assert gpu[0]["mfu"] is not None and cpu[0]["mfu"] is None
    assert column(gpu, "loss") == pytest.approx(column(cpu, "loss"), rel=1e-3)
    assert gpu[-1]["loss"] < gpu[0]["loss"] - 0.5


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("chapter", "variants"),
    [
        *((chapter, ()) for chapter in CHAPTERS),
        ("05-mixed-precision", FP16),
        ("02-ddp", FP16_IN_DDP),
    ],
    ids=lambda value: value if isinstance(value, str) else "+".join(value),
)
def test_no_step_waits_for_the_gpu(train, tmp_path, monkeypatch, chapter, variants):
    """Between two log lines nothing synchronizes; PyTorch raises an error if anything does."""
    if variants:
        chapter = str(make_variant(tmp_path, chapter, *variants))
    for name, value in SINGLE_PROCESS.items():  # restored afterwards
        monkeypatch.setenv(name, value)
    steps = 0

    def forbid_waiting(*_: object) -> None:
        nonlocal steps
        steps += 1
        torch.cuda.set_sync_debug_mode("error" if 3 <= steps < 18 else "default")

    handle = register_optimizer_step_post_hook(forbid_waiting)
    try:
        train("--max-steps", 20, "--log-freq", 20, "--ckpt-freq", 20, chapter=chapter)
    finally:
        handle.remove()
        torch.cuda.set_sync_debug_mode("default")
    assert steps == 20


@pytest.mark.gpu
def test_the_check_for_waiting_catches_an_item_call(train, tmp_path, monkeypatch):
    original = torch.nn.utils.clip_grads_with_norm_

    def clip_and_wait(parameters: object, max_norm: float, norm: torch.Tensor) -> None:
        norm.item()
        original(parameters, max_norm, norm)

    monkeypatch.setattr(torch.nn.utils, "clip_grads_with_norm_", clip_and_wait)
    with pytest.raises(RuntimeError, match="synchroniz"):
        test_no_step_waits_for_the_gpu(train, tmp_path, monkeypatch, "01-single-gpu", ())


def to_host(value: object) -> object:
    return full(value).cpu().clone() if isinstance(value, torch.Tensor) else value


@pytest.mark.gpu
@pytest.mark.parametrize("late", ["writing", "copying"])
def test_asynchronous_checkpoints_are_of_their_step(train, tmp_path, monkeypatch, late):
    """Compare the checkpoints of a run with what the GPU held when each was asked for.

    late: "writing", which begins half a second later, or "copying", of the last tensor, before
    which the GPU is busy for longer. It comes after the random state, for which the host pins
    memory at each save, and waits for the GPU: that would hide what the copy has not waited for.
    """
    collect, write = checkpoint.collect_content, filesystem.FileSystemWriter.write_data
    held, last = {}, []

    def note(*args: object) -> dict:
        content = collect(*args)
        content["optimizer"] = content.pop("optimizer")
        held[content["state"]["step"]] = tree_map(to_host, content)
        moments = [v for v in tree_leaves(content["optimizer"]) if isinstance(v, torch.Tensor)]
        last[:] = [moments[-1].to_local().untyped_storage().data_ptr()]
        return content

    def copy_late(target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False):
        if late == "copying" and source.is_cuda and source.data_ptr() in last:
            torch.cuda._sleep(6 * 10**9)  # cycles: three seconds
        return copy(target, source, non_blocking)

    def write_late(*args: object) -> object:
        if late == "writing":
            time.sleep(0.5)
        return write(*args)

    copy = torch.Tensor.copy_
    monkeypatch.setattr(torch.Tensor, "copy_", copy_late)
    monkeypatch.setattr(checkpoint, "collect_content", note)
    monkeypatch.setattr(filesystem.FileSystemWriter, "write_data", write_late)
    for name, value in SINGLE_PROCESS.items():
        monkeypatch.setenv(name, value)
    saves = ("--max-steps", 20, "--log-freq", 5, "--ckpt-freq", 5, "--keep-checkpoints", 9)
    chapter = make_variant(tmp_path, "04-fsdp", "async-checkpoint")
    train(*saves, name="run", chapter=str(chapter))
    assert sorted(held) == [5, 10, 15, 20]
    for step, expected in held.items():
        assert_same_tensors(expected, tensors(tmp_path / "run", step))


@pytest.mark.gpu
def test_planted_tensors_that_are_not_copied_are_noticed(train, tmp_path, monkeypatch):
    monkeypatch.setattr(BlockingAsyncStager, "stage", lambda _, content: content)
    with pytest.raises(AssertionError, match=r"\.(model|optimizer)\."):
        test_asynchronous_checkpoints_are_of_their_step(train, tmp_path, monkeypatch, "writing")


@pytest.mark.gpu
def test_one_rank_is_chapter_1(tmp_path):
    alone = train_in_shell(tmp_path, "alone", SCRIPT)
    rank = train_in_shell(tmp_path, "rank", *TORCHRUN, 1, "02-ddp/train_llm.py")
    assert column(rank, "loss") == pytest.approx(column(alone, "loss"), rel=1e-5)


@pytest.mark.multi_gpu
def test_resumes_on_gpus_from_the_cpu_s_checkpoint_and_back(tmp_path):
    """The moments of ZeRO-1 too: saved on GPUs, loaded by one process without."""
    straight = train_in_shell(tmp_path, "straight", SCRIPT)
    saves = ("--ckpt-freq", 10)
    script = make_variant(tmp_path, "02-ddp", "zero1") / "train_llm.py"
    train_in_shell(tmp_path, "moved", *TORCHRUN, 2, script, *saves)
    shutil.rmtree(tmp_path / "moved/checkpoints/step-00000020")
    moved = train_in_shell(tmp_path, "moved", SCRIPT, *saves, CUDA_VISIBLE_DEVICES="")
    assert column(moved, "loss") == pytest.approx(column(straight, "loss"), rel=1e-3)


@pytest.mark.multi_gpu
@pytest.mark.parametrize("also", [(), ("cpu-offload",)], ids=["sharded", "offloaded"])
def test_muon_is_the_same_on_two_gpus(tmp_path, also):
    """NCCL sends matrices to their owners and back, also if shards are in host memory.

    Matmuls in TF32 and updates in bfloat16 round differently on a different number of GPUs.
    """
    alone, shared = (
        make_variant(tmp_path, chapter, "muon", *others) / "train_llm.py"
        for chapter, others in (("01-single-gpu", ()), ("04-fsdp", also))
    )
    expected = train_in_shell(tmp_path, "alone", alone)
    found = train_in_shell(tmp_path, "shared", *TORCHRUN, 2, shared)
    assert column(found, "loss") == pytest.approx(column(expected, "loss"), rel=5e-3)


@pytest.mark.multi_gpu
def test_a_signal_to_one_rank_stops_all_gpus(tmp_path):
    """Also after Triton has compiled: it replaces the process's signal handlers."""
    cache = str(tmp_path / "inductor")
    env = {**os.environ, "NPROC_PER_NODE": "2", "TORCHINDUCTOR_CACHE_DIR": cache}

    def start(name: str) -> subprocess.Popen:
        words = (*FEW, "--compile", "--save-dir", tmp_path, "-e", name)
        command = ["bash", "03-multi-node/launch_torchrun.sh", *map(str, words)]
        return subprocess.Popen(command, cwd=ROOT, env=env, stderr=subprocess.PIPE, text=True)

    def end(process: subprocess.Popen) -> str:
        _, said = process.communicate(timeout=200)
        assert process.returncode == 0, said
        return said

    process = start("stopped")
    metrics = tmp_path / "stopped/metrics.jsonl"
    deadline = time.monotonic() + 200
    while not metrics.exists() or len(metrics.read_text().splitlines()) < 3:
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.01)
    os.kill(children(process.pid)[1], signal.SIGUSR1)
    assert "Told to stop; saved after step" in end(process)
    assert (tmp_path / "stopped/requeue").exists()
    assert len(read_metrics(tmp_path / "stopped")) < 20
    for name in ("stopped", "straight"):
        end(start(name))
    straight, stopped = (read_metrics(tmp_path / name) for name in ("straight", "stopped"))
    assert column(stopped, "step") == list(range(1, 21))
    # Compiled runs are not bit-identical. The unusual texts of step 11 magnify the differences.
    assert column(stopped, "loss") == pytest.approx(column(straight, "loss"), rel=1e-3)


FORWARD = 'with timers("forward"):\n'
LATE = [(FORWARD, f"{FORWARD}                __import__('time').sleep(0.05 * (rank == 1))\n")]
register("03-multi-node", LATE)


@pytest.mark.multi_gpu
def test_the_wait_for_a_slow_rank_is_seen_on_gpus(tmp_path):
    """Rank 1's host is 50 ms late in every step; rank 0's GPU stands still: its timer sees it."""
    script = plant("03-multi-node", tmp_path / "chapter", LATE) / "train_llm.py"
    # One micro-batch in a step: rank 1 is late in each of them, and the waits would add up.
    metrics = train_in_shell(tmp_path, "slow", *TORCHRUN, 2, script, "-b", 12)[2:]
    assert {line["slowest_rank"] for line in metrics} == {1}
    assert 40 < statistics.median(line["time/wait_max"] for line in metrics) < 75


def has_fp8() -> bool:
    """Whether this GPU and this environment have all that chapter 5 asks for."""
    ours = torch.cuda.is_available() and torch.cuda.get_device_capability() >= FP8_CAPABILITY
    return ours and importlib.util.find_spec("torchao") is not None


LARGE = 'loss * (float("inf") if rank == 1 and state["step"] == 4 else 1.0)'
OVERFLOW = [("scaler.scale(loss).backward()", f"scaler.scale({LARGE}).backward()")]
# With offload, the weights are where NCCL cannot add up which of them have changed.
OVERFLOWING = [
    ("05-mixed-precision", (*FP16, "share-changed")),
    ("05-mixed-precision", (*FP16, "cpu-offload")),
    ("02-ddp", FP16_IN_DDP),
]
for overflowing, names in OVERFLOWING:
    register(overflowing, OVERFLOW, names)


@pytest.mark.multi_gpu
@pytest.mark.parametrize(
    ("chapter", "variants"), OVERFLOWING, ids=["share-changed", "offload", "ddp"]
)
def test_an_overflow_on_one_gpu_makes_all_skip(tmp_path, chapter, variants):
    """Rank 1's gradients overflow in step 5: the weights stay, all halve the scale and go on."""
    folder = plant(make_variant(tmp_path, chapter, *variants), tmp_path / "planted", OVERFLOW)
    metrics = train_in_shell(tmp_path, "overflow", *TORCHRUN, 2, folder / "train_llm.py")
    scales = [line["loss_scale"] for line in metrics]
    assert scales[4] == scales[3] / 2 and set(scales[4:]) == {scales[4]}
    unchanged = [line["share_changed"] == 0 for line in metrics if "share_changed" in line]
    assert unchanged == ([n == 4 for n in range(20)] if "share-changed" in variants else [])
    assert metrics[4]["grad_norm"] is None and metrics[-1]["loss"] < metrics[0]["loss"] - 0.5


MODELS, MANY_HEADS = ("gpt2-tiny", "llama-tiny"), "llama-tiny-8-heads"
RANKS = max(2, min(4, torch.cuda.device_count()))
HALF = RANKS // 2
ALONE_RUNS = {
    model: Run("01-single-gpu", 1, ("-m", model, "-b", 24)) for model in (*MODELS, MANY_HEADS)
}
# Of chapters 2 and 4: nothing, and variants and arguments, for a start of as few as 2 ranks.
OPTIONS = {
    "02-ddp": [((), ()), (("zero1",), ()), FSDP_OPTIONS["accumulated"], FSDP_OPTIONS["compile"]],
    "04-fsdp": [
        ((), ()),
        *FSDP_OPTIONS.values(),
        (("async-checkpoint", "cpu-offload"), ()),
        (("selective-recomputation", "zero2"), ()),
    ],
}
ON_ALL_GPUS = [
    Run(chapter, RANKS, ("-m", model, *args), variants=variants)
    for model, chapter in product(MODELS, OPTIONS)
    for variants, args in OPTIONS[chapter]
]
ON_TWO_NODES = [
    Run("04-fsdp", 2 * HALF, ("-m", model), variants=("hsdp", *offload))
    for model, offload in product(MODELS, ((), ("cpu-offload",)))
]
# Groups of ranks with their own sequences x ranks that share a sequence x ranks that share a layer.
IN_THREE_DIMENSIONS = {
    f"{2 // (context * tensor)}x{context}x{tensor}": Run(
        *("04-fsdp", 2),
        ("-m", MANY_HEADS, "--context-parallel", context, "--tensor-parallel", tensor),
        variants=("context-parallel", "mesh", "tensor-parallel"),
    )
    for context, tensor in ((1, 1), (2, 1), (1, 2))
}


def run_in(precision: str, model: str, *args: str) -> Run:
    """Return a run of chapter 5 in this precision."""
    variants = {"fp16": FP16, "fp8": ("fp8",)}.get(precision, ())
    words = () if variants else ("--precision", precision)
    return Run("05-mixed-precision", RANKS, ("-m", model, *words, *args), variants=variants)


# At the default rate two runs part that differ in the last digit only.
SLOWLY = ("--lr", "1e-3")
FLOAT32_RUNS = {model: run_in("fp32", model, *SLOWLY) for model in MODELS}
FEW_BITS = [
    run_in(precision, model, *SLOWLY, *compiled)
    for model, precision in product(MODELS, ("bf16", "fp16", "fp8"))
    for compiled in ((), ("--compile",))
]
FEW_BITS += [
    Run("02-ddp", RANKS, ("-m", model, *SLOWLY), variants=variants)
    for model, variants in product(MODELS, (("autocast",), FP16_IN_DDP))
]


def model_of(run: Run) -> str:
    return run.args[run.args.index("-m") + 1]


@pytest.fixture(scope="module")
def ladder(request, make_folder) -> Ladder:
    runs = [run for run in selected_runs(request) if "fp8" not in run.variants or has_fp8()]
    if any(run in FEW_BITS for run in runs):
        runs += FLOAT32_RUNS.values()
    folder = make_folder("ladder")
    return Ladder(folder, [*runs, *ALONE_RUNS.values()], in_shell=True, length=32)


@pytest.fixture(scope="module")
def two_nodes(request, make_folder) -> Ladder:
    """Two nodes of half of the GPUs: the second half of the ranks begins at 0."""
    halves = [",".join(map(str, range(first, first + HALF))) for first in (0, HALF)]
    places = [
        {"LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": HALF, "CUDA_VISIBLE_DEVICES": gpus}
        for gpus in halves
        for rank in range(HALF)
    ]
    runs = [*selected_runs(request), *ALONE_RUNS.values()]
    folder = make_folder("nodes")
    return Ladder(folder, runs, in_shell=True, length=32, places={2 * HALF: places})


def assert_same_on_gpus(ladder: Ladder, run: Run) -> None:
    """As on the CPU, but NCCL sums in another order and TF32 has 3 digits."""
    alone, found = (ladder.metrics(ladder.run(each)) for each in (ALONE_RUNS[model_of(run)], run))
    assert len(alone) == STEPS and alone[-1]["loss"] < alone[0]["loss"] - 1
    assert_close(alone, found, 1e-3, 5e-2)


@pytest.mark.multi_gpu
@pytest.mark.parametrize("run", ON_ALL_GPUS, ids=lambda run: run.name)
def test_same_training_on_all_gpus(ladder, run):
    """The first of these does the runs of all, in one start."""
    assert_same_on_gpus(ladder, run)


@pytest.mark.multi_gpu
@pytest.mark.parametrize("run", ON_TWO_NODES, ids=lambda run: run.name)
def test_same_training_in_two_dimensions_of_gpus(two_nodes, run):
    assert_same_on_gpus(two_nodes, run)


@pytest.mark.multi_gpu
@pytest.mark.parametrize("run", IN_THREE_DIMENSIONS.values(), ids=IN_THREE_DIMENSIONS)
def test_same_training_in_three_dimensions_of_gpus(ladder, run):
    assert_same_on_gpus(ladder, run)


@pytest.mark.multi_gpu
@pytest.mark.parametrize("run", [run_in("tf32", model) for model in MODELS], ids=MODELS)
def test_tf32_is_chapter_4_on_gpus(ladder, run):
    """Up to the order in which GPUs add; fp32 is further away: TF32 has 3 digits."""
    model = model_of(run)
    chapter_4 = ladder.metrics(ladder.run(Run("04-fsdp", RANKS, ("-m", model))))
    tf32 = ladder.metrics(ladder.run(run))
    fp32 = ladder.metrics(ladder.run(run_in("fp32", model)))
    assert_close(chapter_4, tf32, 1e-5, 1e-3)
    assert column(fp32, "loss") != pytest.approx(column(chapter_4, "loss"), rel=1e-5)


@pytest.mark.multi_gpu
@pytest.mark.parametrize("run", FEW_BITS, ids=lambda run: run.name)
def test_few_bits_stay_near_fp32_on_gpus(ladder, run):
    if "fp8" in run.variants and not has_fp8():
        pytest.skip("needs a GPU with fp8, and torchao")
    fp32, found = (ladder.metrics(ladder.run(each)) for each in (FLOAT32_RUNS[model_of(run)], run))
    for key in ("loss", "eval_loss"):
        assert column(found, key) == pytest.approx(column(fp32, key), rel=1e-2), key
        assert column(found, key) != pytest.approx(column(fp32, key), rel=1e-6), "in float32"


POSITIONS, HEADS = 4096, 8


def peak_of_attention(attention: str | None) -> int:
    """Return the bytes that forward and backward add in a layer of grouped queries in float32."""
    config = AutoConfig.from_pretrained(
        ROOT / "common/inputs/presets/llama-tiny",
        max_position_embeddings=POSITIONS,
        num_attention_heads=HEADS,
        num_key_value_heads=2,
        num_hidden_layers=1,
        head_dim=64,
    )
    attention = attention or causal_attention(config)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention).cuda().model
    ids = torch.randint(config.vocab_size, (1, POSITIONS), device="cuda")
    for _ in range(2):  # the first time, libraries allocate their own memory, too
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        model(input_ids=ids).last_hidden_state.sum().backward()  # no logits, which are as large
    return torch.cuda.max_memory_allocated() - before


@pytest.mark.gpu
def test_attention_holds_no_matrix_of_positions():
    """The planted opposite is the attention of transformers: one number for each pair, per head."""
    matrices = HEADS * POSITIONS**2 * 4
    assert peak_of_attention(None) < matrices / 4
    assert peak_of_attention("sdpa") > matrices
