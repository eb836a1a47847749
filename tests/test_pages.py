"""The pages: their headings, links and flags, and that each number comes from a recorded file."""

import datetime
import json
import re
import statistics
from pathlib import Path

import pytest
from conftest import CHAPTERS, ROOT, run_script

from common import launch

PAGES = [ROOT / "README.md", *(ROOT / chapter / "README.md" for chapter in CHAPTERS)]
HEADINGS = [
    *("What you learn", "Run it", "What changes", "How it works", "What it costs"),
    *("When it breaks", "Exercises", "Next"),
]
CHAPTER_1 = ROOT / "01-single-gpu"


def results(name: str) -> dict:
    return json.loads((ROOT / f"tests/benchmarks/results/{name}.json").read_text())["results"]


def recorded_metrics() -> list[dict]:
    lines = (CHAPTER_1 / "recorded/make-train.metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def phase_rows() -> list[str]:
    what = {
        "data": "the next micro-batches are fetched and copied to the device",
        "forward": "the loss is computed",
        "backward": "gradients are computed and added up",
        "update": "clipping, AdamW, schedule",
        "total": "",
    }
    medians = {
        phase: statistics.median(
            line[f"time/{phase}"] for line in recorded_metrics() if "loss" in line
        )
        for phase in what
    }
    return [f"| {phase} | {text} | {medians[phase]:.1f} |" for phase, text in what.items()]


def memory_rows() -> list[str]:
    memory = results("step_memory")
    n, per_token = memory["parameters"], memory["activations_bytes_per_token"]
    gib = 2**30
    assert memory["weights_bytes"] == memory["gradients_bytes"] == 4 * n
    assert memory["moments_bytes"] == 8 * n
    return [
        f"| weights | 4 x {n:,} | {4 * n / gib:.2f} |",
        f"| gradients | 4 x {n:,} | {4 * n / gib:.2f} |",
        f"| two moments | 8 x {n:,} | {8 * n / gib:.2f} |",
        f"| activations, 1 x 1024 tokens | {per_token:,} x 1,024 | {per_token * 1024 / gib:.2f} |",
        f"| activations, 16 x 1024 tokens | {per_token:,} x 16,384 | "
        f"{per_token * 16384 / gib:.2f} |",
        f"| activations, 64 x 1024 tokens | {per_token:,} x 65,536 | "
        f"{per_token * 65536 / gib:.2f} |",
    ]


def overhead_rows() -> list[str]:
    rows = []
    for device, name, what in (
        ("2 CPU cores", "overhead_cpu", "gpt2-tiny, 3,072"),
        ("H200", "overhead_gpu", "GPT-2 124M, 65,536"),
    ):
        found = results(name)
        rows.append(
            f"| {device} | {what} | {found['chapter_ms_per_step']:.1f} | "
            f"{found['bare_ms_per_step']:.1f} | {found['ratio_median']:.3f} "
            f"({found['ratio_quartiles'][0]:.3f} to {found['ratio_quartiles'][2]:.3f}) | "
            f"{found['data_share']:.1%} |"
        )
    return rows


def profile_rows() -> list[str]:
    names = {
        "handwritten": "written by hand (plain PyTorch modules)",
        "handwritten, Linear1D": "the same with weights stored as `Conv1D` does",
        "transformers": "transformers, default attention",
        "transformers, no mask": "transformers, no mask (what this chapter uses)",
        "transformers, no mask, own loss": "the same, loss written by hand",
        "transformers, per block": "transformers, default, compiled block by block",
    }
    found = results("profile_gpt2")
    rows = []
    for variant, name in names.items():
        times = found[variant]["ms_per_step"]
        rows.append(
            f"| {name} | {statistics.median(times):.1f} ({min(times):.1f} to {max(times):.1f}) | "
            f"{found[variant]['tokens_per_s']:,} |"
        )
    return rows


def assert_rows_in(page: str, rows: list[str]) -> None:
    expected = "\n".join(rows)
    assert f"\n{expected}\n\n" in page, f"the page should say\n{expected}"


@pytest.mark.parametrize("rows", [phase_rows, memory_rows, overhead_rows, profile_rows])
def test_tables_hold_the_recorded_numbers(rows):
    page = (CHAPTER_1 / "README.md").read_text()
    assert_rows_in(page, rows())
    # A result file that changed and a page that did not.
    changed = [re.sub(r"\d(?=\D*$)", lambda d: str((int(d[0]) + 1) % 10), row) for row in rows()]
    with pytest.raises(AssertionError):
        assert_rows_in(page, changed)


def test_numbers_of_the_front_page():
    page = (ROOT / "README.md").read_text()
    last, profile, startup = recorded_metrics()[-1], results("profile_gpt2"), results("startup_cpu")
    for text in (
        f"| {last['bits_per_byte']:.3f} bits per byte |",
        f"| x {results('overhead_cpu')['ratio_median']:.3f} |",
        f"| x {results('overhead_gpu')['ratio_median']:.3f} |",
        f"| {profile['transformers, no mask']['tokens_per_s']:,} against "
        f"{profile['handwritten']['tokens_per_s']:,} tokens/s |",
        f"| {startup['first']['median']:.1f} s, {startup['second']['median']:.2f} s |",
    ):
        assert text in page


def test_recorded_run_reaches_what_is_promised():
    last = recorded_metrics()[-1]
    assert last["bits_per_byte"] <= 1.6
    output = (CHAPTER_1 / "recorded/make-train.txt").read_text()
    assert output.splitlines()[0] == "make train"
    assert output.splitlines()[1].startswith("# 2 cores of an ")
    stamps = [
        datetime.datetime.fromisoformat(stamp.replace(",", "."))
        for stamp in re.findall(r"^\[(.+?)\]", output, re.MULTILINE)
    ]
    seconds = (stamps[-1] - stamps[0]).total_seconds()
    assert seconds <= 90
    assert f"after {seconds:.0f} seconds" in (ROOT / "README.md").read_text()
    end = launch.describe_end(Path("FOLDER"), last, "    def", "TEXT")
    for part in re.split("FOLDER|TEXT", end.splitlines()[0]):
        assert part in output, "recorded by another version of the code"
    sample = output.split("a sample of the model")[1]
    assert "def " in sample and "self" in sample and "\n        " in sample
    for line in recorded_metrics():
        assert f"step {line['step']}/464 | loss {line['loss']:.4f} " in output


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_text_blocks_are_recorded_output(page):
    recorded = "".join(path.read_text() for path in ROOT.glob("*/recorded/*.txt"))
    for block in re.findall(r"```text\n(.*?)```", page.read_text(), re.DOTALL):
        if not block.startswith("outputs/<"):  # a drawing of the run's folder
            assert block in recorded or f" {block}" in recorded


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_headings(chapter):
    page = (ROOT / chapter / "README.md").read_text()
    assert re.findall(r"^## (.+)$", page, re.MULTILINE) == HEADINGS


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    text = page.read_text()
    anchors = {}
    for target in re.findall(r"\]\(([^)]+)\)", text):
        if target.startswith("https://"):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.+)$", file.read_text(), re.MULTILINE)
            anchors = {re.sub(r"[^\w -]", "", h).lower().replace(" ", "-") for h in headings}
            assert anchor in anchors, target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_use_flags_and_files_that_exist(page):
    known = set(
        re.findall(r"-{1,2}[a-z][a-z-]*", run_script("01-single-gpu/train_llm.py", "-h").stdout)
    )
    commands = [
        line
        for block in re.findall(r"```bash\n(.*?)```", page.read_text(), re.DOTALL)
        for line in block.replace("\\\n", " ").splitlines()
    ]
    assert commands
    for command in commands:
        words = command.split("#")[0].split()
        for word in words:
            if re.fullmatch(r"[\w.-]+/[\w./-]+\.(py|sh)", word):
                assert (ROOT / word).exists(), command
        if "train_llm.py" in command:
            flags = [word for word in words if re.match(r"--?[a-z]", word)]
            assert set(flags) <= known, command


