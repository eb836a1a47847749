"""What the flags ask for is what a script does, in every chapter: one short run shows it."""

import argparse
import functools
import json
import random
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
import report
import torch
import torch.distributed.fsdp as fsdp
from helpers import (
    CHAPTERS,
    make_variant,
    plant,
    register,
    write_corpus,
    write_narrow,
)
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import DataLoader
from transformers import GPT2LMHeadModel

from common import checkpoint, launch
from common.data import load_sequences
from common.inputs.models import load_tokenizer

LENGTH, GLOBAL_BATCH, MICRO_BATCH = 16, 6, 2
PEAK, WARM_UP, BETA1 = 0.02, 4, 0.7
LOG, EVALUATE, SAVE, KEEP = 2, 5, 4, 3
EPOCHS, SEED, SAMPLE = 1.5, 3, 2
VALUES = [
    *("--seed", SEED, "--text-column", "body", "-s", LENGTH),
    *("--tokenizer-name", "gpt2-tiny", "--compile"),
    *("-b", MICRO_BATCH, "--global-batch-size", GLOBAL_BATCH, "--num-epochs", EPOCHS),
    *("--lr", PEAK, "--beta1", BETA1, "--warmup-steps", WARM_UP, "--weight-decay", 0.25),
    *("--max-grad-norm", 0.01),
    *("--log-freq", LOG, "--eval-freq", EVALUATE, "--ckpt-freq", SAVE - 1),  # rounded up
    *("--keep-checkpoints", KEEP, "--eval-sequences", SAMPLE),
]


