"""Whoever comes from another script or framework finds the subject here, and its commands run.

The subjects are those of where_from.md. Each has a row, a page that names it, and a command or a
diff that other tests run. Below: commands that are typed elsewhere, gpt2.args, and TensorBoard.
"""

import json
import re
import subprocess
import sys
from collections.abc import Callable
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
    write_corpus,
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


def complaints(text: str, read: Callable[[Path], str] = Path.read_text) -> list[str]:
    """Return what is missing: a subject, its name on its page, or what a row lets a reader try."""
    found, table, runs = [], rows(text), what_runs()
    for subject, name in SUBJECTS.items():
        pages = [page for known, page, _ in table if is_about(known, subject)]
        if not pages:
            found.append(f"no row for {subject}")
        elif name not in read(pages[0]):
            found.append(f"{pages[0].name} does not have {name}, for {subject}")
    for known, page, to_try in table:
        tried = re.findall(r"make \w+|\d\d-\S+\.(?:py|sh|sbatch)", to_try)
        # autocast-01.diff to autocast-03.diff have one test.
        tried += [f"diffs/{stem}" for stem in re.findall(r"/([a-z-]+?)(?:-\d+)?\.diff", to_try)]
        in_page = bool(commands(read(page)) or blocks(read(page), "python"))
        if not all(each in runs for each in tried) or not (tried or in_page):
            found.append(f"nothing that runs for {known}")
    return found


@pytest.mark.check
def test_every_subject_has_a_page_and_something_that_runs():
    assert complaints(PAGE.read_text()) == []
    assert f"({PAGE.relative_to(ROOT)})" in (ROOT / "README.md").read_text()


@pytest.mark.check
def test_planted_deletions_are_found():
    text = PAGE.read_text()
    for subject, name in SUBJECTS.items():
        lines = [line for line in text.splitlines() if is_about(line.partition(" | ")[0], subject)]
        assert f"no row for {subject}" in complaints(text.replace(f"{lines[0]}\n", ""))
        without = complaints(text, lambda page, name=name: page.read_text().replace(name, ""))
        assert any(each.endswith(f"for {subject}") for each in without), subject
    gone = text.replace("launch_classifier.sh", "launch_nothing.sh")
    assert any(each.startswith("nothing that runs for") for each in complaints(gone))


# --- commands that are typed elsewhere ---


def quick(folder: Path, name: str) -> list[str]:
    """Return the arguments of a short run."""
    corpus = (
        write_corpus(folder) if not (folder / "corpus.json").exists() else folder / "corpus.json"
    )
    words = ("-d", corpus, "-s", 32, "--max-steps", 3, "--log-freq", 1, "--save-dir", folder)
    return [str(word) for word in (*words, "-e", name)]


def test_torch_distributed_launch_starts_chapter_2(tmp_path):
    (line,) = [c for _, c in commands(TORCHRUN_PAGE.read_text()) if "distributed.launch" in c]
    done = run_script(*line.split()[1:], *quick(tmp_path, "run"))
    assert done.returncode == 0 and "x world size 2 x" in done.stderr, done.stderr
    assert "local_rank" not in done.stderr.split("arguments: ")[1].split("versions:")[0]
    assert [metrics["step"] for metrics in read_metrics(tmp_path / "run")] == [1, 2, 3]


@pytest.mark.nightly
def test_torch_distributed_launch_starts_the_classifier(tmp_path):
    command = "-m torch.distributed.launch --nproc_per_node=2 02-ddp/train_classifier.py"
    table = tmp_path / "reviews.csv"
    table.write_text("text,label\n" + "".join(f"{n} is {n % 2},{n % 2}\n" for n in range(99)))
    words = ("-d", table, "-s", 16, "--num-epochs", 1, "--save-dir", tmp_path, "-e", "run")
    done = run_script(*command.split(), *words)
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "run/test_report.json").read_text())


@pytest.mark.ci
def test_two_nodes_with_a_rank_and_an_address_each(tmp_path):
    """The two lines of the page, each with one process, on this machine."""
    lines = [c for _, c in commands(TORCHRUN_PAGE.read_text()) if "--node_rank" in c]
    assert len(lines) == 2
    nodes = []
    port = free_port()
    for line in lines:
        line = line.replace("node1", "127.0.0.1").replace("29400", str(port))
        line = line.replace("--nproc_per_node=4", "--nproc_per_node=1").replace("-e my-run", "")
        words = [sys.executable, "-m", "torch.distributed.run", *line.split()[1:]]
        nodes.append(
            subprocess.Popen(
                [*words, *quick(tmp_path, "run")],
                cwd=ROOT,
                env=environment(),
                stderr=subprocess.PIPE,
                text=True,
            )
        )
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
def test_tensorboard_reads_the_metrics(train, tmp_path, monkeypatch):
    """The block of the page converts a run; TensorBoard reads the numbers that it has logged."""
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    page = (ROOT / "01-single-gpu/reference.md").read_text()
    (block,) = [block for _, block in blocks(page, "python") if "SummaryWriter" in block]
    assert len([line for line in block.splitlines() if line]) == 6
    (tmp_path / "outputs").mkdir()
    train("-d", write_corpus(tmp_path), "-s", 32, "--max-steps", 3, "--log-freq", 1, name="my-run")
    (tmp_path / "my-run").rename(tmp_path / "outputs/my-run")
    monkeypatch.chdir(tmp_path)
    exec(block, {})
    events = reader.EventAccumulator("outputs/my-run/tensorboard").Reload()
    assert set(events.Tags()["scalars"]) == {"loss", "eval_loss", "lr", "tokens_per_s"}
    for metrics, scalar in zip(
        read_metrics(tmp_path / "outputs/my-run"), events.Scalars("loss"), strict=True
    ):
        assert scalar.step == metrics["step"]
        assert scalar.value == pytest.approx(metrics["loss"])
