"""Commands and runs of the scripts that had flags where there are variants now."""

import argparse
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from helpers import CHAPTERS, ROOT, make_variant, speak_at_once
from runner import load_script

from common import checkpoint, cli, ranks, variants
from common.old_flags import ANY_VALUE, NO_VALUE, OLD_FLAGS, OldFlag

pytestmark = pytest.mark.check

BY_NUMBER = dict(enumerate(CHAPTERS, start=1))
IGNORED_NOW = "is no longer a flag and is ignored"
COMMAND = re.compile(r'make variant CHAPTER=(\d) WITH="([\w -]+)"')


def words_of(row: OldFlag) -> list[str]:
    """Return a flag and its value, as separate words."""
    value = "2" if row.value == ANY_VALUE else row.value
    return [row.flag, value] if value else [row.flag]


def cases(ignored: bool) -> list:
    """Return (row, number of a chapter) to parametrize a test with."""
    return [
        pytest.param(row, int(number), id=f"{' '.join(words_of(row))} in {number}")
        for row in OLD_FLAGS
        if row.ignored == ignored
        for number in row.chapters.split()
    ]


@pytest.fixture
def parse(monkeypatch, capsys) -> Callable[..., tuple[argparse.Namespace | int, str]]:
    """Return a function that parses arguments as a chapter's script does.

    It returns the arguments or, if they are refused, the exit status; and what was printed.
    """

    def run(chapter: str | Path, *words: object) -> tuple[argparse.Namespace | int, str]:
        script = ROOT / chapter / "train_llm.py"
        monkeypatch.setattr(sys, "argv", [str(script), *map(str, words)])
        get_args = load_script(script).get_args
        capsys.readouterr()
        try:
            found = get_args()
        except SystemExit as end:
            found = end.code
        return found, capsys.readouterr().err

    return run


def forms(words: list[str], folder: Path) -> Iterator[list[str]]:
    """Yield the ways to give a flag: two words, one word, and a file."""
    yield words
    yield ["=".join(words)]
    (folder / "my.args").write_text(f"{' '.join(words)}  # a comment\n")
    yield [f"@{folder}/my.args"]


def command_in(said: str) -> tuple[int, list[str]]:
    """Return the chapter and the variants of the command that a refusal shows; it is valid."""
    number, names = COMMAND.search(said).groups()
    number, names = int(number), names.split()
    assert {each.name for each in variants.choose(number, names)} == set(names)
    assert f"the folder variants/{'+'.join([BY_NUMBER[number], *sorted(names)])} and" in said
    return number, names


# --- each flag and value, in each chapter that had it ---


@pytest.mark.parametrize(("row", "number"), cases(ignored=True))
def test_ignored_with_a_warning(row, number, parse, tmp_path):
    chapter, words = BY_NUMBER[number], words_of(row)
    for form in forms(words, tmp_path):
        args, said = parse(chapter, *form, "--lr", 0.5)
        assert args.lr == 0.5 and args.seed == 0
        assert row.flag.lstrip("-").replace("-", "_") not in vars(args) or row.value == "none"
        (line,) = said.splitlines()
        assert re.match(f"train_llm.py: warning: {row.flag}.*{IGNORED_NOW}", line)
        assert line.endswith(f"; the variant {row.variants} still has it") == bool(row.variants)
    assert vars(args) == vars(parse(chapter, "--lr", 0.5)[0])


@pytest.mark.parametrize(("row", "number"), cases(ignored=False))
def test_refused_with_a_command_that_does_the_same(row, number, parse, tmp_path):
    """The same arguments are valid in the variant."""
    words = words_of(row)
    for form in forms(words, tmp_path):
        status, said = parse(BY_NUMBER[number], "--lr", 0.5, *form)
        assert status == 2 and said.count("\n") == 1
        assert said.startswith(f"train_llm.py: error: {row.flag}")
    made_from, names = command_in(said)
    assert set(names) == set(row.variants.split())
    folder = make_variant(tmp_path, BY_NUMBER[made_from], *names)
    args, said = parse(folder, *words, "--lr", 0.5)
    kept = str(vars(args).get(row.flag.lstrip("-").replace("-", "_")))
    assert (
        said == ""
        if kept in ("True", words[-1])
        else "is ignored: this variant does that anyway" in said
    )
    assert args.lr == 0.5


