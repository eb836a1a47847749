"""What only a GPU can show. Each test says so in the skip line where there is none."""

import pytest
import torch
from conftest import CHAPTERS, read_metrics, run_script
from torch.optim.optimizer import register_optimizer_step_post_hook

from common.launch import ALONE

SCRIPT = "01-single-gpu/train_llm.py"
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node")


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
    losses = {}
    for device, visible in (("gpu", "0"), ("cpu", "")):
        done = run_script(
            *(SCRIPT, *args, "--save-dir", tmp_path, "-e", device),
            *("--max-steps", 20, "--log-freq", 1, "--eval-freq", 100),
            CUDA_VISIBLE_DEVICES=visible,
        )
        assert done.returncode == 0, done.stderr
        metrics = read_metrics(tmp_path / device)
        assert (metrics[0]["mfu"] is None) == (device == "cpu")
        losses[device] = [line["loss"] for line in metrics]
    assert losses["gpu"] == pytest.approx(losses["cpu"], rel=1e-3)
    assert losses["gpu"][-1] < losses["gpu"][0] - 0.5


@pytest.mark.gpu
@pytest.mark.parametrize("chapter", CHAPTERS)
def test_no_step_waits_for_the_gpu(train, monkeypatch, chapter):
    """Between two log lines nothing synchronises; PyTorch raises an error if anything does."""
    for name, value in ALONE.items():  # restored afterwards
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
def test_the_check_for_waiting_catches_an_item_call(train, monkeypatch):
    original = torch.nn.utils.clip_grad_norm_

    def clip_and_wait(*args: object) -> torch.Tensor:
        norm = original(*args)
        norm.item()
        return norm

    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", clip_and_wait)
    with pytest.raises(RuntimeError, match="synchroniz"):
        test_no_step_waits_for_the_gpu(train, monkeypatch, "01-single-gpu")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_compiled_model_resumes_on_a_gpu(train, tmp_path, dtype):
    common = (
        "--max-steps",
        12,
        "--log-freq",
        1,
        "--ckpt-freq",
        6,
        "--param-dtype",
        dtype,
        "--compile",
    )
    straight = train(*common, name="straight")
    train(*common, name="resumed")
    # Back to the checkpoint of step 6: without the newer one the run goes on from there.
    newest = tmp_path / "resumed/checkpoints/step-00000012"
    newest.rename(tmp_path / "newest")
    resumed = train(*common, name="resumed")
    assert [line["step"] for line in resumed] == list(range(1, 13))
    rel = 1e-5 if dtype == "float32" else 1e-2
    for key in ("loss", "lr"):
        assert [m[key] for m in resumed] == pytest.approx([m[key] for m in straight], rel=rel)


def losses_of(tmp_path, name: str, *command: object) -> list[dict]:
    args = ("--max-steps", 20, "--log-freq", 1, "--eval-freq", 10)
    done = run_script(*command, "--save-dir", tmp_path, "-e", name, *args)
    assert done.returncode == 0, done.stderr
    return read_metrics(tmp_path / name)


@pytest.mark.multi_gpu
@pytest.mark.parametrize("model", ["gpt2-tiny", "llama-tiny"])
@pytest.mark.parametrize("options", [(), ("-b", 2), ("--zero1",), ("--compile",)], ids=str)
def test_same_training_on_all_gpus(tmp_path, model, options):
    """As on the CPU, but NCCL sums in another order and TF32 has 3 digits."""
    world_size = min(4, torch.cuda.device_count())
    args = ("-m", model, *options)
    alone = losses_of(tmp_path, "alone", SCRIPT, "-m", model)
    ranks = losses_of(tmp_path, "ranks", *TORCHRUN, world_size, "02-ddp/train_llm.py", *args)
    for key, rel in (("loss", 1e-3), ("eval_loss", 1e-3), ("grad_norm", 5e-2)):
        assert [line[key] for line in ranks if key in line] == pytest.approx(
            [line[key] for line in alone if key in line], rel=rel
        )


@pytest.mark.gpu
def test_one_rank_is_chapter_1(tmp_path):
    alone = losses_of(tmp_path, "alone", SCRIPT)
    rank = losses_of(tmp_path, "rank", *TORCHRUN, 1, "02-ddp/train_llm.py")
    assert [line["loss"] for line in rank] == pytest.approx(
        [line["loss"] for line in alone], rel=1e-5
    )


@pytest.mark.gpu
def test_more_processes_than_gpus_end_in_a_sentence(tmp_path):
    processes = torch.cuda.device_count() + 1
    done = run_script(*TORCHRUN, processes, "02-ddp/train_llm.py", "--save-dir", tmp_path)
    assert done.returncode == 1
    assert done.stderr.count(f"{processes} processes on this machine need {processes} GPUs") >= 1


@pytest.mark.multi_gpu
def test_resumes_on_gpus_from_the_cpu_s_checkpoint_and_back(tmp_path):
    """The moments of ZeRO-1 too: saved on GPUs, loaded by one process without."""
    args = ("--max-steps", 20, "--log-freq", 1, "--ckpt-freq", 10, "--save-dir", tmp_path)
    straight = losses_of(tmp_path, "straight", SCRIPT)
    done = run_script(*TORCHRUN, 2, "02-ddp/train_llm.py", *args, "-e", "moved", "--zero1")
    assert done.returncode == 0, done.stderr
    newest = tmp_path / "moved/checkpoints/step-00000020"
    newest.rename(tmp_path / "newest")
    done = run_script(SCRIPT, *args, "-e", "moved", CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 0, done.stderr
    assert [line["loss"] for line in read_metrics(tmp_path / "moved")] == pytest.approx(
        [line["loss"] for line in straight], rel=1e-3
    )
