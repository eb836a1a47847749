"""The gallery: variants fit their chapters and each other, and make variant makes them.

What a variant computes is tested beside the chapter that it changes. Here, stacks of variants
train, and each variant resumes runs of its chapter, or refuses them by name.
"""

import dataclasses
import functools
import os
import re
import shutil
import subprocess
import tempfile
from collections import defaultdict
from collections.abc import Iterable
from itertools import combinations, permutations
from pathlib import Path

import pytest
import renew_diffs
from helpers import (
    CHAPTERS,
    ROOT,
    TWO_BY_TWO,
    Ladder,
    Run,
    assert_chapter_1,
    assert_clean,
    assert_same_losses,
    copy_repository,
    environment,
    float32,
    hand_over,
    listing,
    make_variant,
    read_metrics,
    register,
    write_corpus,
)
from runner import Series

from common import variants

GALLERY = variants.all_variants()
APPLIED = [(number, variant) for variant in GALLERY for number in sorted(variant.needs)]
NUMBERS = sorted(variants.CHAPTERS)
check = pytest.mark.check

# Pairs that fit each other, and are excluded because together they make no sense.
SENSELESS = {
    ("bfloat16-weights", "autocast"): "weights in bfloat16 leave autocast nothing to cast",
    ("data-parallel", "autocast"): "the copies of the model have its own forward, without autocast",
    ("chunked-loss", "data-parallel"): "the copies of the model would use the first one's weight",
    ("chunked-loss", "tensor-parallel"): "each rank has some columns of the logits",
    ("horovod", "zero1"): "zero1 shards over the ranks of torch's process group",
    ("fp8", "float16"): "fp8 multiplies and gives results in bfloat16",
    ("fp8", "pure-bfloat16"): "fp8's layers compute from weights in float32",
    ("fp8", "tensor-parallel"): "the plan splits torch's own Linear layers",
    ("muon", "horovod"): "Horovod makes the optimizer anew, from groups of parameters",
    ("local-sgd", "zero1"): "zero1 sends weights in each step",
    ("lora", "local-sgd"): "adapters are small, so DDP sends little",
    ("lora", "selective-recomputation"): "it would save the results of the adapters' matmuls, too",
    ("lora", "tensor-parallel"): "the plan splits torch's own Linear layers",
    ("lora", "zero1"): "adapters have few moments, and zero1 would send all weights",
    ("pure-bfloat16", "loss-scaling"): "bfloat16 has the range of float32",
    ("stochastic-rounding", "hsdp"): "replicas would be rounded differently",
    ("stochastic-rounding", "tensor-parallel"): "copies of norms would be rounded differently",
}
# By variant: the modules that it needs, which are beside the diffs or in experiments/.
MODULES = {
    "async-checkpoint": {"async_checkpoint"},
    "chunked-loss": {"chunked_loss"},
    "context-parallel": {"context_attention", "context_parallel"},
    "document-mask": {"document_mask"},
    "fp8": {"fp8"},
    "instruct": {"conversations"},
    "muon": {"muon"},
    "lora": {"lora"},
    "stochastic-rounding": {"stochastic_rounding"},
    "track-nodes": {"track_nodes"},
    "workers": {"data_workers"},
    "wsd": {"wsd"},
    "zero1": {"zero1"},
}


def name_of(value: object) -> str:
    return value.name if isinstance(value, variants.Variant) else str(value)


def find(chapter: int, name: str) -> variants.Variant:
    (found,) = [each for number, each in APPLIED if (number, each.name) == (chapter, name)]
    return found


def with_needs(chapter: int, names: Iterable[str]) -> list[variants.Variant]:
    """Return these variants in this order, each after those that it needs."""
    found = []
    for name in names:
        variant = find(chapter, name)
        for each in (*with_needs(chapter, variant.needs[chapter]), variant):
            found += [each] * (each not in found)
    return found


def script(chapter: int) -> str:
    return (ROOT / variants.CHAPTERS[chapter] / "train_llm.py").read_text()


# --- what applies, and what goes together ---


