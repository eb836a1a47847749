"""Whoever comes from another script or framework finds the subject here, and its commands run.

The subjects are those of where_from.md. Each has a row, a page that names it, and a command that
other tests run, or variants that can be made and that other tests compare with their chapter.
Below: commands that are typed elsewhere, gpt2.args, and TensorBoard.
"""

import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import report
from helpers import (
    CHAPTERS,
    ROOT,
    blocks,
    commands,
    environment,
    free_port,
    make_variant,
    name_of,
    read_metrics,
    run_script,
)
from runner import load_script

from common import variants

PAGE = ROOT / "01-single-gpu/topics/where_from.md"
LAUNCH_PAGE = ROOT / "03-multi-node/topics/launch.md"
# What the first cell of a row must have: what the page that the row links must have.
SUBJECTS = {
    "argparse": "--help",
    "wandb": "wandb",
    "torch.save": "checkpoint",
    "Hydra": "Hydra",
    "YAML": "YAML",
    "TensorBoard": "SummaryWriter",
    "minGPT": "residual stream",
    "nanoGPT": "residual stream",
    "JSON array": "array of strings",
    "vocabulary of your own": "vocabulary",
    "characters": "--kind character",
    "padding": "padding",
    "text generation": "--prompt",
    "S3": "s3://",
    "torch.distributed.launch": "--local-rank",
    "DistributedDataParallel": "DistributedDataParallel",
    "DataParallel": "torch.nn.DataParallel",
    "Horovod": "horovodrun",
    "Horovod with mixed precision": "+autocast+horovod/train_llm.py",
    "O0": '`opt_level="O0"`',
    "O1": "`O1`",
    "O2": "`O2`",
    "O3": "`O3`",
    "data workers": "--num-workers",
    "with a classification head": "F1",
    "without a head": "--head none",
    "--node_rank": "--node_rank",
    "--master_addr": "--master_addr",
    "sbatch": "sbatch",
    "srun": "srun",
    "one job": "sbatch",
    "activation checkpointing": "--activation-checkpointing",
    "FSDP": "fully_shard",
    "ZeRO-1": "zero1.py",
    "ZeRO-2": "zero2",
    "ZeRO-3": "fully_shard",
    "offload": "cpu-offload",
    "DDP is not enough": "memory.py",
    "accelerate": "accelerate",
    "DeepSpeed": "DeepSpeed",
    "Lightning": "Lightning",
    "torchtitan": "torchtitan",
    "mixed precision": "bfloat16",
    "float16": "float16",
    "bfloat16 weights": "bfloat16-weights",
    "model parallelism": "tensor",
}


def rows(text: str) -> list[tuple[str, Path, str]]:
    """Return what is known, the page to read and what to try, of each row of the table."""
    found = []
    for line in re.findall(r"^\| [^-].*\|$", text, re.M)[1:]:
        known, link, to_try = (cell.strip() for cell in line.split("|")[1:-1])
        found.append((known, PAGE.parent / re.search(r"\]\(([^)#]+)", link)[1], to_try))
    return found


def what_runs() -> str:
    """Return the commands in blocks on pages, which test_pages.py runs, and all tests."""
    in_blocks = [line for page in report.pages() for _, line in commands(page.read_text())]
    return "\n".join([*in_blocks, *(test.read_text() for test in ROOT.glob("tests/test_*.py"))])


# --- variants ---

# These tests name variants, but compare none of them with its chapter.
NOT_PARITY = ("test_pages.py", "test_where_from.py", "test_old_flags.py", "test_variants.py")
# It skips its first steps on purpose. What is wrong on purpose is in solutions folders.
DIFFERS = {"high-scale"}


def variants_in(text: str) -> set[tuple[int, str]]:
    """Return the chapter and the variants of each `make variant` in a text."""
    found = re.findall(r"make variant CHAPTER=(\d+) WITH=(?:\"([^\"]*)\"|([\w-]+))", text)
    return {(int(chapter), several or one) for chapter, several, one in found}


