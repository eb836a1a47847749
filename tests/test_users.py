"""What users bring: launchers, terminals, variables, models, and workers that fail."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist
import wandb
from helpers import ROOT, environment, plant, read_metrics, run_script, wait_for_file, write_narrow
from runner import finish, start
from tokenizers import Tokenizer
from torch import nn
from transformers import AutoModelForCausalLM

from common import launch, models, storage, tracker
from common.cli import RunError

SCRIPT = "01-single-gpu/train_llm.py"
SMALL = ("-s", 32, "--global-batch-size", 6, "--log-freq", 1)


@pytest.fixture
def flags(corpus, tmp_path) -> list[object]:
    return ["-d", corpus, "--save-dir", tmp_path, *SMALL, "--max-steps", 4]


def change_json(file: Path, **changes: object) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def start_in_shell(chapter: str, args: list[object], **options: object) -> subprocess.Popen:
    command = [sys.executable, f"{chapter}/train_llm.py", *map(str, args)]
    return subprocess.Popen(command, cwd=ROOT, env=environment(WANDB_MODE="disabled"), **options)


# --- launchers ---

ADDRESS = {"MASTER_ADDR": "node1", "MASTER_PORT": "29500"}


def prepare(monkeypatch: pytest.MonkeyPatch, place: dict[str, object]) -> dict[str, str]:
    """Return the variables that torchrun would set, after prepare_environment."""
    monkeypatch.setattr(os, "environ", {key: str(value) for key, value in place.items()})
    launch.prepare_environment()
    return {name: os.environ[name] for name in launch.RANK_VARIABLES}


@pytest.mark.check
@pytest.mark.parametrize("local_rank", ["MPI_LOCALRANKID", "PMI_LOCAL_RANK"])
def test_a_launcher_tells_a_process_its_rank(monkeypatch, local_rank):
    """MPICH and Intel MPI, and Cray MPICH."""
    found = prepare(monkeypatch, {"PMI_RANK": 3, "PMI_SIZE": 4, local_rank: 1, **ADDRESS})
    assert found == {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", **ADDRESS}


@pytest.mark.check
@pytest.mark.parametrize(
    ("place", "name"),
    [
        ({"PALS_RANKID": "1", "PALS_LOCAL_RANKID": "1"}, "PALS_RANKID is 1"),
        ({"PMI_RANK": "0", "PMI_SIZE": "2"}, "PMI_RANK is 0"),
        ({"SLURM_NTASKS": "2", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}, "SLURM_NTASKS is 2"),
        ({"RANK": "1", "PALS_RANKID": "1"}, "PALS_RANKID is 1"),
    ],
)
def test_a_process_that_cannot_know_its_rank_does_not_train_alone(monkeypatch, place, name):
    with pytest.raises(RunError) as error:
        prepare(monkeypatch, place)
    assert str(error.value).startswith(f"{name}, so there are several processes, but this one")
    alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    assert prepare(monkeypatch, {**place, "WORLD_SIZE": "1"}).items() >= alone.items()
    one = {"SLURM_NTASKS": "1", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
    assert prepare(monkeypatch, one).items() >= alone.items()


@pytest.mark.check
@pytest.mark.parametrize(
    ("n_gpus", "place", "refused"),
    [
        (1, {}, False),  # each process sees another GPU
        (1, {"LOCAL_WORLD_SIZE": "4"}, True),  # torchrun
        (3, {}, True),
        (4, {"LOCAL_WORLD_SIZE": "4"}, False),
        (0, {}, False),
    ],
)
def test_processes_and_the_gpus_that_they_see(monkeypatch, n_gpus, place, refused):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: n_gpus)
    place = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "3", **ADDRESS, **place}
    if refused:
        with pytest.raises(RunError, match=f"4 processes on this machine need 4 GPUs.* {n_gpus}"):
            prepare(monkeypatch, place)
    else:
        assert prepare(monkeypatch, place)["LOCAL_RANK"] == "3"


# --- what is left over in a shell, and terminals that close ---


@pytest.mark.check
@pytest.mark.parametrize("script", [SCRIPT, "01-single-gpu/generate.py"])
def test_a_rank_that_is_left_over_in_the_shell_prints(script):
    for left_over in ({"RANK": 1}, {"RANK": 1, "WORLD_SIZE": 1}):
        assert run_script(script, "--help", **left_over).stdout.startswith("usage: ")
        done = run_script(script, "run", "--no-such-flag", **left_over)
        assert done.returncode == 2 and "--no-such-flag" in done.stderr


@pytest.mark.parametrize(
    ("chapter", "open_pair"), [("01-single-gpu", os.pipe), ("02-ddp", os.openpty)]
)
def test_a_training_survives_its_terminal(flags, tmp_path, chapter, open_pair):
    """And a pipe whose reader ends, such as head -1."""
    reader, writer = open_pair()
    process = start_in_shell(chapter, [*flags, "-e", "run"], stdout=writer, stderr=writer)
    os.close(writer)
    assert b"20" in os.read(reader, 100)
    os.close(reader)
    assert process.wait(300) == 0
    assert [line["step"] for line in read_metrics(tmp_path / "run")] == [1, 2, 3, 4]


# --- variables and arguments ---


@pytest.mark.check
def test_the_variables_of_wandb(tmp_path, monkeypatch):
    def options_of(**variables: str) -> dict[str, object]:
        given = {}
        monkeypatch.setattr(wandb, "init", lambda **options: given.update(options))
        for name, value in {"WANDB_MODE": "offline", **variables}.items():
            monkeypatch.setenv(name, value)
        tracker.Tracker(tmp_path, {"total_steps": 1}, 0)
        return {name: given.get(name) for name in ("project", "name")}

    assert options_of() == {"project": "one-diff-at-a-time", "name": tmp_path.name}
    assert options_of(WANDB_PROJECT="p", WANDB_NAME="n") == {"project": "p", "name": "n"}
    assert options_of(WANDB_DISABLED="true") == {"project": None, "name": None}


def test_a_mode_that_wandb_does_not_know(flags):
    done = run_script(SCRIPT, *flags, "-e", "run", WANDB_MODE="never")
    assert done.returncode == 2 and "Traceback" not in done.stderr
    said = done.stderr.splitlines()[-1]
    assert said.startswith("wandb refuses WANDB_MODE or another of its variables (")
    assert "'never'" in said


@pytest.mark.check
def test_a_home_folder_is_not_a_folder_named_tilde(monkeypatch, tmp_path):
    """The shell does not know it in --save-dir=~/runs and in an @file."""
    monkeypatch.setenv("HOME", str(tmp_path))
    assert storage.as_path("~/runs") == tmp_path / "runs"


@pytest.mark.check
def test_threads_are_those_of_the_cores_that_slurm_allows(monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 128)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    monkeypatch.setenv("NPROC_PER_NODE", "2")
    assert launch.plan([])[:2] == (2, 4)


# --- models and tokenizers ---


@pytest.fixture
def folder(tmp_path) -> Path:
    """A model with its tokenizer."""
    path = write_narrow(tmp_path / "model", "llama-tiny")
    models.load_tokenizer("gpt2-tiny").save_pretrained(path)
    return path


@pytest.mark.check
@pytest.mark.parametrize("pad", [0, 10**6])
def test_padding_is_neither_end_of_text_nor_too_large(folder, pad):
    """The embedding of a padding token is zero and is not trained; sequences have no padding."""
    change_json(folder / "config.json", pad_token_id=pad)
    tokenizer = models.load_tokenizer(str(folder))
    assert tokenizer.eos_token_id == 0
    config = models.load_config(str(folder), tokenizer)
    model = AutoModelForCausalLM.from_config(config)
    tokens = torch.tensor([[5, 0, 6, 7]])
    model(input_ids=tokens, labels=tokens).loss.backward()
    weight = model.get_input_embeddings().weight
    assert weight[0].norm() > 0 and weight.grad[0].norm() > 0


@pytest.mark.check
@pytest.mark.parametrize("name", ["Qwen2Tokenizer", "GemmaTokenizer", "GPT2Tokenizer"])
def test_tokenizer_json_counts_not_the_rules_of_a_class(folder, name):
    """https://github.com/huggingface/transformers/issues/45488"""
    change_json(folder / "tokenizer_config.json", tokenizer_class=name)
    text = "def size(a):\n    return 'Größe' + str(12345)  # can't"
    expected = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text).ids
    tokenizer = models.load_tokenizer(str(folder))
    found = tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)
    assert found == expected
    assert tokenizer.eos_token == "<|endoftext|>"


