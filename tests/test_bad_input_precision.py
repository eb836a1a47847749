"""A precision that a device has not, or that says two things: one sentence, status 2, no file.

The devices are planted: what a GPU of another kind answers, this machine answers instead.
"""

import argparse
import functools
import json
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from helpers import ROOT, environment, first_then_nightly, listing, plant, say_it_soon
from runner import Ranks, load_script

import precision

CHAPTER = "05-mixed-precision"
GPU = "NVIDIA A100-SXM4-80GB"


def cannot_multiply_in(dtype: torch.dtype) -> None:
    """As PyTorch says it of a device that has no such product."""
    say_it_soon()
    product = torch.Tensor.__matmul__

    def multiply(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        if one.dtype == dtype:
            raise RuntimeError(f'"addmm_impl_cpu_" not implemented for {str(dtype)[6:]!r}')
        return product(one, other)

    torch.Tensor.__matmul__ = multiply


def on_a_gpu(capability: tuple[int, int]) -> None:
    """The check alone sees a GPU; nothing comes after it."""
    say_it_soon()
    torch.cuda.get_device_capability = lambda _: capability
    torch.cuda.get_device_name = lambda _: GPU
    check = precision.check_precision
    precision.check_precision = lambda args, _: check(args, torch.device("cuda:0"))


def without_torchao() -> None:
    on_a_gpu((9, 0))
    sys.modules["torchao"] = None  # what an import of it then finds


@pytest.fixture
def flags(corpus, tmp_path) -> list[object]:
    small = ("-s", 32, "--global-batch-size", 6, "--max-steps", 2)
    return ["-d", corpus, *small, "--save-dir", tmp_path, "-e", "refused"]


@pytest.fixture
def refuse(flags, tmp_path) -> Callable[..., str]:
    """Return a function that expects a refusal by both ranks and returns the one sentence."""

    def run(*args: object, plant: Callable[[], None] = say_it_soon, chapter: str = CHAPTER) -> str:
        before = listing(tmp_path)
        folder = tmp_path.with_name(f"{tmp_path.name}-stderr")
        folder.mkdir()
        files = [folder / str(rank) for rank in range(2)]
        options = {"chapter": chapter, "plant": plant, "stderr_file": [str(f) for f in files]}
        statuses = Ranks(2, [*flags, *args], **options).finish()
        said = [file.read_text() for file in files]
        assert statuses == [2, 2], said
        assert said[0].count("\n") == 1, said[0]
        assert said[1] == f"[rank 1] {said[0]}"
        assert listing(tmp_path) == before, "nothing was written"
        return said[0].rstrip("\n")

    return run


CANNOT = (
    "This device (a cpu) does not support --precision {}: give another one; fp32 works on every "
    "device."
)


@pytest.mark.parametrize(
    ("args", "name", "dtype"),
    first_then_nightly(
        [
            ((), "bf16", torch.bfloat16),
            (("--precision", "bf16"), "bf16", torch.bfloat16),
            (("--precision", "fp16"), "fp16", torch.float16),
        ]
    ),
    ids=["default", "bf16", "fp16"],
)
def test_a_device_that_cannot_multiply_in_it(refuse, args, name, dtype):
    planted = functools.partial(cannot_multiply_in, dtype)
    assert refuse(*args, plant=planted) == CANNOT.format(name)


def test_such_a_device_trains_in_float32(flags, tmp_path):
    planted = functools.partial(cannot_multiply_in, torch.bfloat16)
    arguments = [*flags, "-e", "fp32", "--precision", "fp32"]
    assert Ranks(1, arguments, chapter=CHAPTER, plant=planted).finish() == [0]
    assert (tmp_path / "fp32/state.json").exists()


def test_the_check_is_what_refuses(refuse, tmp_path):
    """The planted bug leaves it out: no refusal any more, an exception or a run."""
    replaced = ("args.precision = check_precision(args, device)", 'args.precision = "bf16"')
    chapter = str(plant(CHAPTER, tmp_path.with_name(f"{tmp_path.name}-chapter"), [replaced]))
    with pytest.raises(AssertionError):
        refuse(plant=functools.partial(cannot_multiply_in, torch.bfloat16), chapter=chapter)


NO_FP8 = (
    "--precision fp8 needs a GPU of compute capability 8.9 or higher and this device is {}: "
    "give --precision bf16."
)


def test_fp8_on_a_cpu(refuse):
    assert refuse("--precision", "fp8") == NO_FP8.format("a cpu")


def test_fp8_on_a_gpu_that_has_none(refuse):
    planted = functools.partial(on_a_gpu, (8, 0))
    assert refuse("--precision", "fp8", plant=planted) == NO_FP8.format(GPU)


def test_fp8_without_torchao(refuse):
    said = refuse("--precision", "fp8", plant=without_torchao)
    assert said.startswith("--precision fp8 needs torchao: ")
    assert said.endswith(", or give --precision bf16.")


@pytest.mark.check
@pytest.mark.parametrize(("capability", "refused"), [((8, 6), True), ((8, 9), False)])
def test_the_first_gpu_with_fp8(monkeypatch, capability, refused):
    """Ada, 8.9, gets past this check, to the one for torchao."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: GPU)
    monkeypatch.setitem(sys.modules, "torchao", None)
    args = argparse.Namespace(precision="fp8", param_dtype="float32")
    with pytest.raises(precision.InputError) as error:
        precision.check_precision(args, torch.device("cuda:0"))
    assert ("compute capability" in str(error.value)) == refused
    assert ("needs torchao" in str(error.value)) != refused


@pytest.mark.check
@pytest.mark.parametrize("name", ["fp32", "tf32", "bf16", "fp16", "fp8"])
def test_two_precisions(name):
    """Of each the same sentence; the ranks are asked once."""
    args = argparse.Namespace(precision=name, param_dtype="bfloat16")
    with pytest.raises(precision.InputError) as error:
        precision.check_precision(args, torch.device("cpu"))
    assert str(error.value) == two_precisions(name)


def two_precisions(name: str) -> str:
    return (
        f"--precision {name} needs float32 weights, but --param-dtype is bfloat16: "
        "give only one of the two flags."
    )


def test_two_precisions_on_two_ranks(refuse):
    said = refuse("--precision", "bf16", "--param-dtype", "bfloat16")
    assert said == two_precisions("bf16")


@pytest.mark.check
def test_unknown_precision(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["train_llm.py", "--precision", "int8"])
    with pytest.raises(SystemExit) as exit_:
        load_script(ROOT / CHAPTER / "train_llm.py").get_args()
    assert exit_.value.code == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert "argument --precision: invalid choice: 'int8' (choose from" in said


@pytest.mark.ci
def test_under_the_launch_file_rank_0_alone_speaks(flags, tmp_path):
    """torchrun ends the other rank; its own status is 1."""
    words = ["bash", ROOT / CHAPTER / "launch.sh", *flags, "--precision", "fp8"]
    done = subprocess.run(
        [str(word) for word in words],
        env=environment(NPROC_PER_NODE=2),
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 1
    said = (done.stdout + done.stderr).splitlines()
    assert said.count(NO_FP8.format("a cpu")) == 1
    assert f"[rank 1] {NO_FP8.format('a cpu')}" not in said
    written = [path.name for path in (tmp_path / "refused").iterdir()]
    assert written == ["logs"], "torchrun's, and nothing else"


def test_a_reduction_in_another_type_is_no_error(flags, tmp_path):
    """--reduce-dtype goes with weights in bfloat16 too."""
    arguments = [*flags, "-e", "reduced", "--param-dtype", "bfloat16", "--reduce-dtype", "float32"]
    assert Ranks(2, arguments, chapter=CHAPTER).finish() == [0, 0]
    metrics = (tmp_path / "reduced/metrics.jsonl").read_text().splitlines()
    assert json.loads(metrics[-1])["step"] == 2