@cache
def names_in_parity_tests() -> set[str]:
    """Return the strings in the tests that compare variants with their chapters."""
    texts = [
        path.read_text() for path in ROOT.glob("tests/test_*.py") if path.name not in NOT_PARITY
    ]
    texts = [text for text in texts if "make_variant(" in text or "variants=" in text]
    return {*re.findall(r"\"([a-z][a-z0-9-]+)\"", "".join(texts))}


def wrong_variants(text: str, folder: Path) -> list[str]:
    """Make the variants that a text names; return what cannot be made, or has no parity test."""
    found = []
    for chapter, names in sorted(variants_in(text)):
        try:
            variants.choose(chapter, names.split())
            make_variant(folder, variants.CHAPTERS[chapter], *names.split())
        except variants.VariantError as error:
            found.append(f"CHAPTER={chapter} WITH={names}: {error}")
            continue
        compared = {variant.name for variant in variants.all_variants()} - DIFFERS
        untested = compared & {*names.split()} - names_in_parity_tests()
        found += [f"no parity test of {name}" for name in sorted(untested)]
    return found


@pytest.mark.check
def test_every_variant_on_a_page_can_be_made_and_is_compared_with_its_chapter(tmp_path):
    found, made = [], 0
    for number, page in enumerate(report.pages()):
        text = page.read_text()
        found += [
            f"{name_of(page)}: {each}" for each in wrong_variants(text, tmp_path / str(number))
        ]
        made += len(variants_in(text))
    assert found == [] and made > 20


@pytest.mark.check
@pytest.mark.parametrize(
    ("right", "wrong", "complaint"),
    [
        ("WITH=zero1", "WITH=zero9", "CHAPTER=2 WITH=zero9: There is no variant zero9"),
        ("CHAPTER=2 WITH=zero1", "CHAPTER=4 WITH=zero1", "CHAPTER=4 WITH=zero1: zero1 does not"),
        ('="autocast float16 loss-scaling"', "=float16", "CHAPTER=2 WITH=float16: In chapter 2,"),
    ],
)
def test_planted_variants_that_cannot_be_made(right, wrong, complaint, tmp_path):
    text = PAGE.read_text()
    assert right in text
    found = wrong_variants(text.replace(right, wrong), tmp_path)
    assert any(each.startswith(complaint) for each in found)


@pytest.mark.check
def test_planted_variant_without_a_parity_test(tmp_path, monkeypatch):
    tested = names_in_parity_tests() - {"zero1"}
    monkeypatch.setitem(globals(), "names_in_parity_tests", lambda: tested)
    assert "no parity test of zero1" in wrong_variants(PAGE.read_text(), tmp_path)


# --- subjects ---


def is_about(known: str, subject: str) -> bool:
    return re.search(rf"(?<!\w){re.escape(subject)}", known) is not None


def complaints(text: str) -> list[str]:
    """Return what is missing: a subject, its name on its page, or what a row lets a reader try."""
    found, table, runs = [], rows(text), what_runs()
    for subject, name in SUBJECTS.items():
        # The row with the shortest text says the least beside the subject.
        pages = [
            page
            for known, page, _ in sorted(table, key=lambda row: len(row[0]))
            if is_about(known, subject)
        ]
        if not pages:
            found.append(f"no row for {subject}")
        elif name not in pages[0].read_text():
            found.append(f"{pages[0].name} does not have {name}, for {subject}")
    for known, page, to_try in table:
        tried = re.findall(r"make \w+|\d\d-\S+\.(?:py|sh|sbatch)", to_try)
        in_page = bool(commands(page.read_text()) or blocks(page.read_text(), "python"))
        if not all(each in runs for each in tried) or not (tried or in_page):
            found.append(f"nothing that runs for {known}")
    return found


@pytest.mark.check
def test_every_subject_has_a_page_and_something_that_runs():
    assert complaints(PAGE.read_text()) == []
    assert f"({PAGE.relative_to(ROOT)})" in (ROOT / "README.md").read_text()