def apply_all(pairs: set[tuple[str, Path]]) -> dict[tuple[str, Path], str | None]:
    """Return by (script, .diff file) the script with the diff, or None if it does not fit.

    One `git apply` does them all: each script is in a folder of its own.
    """
    pairs, patch = list(pairs), ""
    with tempfile.TemporaryDirectory() as name:
        files = [Path(name, str(number), "train_llm.py") for number in range(len(pairs))]
        for file, (text, path) in zip(files, pairs, strict=True):
            file.parent.mkdir()
            file.write_text(text)
            _, diff = variants.split_preamble(path.read_text())
            patch += re.sub(
                r"^(---|\+\+\+) (\w)/.+/", rf"\1 \2/{file.parent.name}/", diff, flags=re.M
            )
        env = {**os.environ, "GIT_CEILING_DIRECTORIES": str(Path(name).parent)}
        command = ["git", "apply", "--reject", "-"]
        subprocess.run(
            command, cwd=name, env=env, input=patch, text=True, stderr=subprocess.DEVNULL
        )
        return {
            pair: None if file.with_suffix(".py.rej").exists() else file.read_text()
            for pair, file in zip(pairs, files, strict=True)
        }


@functools.cache
def scripts_of_pairs() -> dict[tuple[int, str, str], str | None]:
    """Return by (chapter, name, another name) the script with both variants, in that order.

    A variant alone has the same name twice. None: one of the two does not fit.
    """
    orders = {}
    for number in NUMBERS:
        names = [variant.name for chapter, variant in APPLIED if chapter == number]
        for pair in [*permutations(names, 2), *zip(names, names, strict=True)]:
            orders[number, *pair] = [each.path for each in with_needs(number, pair)]
    texts = {key: script(key[0]) for key in orders}
    for step in range(max(map(len, orders.values()))):
        next_ones = {
            key: (texts[key], paths[step])
            for key, paths in orders.items()
            if step < len(paths) and texts[key] is not None
        }
        results = apply_all(set(next_ones.values()))
        texts |= {key: results[pair] for key, pair in next_ones.items()}
    return texts


def excluded(chapter: int, names: Iterable[str]) -> set[tuple[str, str]]:
    """Return the pairs (variant, variant of its "Not with") among these and what they need."""
    chosen = with_needs(chapter, names)
    there = {variant.name for variant in chosen}
    return {(each.name, other) for each in chosen for other in each.excludes if other in there}


@check
@pytest.mark.parametrize("chapter", NUMBERS)
def test_each_variant_applies_and_each_pair_in_both_orders(chapter):
    """The same text in both orders. The other pairs are those that the preambles exclude."""
    texts = scripts_of_pairs()
    names = [variant.name for number, variant in APPLIED if number == chapter]
    assert len(set(names)) == len(names), "one name, two variants"
    for name in names:
        assert texts[chapter, name, name] not in (None, script(chapter)), name
    for one, other in combinations(names, 2):
        both = {texts[chapter, one, other], texts[chapter, other, one]}
        if reasons := excluded(chapter, (one, other)):
            fits = len(both) == 1 and None not in both
            assert not fits or reasons & SENSELESS.keys(), f"{one} and {other} go together"
        else:
            assert len(both) == 1 and None not in both, f"{one} and {other} do not go together"


@check
def test_planted_preambles_that_exclude_too_little_or_too_much(monkeypatch):
    with monkeypatch.context() as patch:
        patch.setitem(globals(), "excluded", lambda *_: set())
        with pytest.raises(AssertionError, match=r"^context-parallel and [a-z-]+ do not"):
            test_each_variant_applies_and_each_pair_in_both_orders(5)
    monkeypatch.setitem(globals(), "SENSELESS", {})
    with pytest.raises(AssertionError, match=r"^chunked-loss and tensor-parallel go"):
        test_each_variant_applies_and_each_pair_in_both_orders(5)


@check
def test_what_makes_no_sense_is_excluded_and_would_fit():
    texts = scripts_of_pairs()
    for one, other in SENSELESS:
        numbers = [n for n in NUMBERS if {(n, one, other)} <= texts.keys()]
        assert numbers and all((one, other) in excluded(n, (one, other)) for n in numbers)
        assert any(texts[n, one, other] for n in numbers), f"{one} does not fit {other} anyway"


@check
def test_preambles_name_what_exists():
    names = {variant.name for variant in GALLERY}
    for chapter, variant in APPLIED:
        assert variant.title.endswith(".") and "\n" not in variant.title, variant.name
        needed = {each.name for each in with_needs(chapter, [variant.name])}
        assert needed <= names and {*variant.excludes} <= names - needed, variant.name
        folder, _ = renew_diffs.script_of(variant.path.read_text()).split("/")
        assert int(folder[:2]) in variant.needs and (ROOT / folder / "train_llm.py").exists()