@pytest.mark.parametrize("number", BY_NUMBER)
def test_flags_that_a_chapter_never_had_are_unrecognized(number, parse):
    chapter = BY_NUMBER[number]
    flags = {row.flag for row in OLD_FLAGS if str(number) in row.chapters.split()}
    never = {row.flag for row in OLD_FLAGS} - flags - {"--precision"}
    assert number > 3 or never
    for flag in sorted(never):
        status, said = parse(chapter, flag)
        assert status == 2 and f"error: unrecognized arguments: {flag}; --help" in said


# --- what surrounds a flag ---


def test_several_flags_are_one_command(parse):
    status, said = parse("04-fsdp", "--cpu-offload", "-b", 2, "--num-workers", 1, "--hsdp")
    assert status == 2 and said == (
        "train_llm.py: error: --cpu-offload and --hsdp are variants of the script now. Run make "
        'variant CHAPTER=4 WITH="cpu-offload hsdp". It makes the folder '
        "variants/04-fsdp+cpu-offload+hsdp and prints the commands that train with it. Give them "
        "the same arguments.\n"
    )
    # Pure bfloat16 adds up gradients in bfloat16, too.
    both = ("--param-dtype", "bfloat16", "--reduce-dtype", "bfloat16")
    assert command_in(parse("05-mixed-precision", *both)[1]) == (5, ["pure-bfloat16"])
    # Chapter 4 has no variant that does this, and all its variants are also chapter 5's.
    both = ("--param-dtype=bfloat16", "--hsdp")
    assert command_in(parse("04-fsdp", *both)[1]) == (5, ["hsdp", "pure-bfloat16"])


def test_flags_that_do_not_go_together(parse):
    status, said = parse("05-mixed-precision", "--hsdp", "--tensor-parallel", 2)
    assert status == 2 and "are variants of the script now. " in said
    assert said.endswith(" do not go together: leave one of them out.\n")


def test_a_flag_in_another_variant(parse, tmp_path):
    """The command keeps the variant that is there."""
    folder = make_variant(tmp_path, "04-fsdp", "hsdp")
    assert command_in(parse(folder, "--hsdp", "--zero1", "--cpu-offload")[1]) == (
        4,
        ["cpu-offload", "hsdp"],
    )


@pytest.mark.parametrize(
    ("chapter", "variant", "words"),
    [
        ("01-single-gpu", "bfloat16-weights", ("--param-dtype", "float32")),
        ("05-mixed-precision", "pure-bfloat16", ("--param-dtype=float32",)),
        ("05-mixed-precision", "pure-bfloat16", ("--reduce-dtype", "float32")),
        ("05-mixed-precision", "reduce-bfloat16", ("--reduce-dtype", "float32")),
        ("02-ddp", "autocast", ("--precision", "tf32")),
    ],
)
def test_what_a_variant_does_not_compute_is_not_ignored(chapter, variant, words, parse, tmp_path):
    status, said = parse(make_variant(tmp_path, chapter, variant), *words)
    assert status == 2 and f"unrecognized arguments: {' '.join(words)}; " in said


def test_activation_checkpointing_is_a_switch(parse):
    for words in (("full",), ()):
        args, said = parse("04-fsdp", "--activation-checkpointing", *words, "--lr", 0.5)
        assert args.activation_checkpointing and args.lr == 0.5 and not said
    args, said = parse("05-mixed-precision", "--activation-checkpointing=full")
    assert args.activation_checkpointing and not said
    assert parse("04-fsdp", "--activation-checkpointing", "some")[0] == 2


def test_precisions_that_chapter_5_has_are_left_alone(parse, tmp_path):
    for name in ("fp32", "tf32", "bf16"):
        args, said = parse("05-mixed-precision", "--precision", name)
        assert args.precision == name and not said
    float16 = make_variant(tmp_path, "05-mixed-precision", "float16", "loss-scaling")
    assert "invalid choice: 'bf16'" in parse(float16, "--precision", "bf16")[1]
    said = parse("03-multi-node", "--precision", "fp32")[1]
    assert "unrecognized arguments: --precision fp32" in said