@pytest.mark.check
@pytest.mark.parametrize(
    ("right", "wrong", "complaint"),
    [
        ("| padding |", "| stuffing |", "no row for padding"),
        ("(remote.md)", "(generation.md)", "generation.md does not have s3://, for S3"),
        ("launch_classifier.sh`", "launch_nothing.sh`", "nothing that runs for GPT-2 with a"),
    ],
)
def test_planted_mistakes_are_found(right, wrong, complaint):
    text = PAGE.read_text()
    assert right in text
    assert any(each.startswith(complaint) for each in complaints(text.replace(right, wrong)))


# --- commands that are typed elsewhere ---


@pytest.fixture
def quick(corpus, tmp_path) -> list[str]:
    """Return the arguments of a short run."""
    words = ("-d", corpus, "-s", 32, "--max-steps", 3, "--log-freq", 1, "--save-dir", tmp_path)
    return [str(word) for word in (*words, "-e", "run")]


def test_torch_distributed_launch_starts_chapter_2(quick, tmp_path):
    (line,) = [c for _, c in commands(LAUNCH_PAGE.read_text()) if "distributed.launch" in c]
    done = run_script(*line.split()[1:], *quick)
    assert done.returncode == 0 and "x world size 2 x" in done.stderr, done.stderr
    assert "local_rank" not in done.stderr.split("arguments: ")[1].split("versions:")[0]
    assert [metrics["step"] for metrics in read_metrics(tmp_path / "run")] == [1, 2, 3]


@pytest.mark.ci
def test_two_nodes_with_a_rank_and_an_address_each(quick):
    """The two lines of the page, each with one process, on this machine."""
    lines = [c for _, c in commands(LAUNCH_PAGE.read_text()) if "--node_rank" in c]
    assert len(lines) == 2
    here = {"node1": "127.0.0.1", "29400": str(free_port()), "per_node=4": "per_node=1"}
    nodes = []
    for line in lines:
        for name, value in here.items():
            line = line.replace(name, value)
        words = [sys.executable, "-m", "torch.distributed.run", *line.split()[1:], *quick]
        options = {"cwd": ROOT, "env": environment(), "stderr": subprocess.PIPE, "text": True}
        nodes.append(subprocess.Popen(words, **options))
    said = [node.communicate(timeout=600)[1] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], said
    assert "x world size 2 x" in said[0]


# --- gpt2.args and TensorBoard ---


@pytest.mark.check
@pytest.mark.parametrize("chapter", CHAPTERS)
def test_every_chapter_reads_gpt2_args(chapter, monkeypatch):
    file = ROOT / "01-single-gpu/gpt2.args"
    monkeypatch.setattr(sys, "argv", ["train_llm.py", f"@{file}", "-b", "4"])
    args = load_script(ROOT / chapter / "train_llm.py").get_args()
    assert (args.model_name, args.seq_length, args.compile) == ("gpt2", 1024, True)
    assert args.beta1 == 0.9 and args.batch_size == 4, "an argument after the file replaces it"


@pytest.mark.ci
def test_tensorboard_reads_the_metrics(train, corpus, tmp_path, monkeypatch):
    """The block of the page converts a run; TensorBoard reads the numbers that it has logged."""
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    page = (ROOT / "01-single-gpu/reference.md").read_text()
    (block,) = [block for _, block in blocks(page, "python") if "SummaryWriter" in block]
    metrics = train("-d", corpus, "-s", 32, "--max-steps", 3, "--log-freq", 1, name="my-run")
    (tmp_path / "outputs").mkdir()
    (tmp_path / "my-run").rename(tmp_path / "outputs/my-run")
    monkeypatch.chdir(tmp_path)
    exec(block, {})
    events = reader.EventAccumulator("outputs/my-run/tensorboard").Reload()
    assert set(events.Tags()["scalars"]) == {"loss", "eval_loss", "lr", "tokens_per_s"}
    scalars = events.Scalars("loss")
    assert [scalar.step for scalar in scalars] == [line["step"] for line in metrics]
    losses = [line["loss"] for line in metrics]
    assert [scalar.value for scalar in scalars] == pytest.approx(losses)