@check
def test_scripts_and_modules_are_clean(tmp_path):
    """Of each variant and of each pair; ruff finds a flag's second keyword, not a second flag."""
    for number, text in enumerate({text for text in scripts_of_pairs().values() if text}):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "train_llm.py").write_text(text)
        flags = re.findall(r'^ +(?:add\().*?"(--[\w-]+)"', text, re.MULTILINE)
        assert len(flags) > 20 and sorted({*flags}) == sorted(flags), "a flag twice"
    assert_clean(tmp_path)


@check
def test_make_diffs_has_written_each_diff():
    for path in ROOT.glob("[0-9]*/*/*.diff"):
        _, diff = variants.split_preamble(path.read_text())
        file, chapter = renew_diffs.script_of(diff), int(path.parent.parent.name[:2])
        base = (ROOT / file).read_text()
        chapter = int(file[:2])
        for each in variants.choose(chapter, variants.read_variant(path).needs.get(chapter, ())):
            base = renew_diffs.patched(base, variants.split_preamble(each.path.read_text())[1])
        there = renew_diffs.patched(base, diff, exact=True)
        assert there, f"run make diffs: {path} does not fit"
        context = renew_diffs.context_of(diff)
        assert diff == renew_diffs.difference(file, base, there, context), f"make diffs: {path}"
        assert context == 1 or path.parent.name != "diffs", (
            f"{path}: one line of context, for stacks"
        )


# --- make variant ---


@pytest.fixture(scope="module")
def copy(make_folder) -> Path:
    """Yield a copy of the repository that is no git repository, like an archive of it."""
    copy_repository(folder := make_folder("copy"))
    return folder


@pytest.fixture
def make(copy, monkeypatch, capsys):
    """Return a function that calls common.variants in the copy; returns (status, out, err)."""
    monkeypatch.setattr(variants, "ROOT", copy)
    monkeypatch.setattr(variants, "FOLDER", copy / "variants")

    def call(*words: object) -> tuple[int, str, str]:
        capsys.readouterr()
        status = 0
        try:
            variants.main([str(word) for word in words])
        except variants.VariantError as error:
            return 2, capsys.readouterr().out, str(error)
        return status, *capsys.readouterr()

    yield call
    shutil.rmtree(copy / "variants", ignore_errors=True)


@check
@pytest.mark.parametrize("chapter", NUMBERS)
def test_a_variant_is_a_complete_chapter(chapter, make, copy):
    """All that its chapter starts, its modules and none else; every path that it names exists."""
    plain = copy / variants.CHAPTERS[chapter]
    started = {path.name for path in plain.iterdir() if path.suffix in (".sh", ".sbatch")}
    started -= {"launch_classifier.sh"}
    for variant in (each for number, each in APPLIED if number == chapter):
        needed = with_needs(chapter, [variant.name])
        names = {each.name for each in needed}
        status, out, _ = make(chapter, *names)
        folder = copy / "variants" / "+".join([plain.name, *sorted(names)])
        assert status == 0 and f"variants/{folder.name} is a complete chapter" in out
        modules = {path.stem for path in folder.glob("*.py")} - {"train_llm"}
        expected = set().union(*(MODULES.get(name, set()) for name in names))
        # Before chapter 3, no signal stops a run, so data workers need not ignore signals.
        assert modules == expected - ({"data_workers"} if chapter < 3 else set())
        files = {path.name for path in folder.iterdir() if path.suffix in (".sh", ".sbatch")}
        assert files == (set() if variant.launcher else started)
        for path in folder.iterdir():
            named = re.findall(r"\bvariants/[\w/.+-]+\w", path.read_text())
            assert all((copy / each).exists() for each in named), (path, named)
            if path.suffix in (".sh", ".sbatch"):
                assert f"{plain.name}/" not in path.read_text(), f"{path} starts the chapter"
        started_by = (folder / "train_llm.py").read_text().splitlines()[2]
        command = f"{started_by}\n{out.splitlines()[1]}"
        assert command.count(f" variants/{folder.name}/") == 2, command