@pytest.mark.check
def test_token_ids_with_a_gap(folder):
    file = folder / "tokenizer.json"
    content = json.loads(file.read_text())
    content["model"]["vocab"]["zzzz"] = 70_000
    file.write_text(json.dumps(content))
    tokenizer = models.load_tokenizer(str(folder))
    with pytest.raises(RunError, match="The tokenizer has 70001 tokens and the model only 4096"):
        models.load_config(str(folder), tokenizer)
    assert models.load_config("gpt2-tiny", tokenizer).vocab_size == 70_016


@pytest.mark.check
def test_weights_that_are_not_finite_are_told_of(folder):
    model = AutoModelForCausalLM.from_config(models.load_config(str(folder)))
    with torch.no_grad():
        model.get_input_embeddings().weight[3] = torch.nan
    with pytest.raises(RunError, match="computes nan or inf: get its weights again"):
        models.check_causal(model)


@pytest.mark.check
def test_heads_that_do_not_fit_together_are_told_of(folder):
    change_json(folder / "config.json", num_attention_heads=4, num_key_value_heads=3)
    model = AutoModelForCausalLM.from_config(models.load_config(str(folder)))
    with pytest.raises(RunError, match=r"has no usable model \(The size of tensor"):
        models.check_causal(model)


def test_no_compiler_for_compile(flags, tmp_path):
    place = {"CXX": "/no/compiler", "TORCHINDUCTOR_CACHE_DIR": tmp_path}
    done = run_script(SCRIPT, *flags, "--compile", **place)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    said = done.stderr.splitlines()[-1]
    assert said == "--compile needs a C++ compiler: install one, such as g++, or leave it out."