@pytest.mark.parametrize(
    ("words", "left_over"),
    [
        (("--num-workers",), "--num-workers"),
        (("--num-workers", "--lr", 1), "--num-workers"),
        (("--num-workers", -1), "--num-workers -1"),
        (("--param-dtype", "float64"), "--param-dtype float64"),
        (("--zero1=yes",), "--zero1=yes"),
        (("--zero1", "yes"), "yes"),
        (("--zero",), "--zero"),
    ],
)
def test_values_that_a_flag_never_had(parse, words, left_over):
    status, said = parse("04-fsdp", *words)
    assert status == 2
    assert said.splitlines()[-1].startswith(
        f"train_llm.py: error: unrecognized arguments: {left_over}; "
    )


def test_a_value_is_not_taken_for_a_flag(parse):
    args, said = parse("04-fsdp", "--experiment-name=--hsdp", "-d", "hsdp", "--save-dir", "zero1")
    assert (args.experiment_name, args.dataset_name, args.save_dir) == ("--hsdp", "hsdp", "zero1")
    assert not said
    status, said = parse("04-fsdp", "-e", "--hsdp")  # argparse does not take it for a name either
    assert status == 2 and said.startswith("train_llm.py: error: --hsdp is a variant")


def test_files_are_read_as_argparse_reads_them(parse, tmp_path, monkeypatch):
    """With an old flag, they are read before argparse sees them."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("MY_DATA", "a b")
    (tmp_path / "inner.args").write_text("-m 'my model' --lr 0.25\n\n# --hsdp\n")
    (tmp_path / "outer.args").write_text(
        f'-d "$MY_DATA" # --cpu-offload\n--save-dir ~/runs\n@{tmp_path}/inner.args\n-e "a # b"\n'
    )
    words = (f"@{tmp_path}/outer.args", "--seed", 3)
    expected, said = parse("04-fsdp", *words)
    assert not said
    assert (expected.dataset_name, expected.model_name, expected.lr) == ("a b", "my model", 0.25)
    assert (expected.save_dir, expected.experiment_name) == (f"{tmp_path}/runs", "a # b")
    args, said = parse("04-fsdp", *words, "--zero1")
    assert vars(args) == vars(expected) and said.count("\n") == 1
    with (tmp_path / "inner.args").open("a") as file:
        file.write("--hsdp  # deep in a file\n")
    assert command_in(parse("04-fsdp", *words)[1]) == (4, ["hsdp"])
    for words in ((f"@{tmp_path}/none",), (f"@{tmp_path}/none", "--zero1"), ("@", "--zero1")):
        status, said = parse("04-fsdp", *words)
        assert status == 2 and said.count("\n") == 1
    (tmp_path / "inner.args").write_text("--lr '0.25\n")
    status, said = parse("04-fsdp", "--zero1", f"@{tmp_path}/inner.args")
    assert (
        status == 2
        and f'cannot read the line "--lr \'0.25" of {tmp_path}/inner.args: No closing' in said
    )


def test_only_rank_0_prints(parse, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    speak_at_once_here(monkeypatch)
    for rank in range(2):
        monkeypatch.setenv("RANK", str(rank))
        args, said = parse("04-fsdp", "--zero1")
        assert args.lr is None and said.count("\n") == 1 - rank
        status, said = parse("04-fsdp", "--hsdp", "--zero1")
        assert status == 2 and said.count("\n") == 1 - rank


def speak_at_once_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "HEAD_START_S", ranks.HEAD_START_S)  # set back after the test
    speak_at_once()


def test_other_scripts_keep_their_flags(monkeypatch):
    monkeypatch.setattr(sys, "argv", [str(ROOT / "04-fsdp/measure.py"), "--hsdp", "--zero1"])
    parser = cli.ArgumentParser("Another script.")
    parser.add_argument("--hsdp", action="store_true")
    args, left_over = parser.parse_known_args()
    assert args.hsdp and left_over == ["--zero1"]


def test_a_copy_of_a_script_elsewhere_has_no_old_flags(parse, tmp_path):
    """Nobody knows its chapter."""
    (tmp_path / "train_llm.py").write_text((ROOT / "04-fsdp/train_llm.py").read_text())
    assert "unrecognized arguments: --hsdp" in parse(tmp_path, "--hsdp")[1]


# --- runs ---

PLAIN = {"param_dtype": "float32", "lr": 0.1, "of_variant": []}
# What the scripts of chapter 5 saved.
OLD = {"param_dtype": "float32", "lr": 0.1, "precision": "bf16", "reduce_dtype": None}
PURE = {**PLAIN, "param_dtype": "bfloat16"}


def with_entry(settings: dict, name: str, value: str) -> dict:
    """Return settings with an entry of a variant."""
    return {**settings, name: value, "of_variant": [*settings["of_variant"], name]}


SUMS = with_entry(PLAIN, "reduce_dtype", "bfloat16")
FP8 = with_entry({**PLAIN, "precision": "bf16"}, "linear_layers", "fp8")
AUTOCAST = with_entry(PLAIN, "precision", "bf16")
FLOAT16 = with_entry(PLAIN, "precision", "fp16")


@pytest.mark.parametrize(
    ("saved", "given", "expected"),
    [
        # runs that had flags
        (OLD, {**PLAIN, "precision": "bf16"}, None),
        ({**OLD, "reduce_dtype": "float32"}, PLAIN, None),
        ({**OLD, "reduce_dtype": "bfloat16"}, SUMS, None),
        (
            {**OLD, "reduce_dtype": "bfloat16"},
            *(PLAIN, "reduce_dtype bfloat16, not the chapter's (see the variant reduce-bfloat16)"),
        ),
        (OLD, SUMS, "reduce_dtype the chapter's, not bfloat16 (see the variant reduce-bfloat16)"),
        ({**OLD, "param_dtype": "bfloat16", "precision": "tf32"}, PURE, None),
        ({**OLD, "param_dtype": "bfloat16", "reduce_dtype": "bfloat16"}, PURE, None),
        (
            *({**OLD, "param_dtype": "bfloat16"}, PLAIN),
            "param_dtype bfloat16, not float32 (see the variants bfloat16-weights and pure-",
        ),
        # No variant has weights in bfloat16 and sums in float32.
        ({**OLD, "param_dtype": "bfloat16", "reduce_dtype": "float32"}, PURE, "reduce_dtype float"),
        ({**OLD, "precision": "fp8"}, FP8, None),
        (
            {**OLD, "precision": "fp8"},
            *(PLAIN, "linear_layers fp8, not the chapter's (see the variant fp8)"),
        ),
        ({"precision": "bf16", "lr": 0.1}, AUTOCAST, None),
        (
            {"precision": "bf16", "lr": 0.1},
            *(PLAIN, "precision bf16, not the chapter's (see the variant autocast)"),
        ),
        ({"precision": "fp16", "lr": 0.1}, FLOAT16, None),
        ({"lr": 0.1}, PLAIN, None),
        ({"lr": 0.2}, PLAIN, "--lr 0.2, not 0.1"),
        # runs of variants
        (SUMS, SUMS, None),
        (SUMS, PLAIN, "reduce_dtype bfloat16, not the chapter's (see the variant reduce-bfloat16)"),
        (PLAIN, FP8, "linear_layers the chapter's, not fp8 (see the variant fp8)"),
        (
            *(AUTOCAST, FLOAT16),
            "precision bf16, not fp16 (see the variant autocast or float16)",
        ),
        (AUTOCAST, {**PLAIN, "precision": "bf16"}, None),
        (with_entry(PLAIN, "an_entry", "x"), PLAIN, "an_entry x, not the chapter's (see make"),
        # a model alone, as generate.py compares it
        (SUMS, {"model n_layer": 2}, None),
    ],
)
def test_a_run_is_resumed_or_its_variant_is_named(saved, given, expected):
    found = checkpoint.difference(saved, given)
    assert found is None if expected is None else found.startswith(expected)


# --- the table in CHANGELOG.md ---


def test_the_changelog_has_the_same_table():
    text = (ROOT / "CHANGELOG.md").read_text()
    rows = re.findall(r"^\| `(--[\w-]+)(?: (\w+))?` \| ([\d ]+) \| (.+) \|$", text, re.MULTILINE)
    found = set()
    for flag, value, chapters, now in rows:
        found.add((flag, value, chapters, "ignored" in now, *re.findall(r"`([\w-]+)`", now)))
    assert len(found) == len(rows)
    expected = {
        (row.flag, row.value, row.chapters, row.ignored, *row.variants.split()) for row in OLD_FLAGS
    }
    switch = ("--activation-checkpointing", "full", "4 5", False)
    assert found == {*expected, switch}


def test_a_value_says_whether_a_flag_has_one():
    for flag in {row.flag for row in OLD_FLAGS}:
        values = {row.value for row in OLD_FLAGS if row.flag == flag}
        assert values == {NO_VALUE} or NO_VALUE not in values