@check
def test_the_second_call_and_another_order_make_nothing_new(make, copy):
    first = make(4, "hsdp", "cpu-offload")
    folder = copy / "variants/04-fsdp+cpu-offload+hsdp"
    before = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert first[0] == 0 and make(4, "cpu-offload", "hsdp", "hsdp") == first
    assert before == {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


def edit(folder: Path) -> None:
    (folder / "train_llm.py").write_text("pass\n")


def add_a_file(folder: Path) -> None:
    (folder / "my_module.py").write_text("pass\n")


def delete_a_file(folder: Path) -> None:
    (folder / "launch.sh").unlink()


@check
@pytest.mark.parametrize("change", [edit, add_a_file, delete_a_file])
def test_an_edited_folder_is_kept(change, make, copy):
    make(4, "hsdp")
    change(copy / "variants/04-fsdp+hsdp")
    before = listing(copy / "variants")
    expected = "variants/04-fsdp+hsdp was edited and is not replaced: rename it, or delete it."
    assert make(4, "hsdp") == (2, "", expected)
    assert listing(copy / "variants") == before
    (copy / "variants/04-fsdp+hsdp").rename(copy / "variants/mine")
    assert make(4, "hsdp")[0] == 0


@check
def test_what_python_and_slurm_write_is_no_edit(make, copy):
    make(4, "hsdp")
    (copy / "variants/04-fsdp+hsdp/__pycache__").mkdir()
    (copy / "variants/04-fsdp+hsdp/train-llm-1.log").touch()
    assert make(4, "hsdp")[0] == 0


@check
def test_a_folder_of_an_older_checkout_is_kept_and_warns(make, copy):
    make(4, "hsdp")
    folder, source = copy / "variants/04-fsdp+hsdp", copy / "04-fsdp/train_llm.py"
    text = source.read_text()
    assert variants.describe_folder(folder) == ["chapter 04-fsdp with hsdp"]
    before = listing(copy / "variants")
    try:
        source.write_text(text.replace("if __name__", "\nif __name__"))
        expected = "variants/04-fsdp+hsdp is of an older checkout: delete it, and make it again."
        assert make(4, "hsdp") == (2, "", expected)
        assert listing(copy / "variants") == before
        (line, warning) = variants.describe_folder(folder)
        assert line == "chapter 04-fsdp with hsdp"
        assert warning.startswith(f"{folder} is older than the checkout: delete it")
    finally:
        source.write_text(text)
    assert variants.describe_folder(copy / "04-fsdp") == [], "a chapter's own folder"


REFUSED = {
    "4 hdsp": "There is no variant hdsp. Chapter 4 has async-checkpoint, .*hsdp, .*zero2.",
    "1 hsdp": "hsdp does not apply to chapter 1, but to 4 and 5.",
    "6 hsdp": "CHAPTER is from 1 to 5.",
    "x hsdp": "CHAPTER is from 1 to 5.",
    "hsdp": "CHAPTER is from 1 to 5.",
    "4": 'WITH names the variants, for example WITH="workers".',
    "--diff 4": 'WITH names the variants, for example WITH="workers".',
    "5 float16": 'In chapter 5, float16 needs loss-scaling: WITH="float16 loss-scaling".',
    "1 float16": 'In chapter 1, float16 needs autocast and loss-scaling: WITH="autocast .*".',
    "5 mesh hsdp": "hsdp and mesh do not go together: leave one of them out.",
    "5 2-forgotten-division": "2-forgotten-division does not apply to chapter 5, but to 1.",
}


@check
@pytest.mark.parametrize("words", REFUSED)
def test_refused_with_one_sentence(words, make, copy):
    status, out, error = make(*words.split())
    assert (status, out) == (2, "") and re.fullmatch(REFUSED[words], error), error
    assert not (copy / "variants").exists(), "something is left"


@check
def test_a_diff_that_does_not_fit_leaves_nothing(make, copy):
    """Each pair goes together, but a reader may have changed the script."""
    source = copy / "04-fsdp/train_llm.py"
    text = source.read_text()
    try:
        source.write_text(text.replace('"shard",', '"my_shard",'))
        status, out, error = make(4, "hsdp")
        assert (status, out) == (2, "") and "hsdp.diff does not fit 04-fsdp/train_llm.py" in error
        status, out, error = make(4, "cpu-offload", "hsdp")
        assert status == 2 and "hsdp cannot be combined with cpu-offload" in error
        assert list((copy / "variants").iterdir()) == []
    finally:
        source.write_text(text)


@check
@pytest.mark.parametrize("repository", [False, True], ids=["archive", "repository"])
def test_make_variant_and_make_diff(repository, copy, tmp_path):
    """As a reader types it, in a folder that is a git repository or not, also in a git hook."""
    if repository:
        subprocess.run(["git", "init", "--quiet", copy], check=True)
    in_hook = {"GIT_DIR": copy / ".git", "GIT_INDEX_FILE": "no-index"} if repository else {}
    env = environment(**in_hook)

    def shell(command: str) -> subprocess.CompletedProcess:
        return subprocess.run(
            ["bash", "-c", command], cwd=copy, env=env, capture_output=True, text=True
        )

    try:
        listed = shell("make variant").stdout
        assert all(re.search(rf"^{each.name} +chapters ", listed, re.M) for each in GALLERY)
        assert "forgotten-division" not in listed
        made = shell('make variant CHAPTER=4 WITH="hsdp cpu-offload"')
        assert (made.returncode, made.stderr) == (0, "")
        folder = "variants/04-fsdp+cpu-offload+hsdp"
        assert f"    bash {folder}/launch.sh\n    sbatch {folder}/job.sbatch -e " in made.stdout
        text = (copy / folder / "train_llm.py").read_text()
        assert "# Two dimensions:" in text and "CPUOffloadPolicy" in text
        shown = shell("make diff CHAPTER=4 WITH=hsdp")
        assert shown.returncode == 0 and "+    # Two dimensions: replicate" in shown.stdout
        assert "CPUOffloadPolicy" not in shown.stdout and "variants/" not in shown.stdout
        shown = shell('make diff CHAPTER=5 WITH="float16 loss-scaling" | head -n 3')
        assert (shown.returncode, shown.stderr) == (0, "") and shown.stdout
        assert shell("make variant CHAPTER=1 WITH=2-forgotten-division").returncode == 0
        for command in (
            "make variant CHAPTER=4",
            "make diff CHAPTER=4 WITH=x",
            "make variant WITH=x",
        ):
            refused = shell(command)
            assert refused.returncode == 2 and not refused.stdout, command
            sentence, from_make = refused.stderr.splitlines()
            assert sentence.endswith(".") and from_make.startswith("make: ***")
    finally:
        shutil.rmtree(copy / ".git", ignore_errors=True)
        shutil.rmtree(copy / "variants", ignore_errors=True)


# --- launch files, in a copy of the repository ---

LITTLE = ("-s", 32, "--max-steps", 4, "--log-freq", 1, "--ckpt-freq", 4, "--eval-sequences", 16)
# By folder: a launch file, and what the log or the run shows of the variant only.
LAUNCHED = {
    "02-ddp+zero1": "launch.sh",
    "03-multi-node+workers": "launch_torchrun.sh",
    "04-fsdp+reduce-every-backward+selective-recomputation": "launch.sh",
}


@pytest.mark.ci
@pytest.mark.parametrize("folder", LAUNCHED)
def test_launch_file_trains_the_variant(folder, make, copy, tmp_path):
    """On two processes. A folder of an older checkout trains, too, and warns.

    Variables of the launch files that the reader's shell has exported select no other script.
    """
    exported = {"SCRIPT": "01-single-gpu/train_llm.py", "LAUNCH_FILE": "04-fsdp/launch.sh"}
    chapter, *names = folder.split("+")
    make(int(chapter[:2]), *names)
    outdated = chapter == "04-fsdp"
    source = copy / chapter / "launch.sh"
    if outdated:
        source.write_text((text := source.read_text()) + "# A line more.\n")
    flags = [*("-d", write_corpus(tmp_path)), *LITTLE, *("--save-dir", tmp_path, "-e", "run")]
    done = subprocess.run(
        ["bash", f"variants/{folder}/{LAUNCHED[folder]}", *map(str, flags)],
        cwd=copy,
        env=environment(NPROC_PER_NODE=2, PYTHONPATH=copy, **exported),
        capture_output=True,
        text=True,
    )
    if outdated:
        source.write_text(text)
    assert done.returncode == 0, done.stderr
    assert f"chapter {chapter} with {', '.join(names)}\n" in done.stderr
    warning = f"variants/{folder} is older than the checkout: delete it"
    assert done.stderr.count(warning) == int(outdated), done.stderr
    assert " x world size 2 x " in done.stderr
    assert [line["step"] for line in read_metrics(tmp_path / "run")] == [1, 2, 3, 4]


# --- stacks: the same training as chapter 1's, or as what one part of them computes ---

FSDP, DDP = CHAPTERS[3], CHAPTERS[1]
FP32 = ("--precision", "fp32")
STACKS = [
    Run(
        CHAPTERS[4],
        2,
        (*FP32, "--num-workers", 1),
        variants=("async-checkpoint", "selective-recomputation", "track-nodes", "workers"),
    ),
    Run(
        FSDP,
        2,
        ("-b", 4),
        variants=("async-checkpoint", "cpu-offload", "reduce-every-backward", "zero2"),
    ),
]
LLAMA_8 = ("-m", "llama-tiny-8-heads")
PARALLEL = ("--tensor-parallel", 2, "--context-parallel", 2)
THREE = ("context-parallel", "mesh", "tensor-parallel")
THREE_DIMENSIONS = Run(CHAPTERS[4], 8, (*FP32, *LLAMA_8, *PARALLEL), variants=THREE)
OTHER_GROUPS = ("dp_rank = rank // (cp_size * tp_size)", "dp_rank = rank % dp_size")
register(CHAPTERS[4], [OTHER_GROUPS], THREE)


@pytest.fixture(scope="module")
def ladder(make_folder) -> Ladder:
    return Ladder(make_folder("stacks"), model="gpt2-narrow")


@pytest.mark.nightly
@pytest.mark.parametrize("run", STACKS, ids=lambda run: run.chapter)
def test_stacks_of_four(ladder, run):
    if "workers" in run.variants:  # what they load, no process that trains notes
        found, expected = ladder.run(run), ladder.alone("-b", 24)
        assert_same_losses(ladder.metrics(expected), ladder.metrics(found))
    else:
        assert_chapter_1(ladder, run)


@pytest.mark.nightly
def test_stack_of_four_in_16_bits(ladder):
    """ZeRO-1 and a power of two as loss scale change no number of autocast's training."""
    stack = ("async-checkpoint", "autocast", "loss-scaling", "zero1")
    found = ladder.run(Run(DDP, 2, variants=stack))
    expected = ladder.run(Run(DDP, 2, variants=("autocast",)))
    assert_same_losses(ladder.metrics(expected), ladder.metrics(found))
    plain = ladder.run(Run(DDP, 2))
    assert ladder.metrics(plain)[1]["loss"] != ladder.metrics(expected)[1]["loss"]


def assert_same_in_three_dimensions(ladder: Ladder, run: Run) -> None:
    """The losses of chapter 1; four ranks have the same samples."""
    found, expected = ladder.run(run), ladder.alone(*LLAMA_8, "-b", 24)
    assert_same_losses(ladder.metrics(expected), ladder.metrics(found))
    four_times = [sorted(step * 4) for step in ladder.samples(expected)]
    assert ladder.samples(found, run.world_size) == four_times, "the samples differ"


@pytest.mark.nightly
def test_three_dimensions(ladder):
    """Eight ranks: two groups of four, which share each sequence and each layer."""
    assert_same_in_three_dimensions(ladder, THREE_DIMENSIONS)


def test_planted_groups_of_other_ranks_than_those_that_share_a_layer(ladder):
    run = dataclasses.replace(THREE_DIMENSIONS, replaced=(OTHER_GROUPS,))
    with pytest.raises(AssertionError, match=r"the (loss|grad_norm) differ"):
        assert_same_in_three_dimensions(ladder, run)


# --- resume, out of the plain chapter and into it ---

# By variant: the setting that its refusal names. All other variants compute the same, so a run goes
# on with its losses.
REFUSED_FOR = {
    "autocast": "precision",
    "bfloat16-weights": "param_dtype",
    "document-mask": "documents",
    "float16": "(--)?precision",
    "muon": "optimizer",
    "local-sgd": "averaged",
    "pure-bfloat16": "(param_dtype|--precision)",
    "reduce-bfloat16": "reduce_dtype",
    "stochastic-rounding": "rounding",
    "wsd": "schedule",
}
ELSEWHERE = {
    "fp8": "trains with torchao only",
    "horovod": "trains with horovodrun only",
    "instruct": "trains on other data",
    "lora": "trains on pretrained weights",
}
RESUMED = [(number, each.name) for number, each in APPLIED if each.name not in ELSEWHERE]
ARGUMENTS = {
    "context-parallel": ("--context-parallel", 2),
    "local-sgd": ("--local-steps", 2),
    "tensor-parallel": ("--tensor-parallel", 2),
    "workers": ("--num-workers", 1),
}
TWO_NODES = [{"LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": 2} for rank in TWO_BY_TWO]
LAST, HANDED_OVER = 4, 2  # steps
STRAIGHT, OUT, INTO = "straight", "out of the variant", "into the variant"


class Resumed:
    """Runs of a chapter and of its variants, and runs that begin with one and end with the other.

    Those of the same number of ranks are done in one start. They compute in float32, if the variant
    computes the same as its chapter, which is "plain" then; with the chapter's own precision, it is
    "default".
    """

    def __init__(self, number: int, folder: Path) -> None:
        self.folder, self.chapter = folder, variants.CHAPTERS[number]
        self.ladder = Ladder(folder, model="llama-tiny-8-heads")
        self.ended: set[str] = set()  # runs that ended with the status that they should have
        self.started = 0
        names = [name for chapter, name in RESUMED if chapter == number]
        self.scripts = {"plain": self.chapter, "default": self.chapter}
        for name in names:
            needed = [each.name for each in with_needs(number, [name])]
            self.scripts[name] = str(make_variant(folder / "scripts", self.chapter, *needed))
        self._run([(name, STRAIGHT) for name in self.scripts])
        names = [name for name in names if self.run_of(name, STRAIGHT) in self.ended]
        for name in names:
            chapter = "default" if name in REFUSED_FOR else "plain"
            for way, source in ((INTO, chapter), (OUT, name)):
                run = folder / self.run_of(name, way)
                hand_over(folder / self.run_of(source, STRAIGHT), run, HANDED_OVER)
        self._run([(name, way) for name in names for way in (OUT, INTO)])

    @staticmethod
    def run_of(name: str, way: str) -> str:
        return f"{name}-{way.split()[0]}"

    def _run(self, wanted: list[tuple[str, str]]) -> None:
        by_ranks = defaultdict(dict)
        for name, way in wanted:
            trained = "plain" if way == OUT else name
            n_ranks = 1 if self.chapter == CHAPTERS[0] else 4 if trained == "hsdp" else 2
            by_ranks[n_ranks][self.run_of(name, way)] = {
                "args": self.ladder.flags(
                    self.run_of(name, way),
                    *("--max-steps", LAST, "--ckpt-freq", HANDED_OVER, "--keep-checkpoints", 9),
                    *ARGUMENTS.get(trained, ()),
                    *(() if name in (*REFUSED_FOR, "default") else float32(self.chapter)),
                ),
                "chapter": self.scripts[trained],
                "expect": 2 if way != STRAIGHT and name in REFUSED_FOR else 0,
                "stderr_file": [str(self.stderr(name, way, rank)) for rank in range(n_ranks)],
            }
        for n_ranks, runs in by_ranks.items():
            self.started += 1
            folder = self.folder / f"series-{self.started}"
            series = Series(n_ranks, runs, folder, TWO_NODES if n_ranks == 4 else None)
            self.ended |= set(series.ended)

    def stderr(self, name: str, way: str, rank: int = 0) -> Path:
        return self.folder / f"{self.run_of(name, way)}-{rank}.stderr"

    def metrics(self, name: str, way: str) -> list[dict]:
        """Return what a run has logged that ended as it should."""
        run, said = self.run_of(name, way), self.stderr(name, way)
        assert run in self.ended, said.read_text() if said.exists() else "it did not start"
        return self.ladder.metrics(run)


@pytest.fixture(scope="module")
def resumed(make_folder):
    return functools.cache(lambda number: Resumed(number, make_folder(f"resumed-{number}")))


@pytest.mark.nightly
@pytest.mark.parametrize(("chapter", "name"), RESUMED)
def test_a_variant_resumes_its_chapter_and_the_other_way_or_is_refused_by_name(
    resumed, chapter, name
):
    runs = resumed(chapter)
    expected = runs.metrics("plain", STRAIGHT)
    if name not in REFUSED_FOR:
        assert_same_losses(expected, runs.metrics(name, STRAIGHT))
    for way in (OUT, INTO):
        found, said = runs.metrics(name, way), runs.stderr(name, way).read_text()
        if name in REFUSED_FOR:
            refusal = rf"was started with {REFUSED_FOR[name]} .*, not .*: resume it"
            assert re.search(refusal, said), said
            saved = (runs.folder / runs.run_of(name, way) / "checkpoints").iterdir()
            assert [path.name for path in saved] == [f"step-{HANDED_OVER:08d}"]
        else:
            assert f"resumed after step {HANDED_OVER} of {LAST}" in said
            assert_same_losses(expected, found)