# --- a run that goes on has its own defaults ---


def test_a_run_that_goes_on_takes_its_arguments_from_its_first_start(tmp_path):
    rows = [
        {"other": f"Not {n}, nor others. " * 20, "body": f"Text {n}, with words. " * 20}
        for n in range(50)
    ]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    first = ["-d", tmp_path / "rows.jsonl", "--text-column", "body", *SMALL, "--max-steps", 8]
    first += ["--seed", 5, "--lr", 0.02, "--beta1", 0.9, "--warmup-steps", 3, "-b", 3]
    every = ["--ckpt-freq", 4, "--log-freq", 1, "--eval-freq", 4, "--save-dir", tmp_path]
    assert finish(start([*first, *every, "-e", "unbroken"])) == 0
    assert finish(start([*first, *every, "-e", "run"], kill_after_steps=6)) < 0
    stderr = tmp_path / "stderr"
    for given, said in (
        (("--num-epochs", 3), "was started with total_steps 8, not "),
        (("--beta1", 0.8), "was started with --beta1 0.9, not 0.8"),
        (("--text-column", "other"), "was started with dataset_checksum "),
    ):
        again = start([*every, "-e", "run", *given], stderr_file=str(stderr))
        assert finish(again) == 2 and said in stderr.read_text().splitlines()[-1]
    assert finish(start([*every, "-e", "run", "-b", 3], stderr_file=str(stderr))) == 0
    taken = "seed, dataset_name, text_column, seq_length, global_batch_size, lr, beta1"
    assert all(name in stderr.read_text().split("'as_before': ")[1] for name in taken.split(", "))
    keys = ("step", "loss", "lr", "grad_norm", "eval_loss")
    expected, found = (
        [[line.get(key) for key in keys] for line in read_metrics(tmp_path / name)]
        for name in ("unbroken", "run")
    )
    assert found == expected and len(found) == 8


# --- a worker that cannot deliver, and errors of libraries ---


def test_a_data_worker_that_cannot_deliver_ends_in_one_sentence(flags, tmp_path):
    """A long TMPDIR: the name of a socket has at most 107 characters."""
    patience = ("timeout=300 if", "timeout=10 if")
    script = plant("01-single-gpu", tmp_path / "script", [patience]) / "train_llm.py"
    folder = tmp_path / ("x" * 100)
    folder.mkdir()
    done = run_script(
        script, *flags, "--num-workers", 1, "-e", "run", real=True, timeout=120, TMPDIR=folder
    )
    assert done.returncode == 2, done.stderr
    said = done.stderr.splitlines()[-1]
    assert said.startswith("A data worker cannot deliver batches (DataLoader timed out after 10 s")
    assert said.endswith("others need room in /dev/shm and a short TMPDIR.")


def test_a_data_worker_that_is_killed_ends_in_one_sentence(flags, tmp_path):
    arguments = [*flags, "--max-steps", 10**6, "--num-workers", 1, "-e", "run"]
    process = start_in_shell("02-ddp", arguments, stderr=subprocess.PIPE, text=True)
    wait_for_file(tmp_path / "run/metrics.jsonl", lambda: process.poll() is None)
    while not read_metrics(tmp_path / "run", going_on=True):
        time.sleep(0.1)
    (worker,) = psutil.Process(process.pid).children()
    worker.kill()
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 2 and "Traceback" not in stderr, stderr
    said = stderr.splitlines()[-1]
    # PyTorch names the worker, unless the broken connection to it is noticed before its end.
    assert said.startswith("A data worker cannot deliver batches (")


@pytest.mark.check
def test_two_processes_on_one_gpu_are_told_so():
    said = "Last error:\nDuplicate GPU detected : rank 1 and rank 0 both on CUDA device 50000"
    sentence = "Several processes have the same GPU: start as many processes as GPUs."
    assert launch._explain(dist.DistBackendError(said)) == (sentence, 2)


@pytest.mark.check
def test_parameters_without_a_gradient_are_told_of():
    """DDP itself says it in the second step."""
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        model = nn.ModuleDict({"used": nn.Linear(2, 2), "other": nn.Linear(2, 2)})
        model.forward = lambda x: model["used"](x).sum()
        ddp_model = nn.parallel.DistributedDataParallel(model)
        ddp_model(torch.ones(2)).backward()
        with pytest.raises(RuntimeError) as error:
            ddp_model(torch.ones(2))
    finally:
        dist.destroy_process_group()
    sentence, status = launch._explain(error.value)
    assert sentence.startswith("Some parameters of this model get no gradient") and status == 2
    assert sentence.endswith("find_unused_parameters=True.")