class Seen:
    """What one run did. Of each training pass: the tokens, and whether dropout was on.

    Of each optimizer step: the learning rate, the weight decay, beta1 and the dtypes of all
    parameters, the norm of the gradients as they were applied.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.passes: list[torch.Tensor] = []
        self.modes: dict[str, set[bool]] = {"training": set(), "evaluation": set()}
        self.steps: list[tuple] = []
        self.workers: set[int] = set()
        self.evaluated = 0  # sequences, without padding
        self.compiled = 0
        forward, init = GPT2LMHeadModel.forward, DataLoader.__init__

        @functools.wraps(forward)
        def note_pass(model: GPT2LMHeadModel, *args: object, **options: object) -> object:
            if torch.is_grad_enabled():
                self.passes.append(options["input_ids"].clone())
                self.modes["training"].add(model.training)
            else:
                self.modes["evaluation"].add(model.training)
                self.evaluated += (options["labels"] != -100).any(dim=1).sum().item()
            return forward(model, *args, **options)

        def note_workers(loader, *args: object, num_workers: int = 0, **options: object) -> None:
            self.workers.add(num_workers)
            init(loader, *args, **{**options, "timeout": 0})  # without: this process has threads

        def do_not_compile(function: Callable, **_: object) -> Callable:
            self.compiled += 1
            return function

        monkeypatch.setattr(GPT2LMHeadModel, "forward", note_pass)
        monkeypatch.setattr(DataLoader, "__init__", note_workers)
        monkeypatch.setattr(torch, "compile", do_not_compile)

    def note_step(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        groups = optimizer.param_groups
        parameters = [parameter for group in groups for parameter in group["params"]]
        gradients = [getattr(p.grad, "to_local", lambda p=p: p.grad)().float() for p in parameters]
        self.steps.append(
            (
                {group["lr"] for group in groups},
                {group["weight_decay"] for group in groups},
                {group["betas"][0] for group in groups},
                {parameter.dtype for parameter in parameters},
                torch.stack([gradient.norm() for gradient in gradients]).norm().item(),
            )
        )


@pytest.fixture(autouse=True)
def be_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Be one process that no launcher has started, and let no script change that for others."""
    for name, value in launch.SINGLE_PROCESS.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def check(train, tmp_path, monkeypatch) -> Callable[..., None]:
    """Return a function that trains with a chapter's script and compares what it does.

    It takes more arguments, the numbers of data workers, and the dtype of the weights.
    """
    letters = random.Random(0)
    rows = [{"text": "no", "body": "".join(letters.choices("abc \n", k=20))} for _ in range(60)]
    (tmp_path / "table.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    model = write_narrow(tmp_path / "model", "gpt2-tiny", n_layer=1)
    inputs = ["-d", tmp_path / "table.jsonl", "-m", model, *VALUES]

    def run_and_compare(
        chapter: Path | str,
        *args: object,
        workers: Iterable[int] = (0,),
        dtype: torch.dtype = torch.float32,
    ) -> None:
        # Of the same text, by the same key of the cache, before anything is noted.
        blocks = blocks_of(tmp_path / "table.jsonl")
        with monkeypatch.context() as patch:
            seen = Seen(patch)
            with register_optimizer_step_post_hook(seen.note_step):
                metrics = train(*inputs, *args, chapter=str(chapter))
        compare(seen, metrics, blocks)
        assert seen.workers == set(workers), f"the workers are {seen.workers}"
        dtypes = {dtype for *_, of_step, _ in seen.steps for dtype in of_step}
        assert dtypes == {dtype}, f"the weights are {dtypes}"
        found = sorted(int(path.name[-8:]) for path in (tmp_path / "run/checkpoints").iterdir())
        saved = sorted({*range(SAVE, len(seen.steps), SAVE), len(seen.steps)})
        assert found == saved[-KEEP:], f"the checkpoints are of {found}"

    return run_and_compare


def blocks_of(table: Path) -> torch.Tensor:
    """Return the sequences to train on, int64 [sequences, LENGTH]."""
    names = {"dataset_name": str(table), "dataset_subset": None, "text_column": "body"}
    args = argparse.Namespace(**names, seq_length=LENGTH)
    train_data, _ = load_sequences(args, load_tokenizer("gpt2-tiny"))
    return torch.stack([train_data[index]["input_ids"] for index in range(len(train_data))])


def compare(seen: Seen, metrics: list[dict], blocks: torch.Tensor) -> None:
    """Raise an AssertionError that begins with what is not as the flags ask for."""
    per_epoch = len(blocks) // GLOBAL_BATCH
    total = round(EPOCHS * per_epoch)
    assert len(seen.steps) == total, f"the number of steps is {len(seen.steps)}"
    sizes = {tuple(tokens.shape) for tokens in seen.passes}
    assert sizes == {(MICRO_BATCH, LENGTH)}, f"the shapes are {sizes}"
    order = [
        sequence
        for epoch in range(2)
        for sequence in torch.randperm(
            len(blocks), generator=torch.Generator().manual_seed(SEED + epoch)
        ).tolist()[: per_epoch * GLOBAL_BATCH]
    ]
    same = torch.equal(torch.cat(seen.passes), blocks[order[: total * GLOBAL_BATCH]])
    assert same, "the order is another"
    assert seen.compiled, "the model is not compiled"
    assert seen.modes == {"training": {True}, "evaluation": {False}}, f"the modes are {seen.modes}"

    rates, decays, betas, _, norms = zip(*seen.steps, strict=True)
    peak = [PEAK / WARM_UP, PEAK, PEAK / 10]
    found = [rate for index in (0, WARM_UP, -1) for rate in rates[index]]
    assert found == pytest.approx(peak), f"the learning rates are {found}"
    assert 0.25 in set.intersection(*decays), f"the weight decay is {decays[0]}"
    assert set.union(*betas) == {BETA1}, f"beta1 is {betas[0]}"
    assert max(norms) == pytest.approx(0.01, rel=0.05), f"the norm is {max(norms)}"

    steps = range(1, total + 1)
    logged = [step for step in steps if step % LOG == 0 or step == total]
    found = [line["step"] for line in metrics if "loss" in line]
    assert found == logged, f"the logged steps are {found}"
    found = [line["step"] for line in metrics if "eval_loss" in line]
    evaluated = [step for step in steps if step % EVALUATE == 0 or step == total]
    assert found == evaluated, f"the evaluated steps are {found}"
    found = seen.evaluated / len(evaluated)
    assert found == SAMPLE, f"the sequences of an evaluation are {found}"


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_every_flag_is_heard(chapter, check):
    check(chapter)


# Why a flag has no value in VALUES.
ELSEWHERE = {
    **dict.fromkeys(("--experiment-name", "--save-dir", "--dataset-name"), "the fixtures give it"),
    **dict.fromkeys(("--model-name", "--max-steps"), "beside VALUES, or test_training.py"),
    "--checkpoint-dir": "test_failures.py and test_remote.py",
    "--dataset-subset": "test_users_data.py",
    "--pretrained": "test_fine_tuning.py",
    "--dist-timeout": "test_multi_node.py",
    "--activation-checkpointing": "test_fsdp.py",
    "--precision": "test_precision.py",
}


@pytest.mark.check
def test_every_flag_has_a_value_here():
    """Or a reason: a flag that no script uses would pass all other tests of this module."""
    given = {str(word) for word in VALUES}
    for chapter in CHAPTERS:
        for option in report.options(chapter):
            tried = given & {*option["names"]} or option["flag"] in ELSEWHERE
            assert tried, f"{option['flag']} of {chapter}: add a value to VALUES"


# By chapter: a variant that stores 16 bits, beside that of the data workers.
OF_16_BITS = {"01-single-gpu": "bfloat16-weights", "05-mixed-precision": "pure-bfloat16"}
WORKERS = {"workers": {0, 1}, "dtype": torch.bfloat16}


@pytest.mark.parametrize(
    "chapter",
    [
        pytest.param("01-single-gpu", marks=pytest.mark.ci),
        pytest.param("05-mixed-precision", marks=pytest.mark.nightly),
    ],
)
def test_workers_and_weights_of_16_bits(chapter, check, tmp_path):
    """The evaluation has no workers."""
    variant = make_variant(tmp_path, chapter, "workers", OF_16_BITS[chapter])
    check(variant, "--num-workers", 1, **WORKERS)


# What is replaced in the script, and with what the complaint begins.
BUGS = {
    "seed": ("rank=rank, seed=args.seed)", "rank=rank, seed=0)", "the order"),
    "epochs": ("args.num_epochs * steps", "0.6 * steps", "the number of steps"),
    "weight decay": ("weight_decay=args.weight_decay", "weight_decay=0.1", "the weight decay"),
    "beta1": ("betas=(args.beta1, ", "betas=(0.8, ", "beta1 is"),
    "clipping": ("args.max_grad_norm)", "1.0)", "the norm"),
    "warm-up": ("(step + 1) / args.warmup_steps", "step / args.warmup_steps", "the learning rates"),
    "compile": ("    if args.compile:", "    if False:", "the model is not compiled"),
    "micro-batch": ("limit = min(share, args.batch_size)", "limit = share", "the shapes"),
    "dropout": ("    model.train()\n    loss = ", "    loss = ", "the modes"),
    "log": ("% args.log_freq == 0 or last", "% 1 == 0 or last", "the logged steps"),
    "evaluation": ('state["step"] % args.eval_freq', 'state["step"] % 200', "the evaluated steps"),
    "sample": (".sample(args.eval_sequences)", "", "the sequences of an evaluation"),
    "checkpoints": ("% args.ckpt_freq == 0", "% 50 == 0", "the checkpoints"),
    "kept": (
        "    settings = ",
        "    args.keep_checkpoints = 2\n    settings = ",
        "the checkpoints",
    ),
}
for right, wrong, _ in BUGS.values():
    register(CHAPTERS[0], [(right, wrong)])


@pytest.mark.parametrize("bug", BUGS)
def test_planted_flag_that_is_not_heard(bug, check, tmp_path):
    right, wrong, complaint = BUGS[bug]
    chapter = plant(CHAPTERS[0], tmp_path / "chapter", [(right, wrong)])
    with pytest.raises(AssertionError, match=f"^{complaint}"):
        check(chapter)


BUGS_IN_A_VARIANT = {
    "dtype": (".to(torch.bfloat16)", ".to(torch.float32)", "the weights"),
    "workers": ("num_workers=args.num_workers", "num_workers=0", "the workers"),
}
for right, wrong, _ in BUGS_IN_A_VARIANT.values():
    register(CHAPTERS[0], [(right, wrong)], ("bfloat16-weights", "workers"))


@pytest.mark.parametrize("bug", BUGS_IN_A_VARIANT)
def test_planted_flag_of_a_variant_that_is_not_heard(bug, check, tmp_path):
    right, wrong, complaint = BUGS_IN_A_VARIANT[bug]
    variant = make_variant(tmp_path, CHAPTERS[0], "bfloat16-weights", "workers")
    chapter = plant(str(variant), tmp_path / "chapter", [(right, wrong)])
    with pytest.raises(AssertionError, match=f"^{complaint}"):
        check(chapter, "--num-workers", 1, **WORKERS)


# --- what may change when a run is resumed ---

# For each name in MAY_CHANGE two values, with which a run must compute the same; or why that cannot
# be, or is shown elsewhere.
TWO_VALUES = {
    "checkpoint_dir": ("one", "two"),
    "keep_checkpoints": (1, 3),
    "log_freq": (1, 2),
    "eval_freq": (2, 5),
    "eval_sequences": (2, 4),
    "ckpt_freq": (2, 4),
    "batch_size": (1, 3),
    "dist_timeout": (500, 600),
    "activation_checkpointing": (False, True),
}
NOT_TRIED = {
    **dict.fromkeys(checkpoint.SOURCES, "what it stands for is compared: the tokens, the model"),
    **dict.fromkeys(("experiment_name", "save_dir"), "each run here has another folder"),
    "num_epochs": "total_steps is fixed",
    "max_steps": "total_steps is fixed",
    "compile": "test_parity.py and test_fsdp.py compare compiled runs",
}


def check_that_may_change(name: str, values: tuple, train: Callable, tmp_path: Path) -> None:
    """Raise an AssertionError if two runs of chapter 5 with these values differ by more than 1e-5.

    Afterwards, the first run is started again with the second value, and must not be refused.

    Compared are the loss, the norm and the learning rate of the steps that both log. With another
    log frequency, a loss is the mean of other steps, so only the other two are compared.
    """
    without_dropout = {"n_layer": 2, "attn_pdrop": 0, "embd_pdrop": 0, "resid_pdrop": 0}
    words = ["-d", write_corpus(tmp_path), "--tokenizer-name", "gpt2-tiny", "-s", 16]
    words += ["-m", write_narrow(tmp_path / "model", "gpt2-tiny", **without_dropout)]
    words += ["-b", 2, "--global-batch-size", 6, "--max-steps", 6, "--lr", 0.02]
    words += ["--precision", "fp32", "--log-freq", 1, "--ckpt-freq", 4, "--eval-sequences", 4]
    runs = []
    for number, value in enumerate(values):
        flag = f"--{name.replace('_', '-')}"
        own = [flag] * value if isinstance(value, bool) else [flag, value]
        if name == "checkpoint_dir":
            own = [flag, tmp_path / value]
        metrics = train(*words, *own, chapter=CHAPTERS[4], name=f"run-{number}")
        runs.append({line["step"]: line for line in metrics if "loss" in line})
    one, two = runs
    if name != "checkpoint_dir":  # where the checkpoints must be moved to, first
        train(*words, *own, chapter=CHAPTERS[4], name="run-0")
    keys = ("grad_norm", "lr") if name == "log_freq" else ("loss", "grad_norm", "lr")
    assert len(one.keys() & two.keys()) >= 3, "too few steps are compared"
    for step in one.keys() & two.keys():
        for key in keys:
            same = one[step][key] == pytest.approx(two[step][key], rel=1e-5)
            assert same, f"{name} changes the {key} of step {step}"


def test_every_name_that_may_change_is_tried():
    """A new one needs two values, or a reason. Each is an argument of a script."""
    assert {*TWO_VALUES, *NOT_TRIED} == {*checkpoint.MAY_CHANGE}
    flags = {option["flag"] for chapter in CHAPTERS for option in report.options(chapter)}
    arguments = {flag.removeprefix("--").replace("-", "_") for flag in flags}
    assert arguments.issuperset(checkpoint.MAY_CHANGE)


@pytest.mark.parametrize("name", TWO_VALUES)
def test_what_may_change_computes_the_same(name, train, tmp_path):
    check_that_may_change(name, TWO_VALUES[name], train, tmp_path)


def test_planted_name_that_must_not_be_among_those_that_may_change(train, tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "MAY_CHANGE", (*checkpoint.MAY_CHANGE, "beta1"))
    with pytest.raises(AssertionError, match=r"^beta1 changes the \w+ of step"):
        check_that_may_change("beta1", (0.7, 0.9), train, tmp_path)


# --- variants of sharding ---


def test_every_variant_of_sharding_is_heard(train, corpus, tmp_path, monkeypatch):
    """What chapter 5 asks FSDP for; test_fsdp.py shows what it gets, and what is recomputed."""
    asked, shard = [], fsdp.fully_shard

    def note_options(module: torch.nn.Module, **options: object) -> torch.nn.Module:
        asked.append(options)
        return shard(module, **options)

    monkeypatch.setattr(fsdp, "fully_shard", note_options)
    model = write_narrow(tmp_path / "model", "gpt2-tiny", n_layer=3)
    words = ["-d", corpus, "-m", model, "--tokenizer-name", "gpt2-tiny", "-s", LENGTH, "-b", 2]
    words += ["--global-batch-size", 6, "--max-steps", 1]
    names = ("zero2", "cpu-offload", "reduce-bfloat16")
    variant = make_variant(tmp_path, CHAPTERS[4], *names)
    for name, chapter in (("plain", CHAPTERS[4]), ("variant", variant)):
        train(*words, chapter=str(chapter), name=name)
    plain, variant = asked[:4], asked[4:]
    assert {options.get("reshard_after_forward") for options in plain} == {None}
    assert [options.get("reshard_after_forward") for options in variant] == [False] * 3 + [None]
    for options in plain:
        assert "offload_policy" not in options
        assert options["mp_policy"].reduce_dtype == torch.float32
    for options in variant:
        assert isinstance(options["offload_policy"], fsdp.CPUOffloadPolicy)
        assert options["mp_policy"].reduce_dtype == torch.bfloat16