def test_a_wrong_flag_a_dead_link_and_a_missing_heading_are_noticed(tmp_path, monkeypatch):
    import test_pages

    chapter = tmp_path / "01-single-gpu"
    chapter.mkdir()
    page = chapter / "README.md"
    page.write_text(
        "## What you learn\n[gone](gone.md)\n"
        "```bash\npython 01-single-gpu/train_llm.py --speed 3\n```\n"
        "```text\nan output that nobody recorded\n```\n"
    )
    for test in (
        test_links_lead_somewhere,
        test_commands_use_flags_and_files_that_exist,
        test_text_blocks_are_recorded_output,
    ):
        with pytest.raises(AssertionError):
            test(page)
    monkeypatch.setattr(test_pages, "ROOT", tmp_path)
    with pytest.raises(AssertionError):
        test_pages.test_headings("01-single-gpu")


def test_quoted_messages_are_real():
    """Of each message that the page quotes, three words in a row stand in the code."""
    page = (CHAPTER_1 / "README.md").read_text()
    sources = "".join(path.read_text() for path in (ROOT / "common").glob("*.py"))
    quoted = re.findall(r"^\| `([^`]+)`", page.split("## When it breaks")[1], re.MULTILINE)
    assert len(quoted) >= 8
    literal = re.sub(r'"\s*f?"', "", sources)
    for message in quoted:
        words = re.findall(r"[\w'-]+", message)
        assert any(" ".join(words[i : i + 3]) in literal for i in range(len(words) - 2)), message
