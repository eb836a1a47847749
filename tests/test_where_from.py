"""Whoever comes from another script or framework finds the subject here, and its commands run.

The subjects are those of where_from.md. Each has a row, a page that names it, and a command or a
diff that other tests run. Below: commands that are typed elsewhere, gpt2.args, and TensorBoard.
"""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import (
    CHAPTERS,
    ROOT,
    blocks,
    commands,
    environment,
    free_port,
    read_metrics,
    run_script,
)
from runner import load_script

PAGE = ROOT / "01-single-gpu/topics/where_from.md"
TORCHRUN_PAGE = ROOT / "03-multi-node/topics/torchrun.md"
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
    "Apex": "opt_level",
    "with a classification head": "F1",
    "without a head": "--head none",
    "--node_rank": "--node_rank",
    "--master_addr": "--master_addr",
    "sbatch": "sbatch",
    "srun": "srun",
    "one job": "sbatch",
    "activation checkpointing": "--activation-checkpointing",
    "FSDP": "fully_shard",
    "DDP is not enough": "memory.py",
    "accelerate": "accelerate",
    "DeepSpeed": "DeepSpeed",
    "Lightning": "Lightning",
    "torchtitan": "torchtitan",
    "mixed precision": "bfloat16",
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
    """Return the commands in blocks on pages, which test_pages.py runs, and all tests of diffs."""
    pages = [*ROOT.glob("*.md"), *ROOT.glob("[0-9]*/*.md"), *ROOT.glob("[0-9]*/topics/*.md")]
    in_blocks = [line for page in pages for _, line in commands(page.read_text())]
    return "\n".join([*in_blocks, *(test.read_text() for test in ROOT.glob("tests/test_*.py"))])


def is_about(known: str, subject: str) -> bool:
    return re.search(rf"(?<!\w){re.escape(subject)}", known) is not None


def complaints(text: str) -> list[str]:
    """Return what is missing: a subject, its name on its page, or what a row lets a reader try."""
    found, table, runs = [], rows(text), what_runs()
    for subject, name in SUBJECTS.items():
        pages = [page for known, page, _ in table if is_about(known, subject)]
        if not pages:
            found.append(f"no row for {subject}")
        elif name not in pages[0].read_text():
            found.append(f"{pages[0].name} does not have {name}, for {subject}")
    for known, page, to_try in table:
        tried = re.findall(r"make \w+|\d\d-\S+\.(?:py|sh|sbatch)", to_try)
        # autocast-01.diff to autocast-03.diff have one test.
        tried += [f"diffs/{stem}" for stem in re.findall(r"/([a-z-]+?)(?:-\d+)?\.diff", to_try)]
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
    (line,) = [c for _, c in commands(TORCHRUN_PAGE.read_text()) if "distributed.launch" in c]
    done = run_script(*line.split()[1:], *quick)
    assert done.returncode == 0 and "x world size 2 x" in done.stderr, done.stderr
    assert "local_rank" not in done.stderr.split("arguments: ")[1].split("versions:")[0]
    assert [metrics["step"] for metrics in read_metrics(tmp_path / "run")] == [1, 2, 3]


@pytest.mark.ci
def test_two_nodes_with_a_rank_and_an_address_each(quick):
    """The two lines of the page, each with one process, on this machine."""
    lines = [c for _, c in commands(TORCHRUN_PAGE.read_text()) if "--node_rank" in c]
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
