"""The variant lora: frozen weights and trained adapters, in each chapter the same.

A checkpoint holds the adapters only. The run's model is what PEFT makes of base and adapter.
"""

import dataclasses
import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from helpers import (
    CHAPTERS,
    NARROW,
    ROOT,
    Ladder,
    Run,
    assert_exact,
    assert_same_losses,
    first_then_nightly,
    float32,
    hand_over,
    make_variant,
    plant,
    register,
    run_script,
    speak_at_once,
    tensors,
    without_kernels,
)
from runner import Ranks, load_script
from transformers import AutoModelForCausalLM, AutoTokenizer

from common.errors import RunError
from common.inputs import models

from trained_model import import_lora

peft = pytest.importorskip("peft", reason="needs peft, of the extra lora")

NAME = ("lora",)
# By name: the preset and the seed of a model's weights.
BASES = {"llama": ("llama-narrow", 5), "gpt2": ("gpt2-narrow", 5), "another": ("llama-narrow", 6)}
ONE, FSDP = CHAPTERS[0], CHAPTERS[3]
EVALUATE, EXPORT = "01-single-gpu/evaluate.py", "04-fsdp/export.py"
# By what is wrong: the chapter, and (right, wrong) texts.
OTHER_DRAW = [
    ("lora.add_adapters(each, args", "torch.manual_seed(1); lora.add_adapters(each, args")
]
ALL_SAVED = [("    lora.save_adapters_only(model)\n", "")]
NOT_FROZEN = [("    lora.save_adapters_only(model)\n", "    model.requires_grad_(True)\n")]
NAMES_ONLY = [("checksum.update(tensor.detach().contiguous().numpy())", "pass")]
register(FSDP, OTHER_DRAW, NAME)
for bug in (ALL_SAVED, NOT_FROZEN):
    register(ONE, bug, NAME)
register("01-single-gpu/diffs/lora.py", NAMES_ONLY)


class Bases(Ladder):
    """A ladder whose runs may begin with narrow models that have (random) weights: -m NAME."""

    def flags(self, name: str, *args: object) -> list[object]:
        words = super().flags(name, *args)
        return [self.base(word) if word in BASES else word for word in words]

    def base(self, name: str) -> Path:
        """Return the folder of a model with its tokenizer, as an export writes it."""
        path, (preset, seed) = self.folder / name, BASES[name]
        if not path.exists():
            tokenizer = models.load_tokenizer(NARROW[preset])
            torch.manual_seed(seed)
            config = models.load_config(str(self.folder / preset), tokenizer)
            AutoModelForCausalLM.from_config(config).save_pretrained(path)
            tokenizer.save_pretrained(path)
        return path


@pytest.fixture(scope="module")
def ladder(make_folder) -> Ladder:
    return Bases(make_folder("lora"))


def tuned(
    chapter: str = ONE,
    world_size: int = 1,
    *args: object,
    replaced: tuple = (),
    base: str = "llama",
    variants: tuple[str, ...] = NAME,
) -> Run:
    """Return a run of the variant on a base model."""
    flags = ("-m", base, "--pretrained", "--lr", 1e-2, "-b", 4)
    flags += ("--lora-rank", 4, "--ckpt-freq", 5, "--keep-checkpoints", 9, *float32(chapter))
    return Run(chapter, world_size, (*flags, *args), tuple(replaced), variants=variants)


def assert_as_in_chapter_1(ladder: Ladder, run: Run, base: str) -> None:
    expected = ladder.metrics(ladder.run(tuned(base=base)))
    assert expected[-1]["loss"] < expected[0]["loss"] - 0.3, "it learns"
    assert_same_losses(expected, ladder.metrics(ladder.run(run)))


@pytest.mark.ci
@pytest.mark.parametrize(
    ("chapter", "world_size", "base"),
    first_then_nightly(
        [
            (FSDP, 2, "llama"),
            *((FSDP, 3, base) for base in ("llama", "gpt2")),
            *((chapter, 2, "llama") for chapter in CHAPTERS if chapter not in (ONE, FSDP)),
        ]
    ),
)
def test_the_same_losses_in_each_chapter(ladder, chapter, world_size, base):
    run = tuned(chapter, world_size, base=base)
    assert_as_in_chapter_1(ladder, run, base)


def test_planted_other_adapters_are_noticed(ladder):
    run = tuned(FSDP, 2, replaced=OTHER_DRAW)
    with pytest.raises(AssertionError, match="the loss differ"):
        assert_as_in_chapter_1(ladder, run, "llama")


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("chapter", "variants", "args"),
    [
        (FSDP, ("cpu-offload", "lora", "reduce-every-backward"), ("-b", 2)),
        (FSDP, ("async-checkpoint", "lora", "zero2"), ("--activation-checkpointing", "-b", 2)),
        (CHAPTERS[4], ("context-parallel", "lora", "mesh"), ("--context-parallel", 2)),
    ],
)
def test_stacks(ladder, chapter, variants, args):
    run = tuned(chapter, 2, *args, variants=variants)
    expected = ladder.metrics(ladder.run(tuned()))
    assert_same_losses(expected, ladder.metrics(ladder.run(run)))


@pytest.mark.nightly
def test_compiled_layers(ladder):
    run = dataclasses.replace(tuned(FSDP, 2, "--compile"), note=without_kernels)
    assert_as_in_chapter_1(ladder, run, "llama")


@pytest.mark.nightly
def test_instruct_with_lora(make_folder):
    """The same losses on answers, with DDP on one rank and FSDP on two."""
    ladder = Bases(make_folder("instruct"), length=48)
    rows = [{"question": f"{i} times", "answer": "self " * (i % 7 + 1)} for i in range(900)]
    (ladder.folder / "corpus.json").write_text(json.dumps(rows))
    runs = [
        tuned(chapter, world_size, variants=("instruct", "lora"))
        for chapter, world_size in ((CHAPTERS[1], 1), (FSDP, 2))
    ]
    expected, found = (ladder.metrics(ladder.run(run)) for run in runs)
    assert expected[-1]["loss"] < expected[0]["loss"] - 0.3
    assert_same_losses(expected, found)


# --- what is trained and saved ---


def assert_adapters_only(ladder: Ladder, run: Run) -> None:
    """The model of the first step is the base; a checkpoint holds nothing else but adapters."""
    base = Run(ONE, 1, tuned().args[:7])  # without the variant's flags
    first, plain = (ladder.metrics(ladder.run(each))[0] for each in (run, base))
    assert first["loss"] == pytest.approx(plain["loss"], rel=1e-6), "the first losses differ"
    saved = tensors(ladder.folder / run.name)
    adapters = {name for name in saved["model"] if re.search(r"\.lora_[AB]\.default\.", name)}
    assert saved["model"].keys() == adapters and adapters, "other weights are saved"
    assert saved["optimizer"]["state"].keys() == adapters, "other weights are trained"
    config = models.load_config(str(ladder.base("llama")))
    # In each layer q, k, v, o, gate, up and down, each with two matrices.
    assert len(adapters) == 2 * 7 * config.num_hidden_layers
    assert not any(saved["model"][n].abs().max() == 0 for n in adapters), (
        "an adapter is not trained"
    )


@pytest.mark.ci
def test_a_checkpoint_holds_the_adapters_only(ladder):
    assert_adapters_only(ladder, tuned())


@pytest.mark.parametrize("bug", [ALL_SAVED, NOT_FROZEN], ids=["all saved", "not frozen"])
def test_planted_weights_that_are_saved_or_trained(ladder, bug):
    with pytest.raises(AssertionError, match=r"^other weights are"):
        assert_adapters_only(ladder, tuned(replaced=bug))


@pytest.mark.check
def test_the_log_says_once_how_many_parameters_are_trained(caplog):
    """In chapters 4 and 5, rank 0 has the model twice: with weights and without."""
    caplog.set_level("INFO")
    config = models.load_config("llama-tiny")
    lora = import_lora()
    for device in ("cpu", "meta"):
        with torch.device(device):
            lora.add_adapters(AutoModelForCausalLM.from_config(config), 4)
    (message,) = caplog.messages
    assert re.fullmatch(r"the adapters have [\d,]+ parameters, \d\.\d\d% of all", message)


# --- after the training ---


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(torch.arange(64).view(2, 32) * 61 % 4096).logits


@pytest.mark.nightly
@pytest.mark.parametrize("base", ["llama", "gpt2"])
def test_scripts_use_what_peft_makes_of_base_and_adapter(ladder, tmp_path, base):
    """evaluate.py has the loss of the training; both exports compute the same."""
    run = ladder.folder / ladder.run(tuned(FSDP, 3, base=base))
    done = run_script(EVALUATE, run, "--output", tmp_path / "found.json")
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "found.json").read_text())["loss"]
    last = ladder.metrics(run.name)[-1]["eval_loss"]
    assert found == pytest.approx(last, rel=1e-5)
    for flags, name in (((), "merged"), (("--adapter",), "adapter")):
        done = run_script(EXPORT, *flags, run, tmp_path / name)
        assert done.returncode == 0, done.stderr
    assert {path.name for path in (tmp_path / "adapter").iterdir()} == {
        *("adapter_config.json", "adapter_model.safetensors"),
    }
    plain = AutoModelForCausalLM.from_pretrained(ladder.base(base))
    before = logits(plain)
    adapted = logits(peft.PeftModel.from_pretrained(plain, tmp_path / "adapter"))
    merged = logits(AutoModelForCausalLM.from_pretrained(tmp_path / "merged"))
    assert torch.allclose(merged, adapted, atol=1e-4)
    assert not torch.allclose(merged, before, atol=1e-2)
    assert AutoTokenizer.from_pretrained(tmp_path / "merged").vocab_size == 4096
    done = run_script("01-single-gpu/generate.py", run, "--max-new-tokens", 4, "-p", "abc")
    assert done.returncode == 0, done.stderr
    refused = run_script(EXPORT, "--adapter", ladder.folder / ladder.alone(), tmp_path / "none")
    assert refused.returncode == 2 and "not trained with the variant lora" in refused.stderr


@pytest.mark.check
def test_adapters_have_the_dtype_of_the_training(tmp_path):
    words = ("--adapter", "--param-dtype", "bfloat16", tmp_path / "run", tmp_path / "target")
    done = run_script(EXPORT, *words)
    assert done.returncode == 2 and "exported as they are: leave out --param-dtype." in done.stderr


@pytest.mark.check
@pytest.mark.parametrize(("given", "expected"), [(None, "the run's"), ("moved", "moved")])
def test_adapters_are_exported_with_the_tokenizer_that_is_given(monkeypatch, given, expected):
    def found(name: str) -> None:
        raise RunError(name)

    script = load_script(ROOT / EXPORT)
    monkeypatch.setattr(models, "load_tokenizer", found)
    settings = {"adapter": "lora", "sources": {"model_name": "a", "tokenizer_name": "the run's"}}
    saved = script.SavedCheckpoint(Path("run"), Path("run/checkpoints/step-1"), 1, settings)
    with pytest.raises(RunError, match=f"^{expected}$"):
        script.export_adapter(saved, Path("target"), None, given)


# --- resume ---


def start(ladder: Ladder, name: str, run: Run, script: Path, **options: object) -> list[int]:
    """Start a run under another name, and return the exit statuses."""
    stderr = [str(ladder.folder / f"{name}-{rank}.stderr") for rank in range(run.world_size)]
    flags = ladder.flags(name, *run.args)
    options |= {"chapter": str(script), "stderr_file": stderr}
    return Ranks(run.world_size, flags, **options).finish()


def said(ladder: Ladder, name: str) -> str:
    return (ladder.folder / f"{name}-0.stderr").read_text()


@pytest.fixture(scope="module")
def scripts(make_folder) -> dict[str, Path]:
    folder = make_folder("scripts")
    return {chapter: make_variant(folder, chapter, *NAME) for chapter in (ONE, FSDP)}


@pytest.mark.nightly
def test_goes_on_after_kill_9_and_in_another_chapter(ladder, scripts):
    run = tuned(FSDP, 2)
    straight = ladder.run(run)
    killed = {"kill_after_steps": [None, 8], "plant": speak_at_once}
    assert start(ladder, "killed", run, scripts[FSDP], **killed)[1] == -9
    assert start(ladder, "killed", run, scripts[FSDP]) == [0, 0], said(ladder, "killed")
    assert_exact(ladder.folder / straight, ladder.folder / "killed")
    hand_over(ladder.folder / straight, ladder.folder / "alone", 5)
    assert start(ladder, "alone", tuned(), scripts[ONE]) == [0], said(ladder, "alone")
    assert "resumed after step 5 of 10" in said(ladder, "alone")
    assert_same_losses(ladder.metrics(straight), ladder.metrics("alone"))


def refuse_another_base(ladder: Ladder, script: Path, name: str, replaced: tuple = ()) -> None:
    hand_over(ladder.folder / ladder.run(tuned(replaced=replaced)), ladder.folder / name, 5)
    other = ladder.base("another")
    run = tuned(ONE, 1, "-m", other)
    assert start(ladder, name, run, script) == [2], "another base is trained"
    assert re.search(r"was started with base_weights \w{32}, not \w{32} ", said(ladder, name))
    done = run_script(EVALUATE, ladder.folder / name, "-m", other)
    assert done.returncode == 2 and "was trained on other weights than those of" in done.stderr
    kept = (ladder.folder / name / "checkpoints").iterdir()
    assert [path.name for path in kept] == ["step-00000005"], "something is lost"


@pytest.mark.nightly
def test_another_base_is_refused(ladder, scripts):
    refuse_another_base(ladder, scripts[ONE], "other-base")


def test_planted_base_that_is_not_compared(ladder, scripts, tmp_path):
    script = plant(scripts[ONE], tmp_path / "planted", NAMES_ONLY)
    with pytest.raises(AssertionError, match=r"^another base is trained"):
        refuse_another_base(ladder, script, "planted-base", NAMES_ONLY)


@pytest.mark.nightly
def test_a_moved_base_is_found_by_its_checksum(ladder, scripts, tmp_path):
    moved = shutil.copytree(ladder.base("llama"), tmp_path / "moved")
    hand_over(ladder.folder / ladder.run(tuned()), ladder.folder / "moved", 5)
    run = tuned(ONE, 1, "-m", moved)
    assert start(ladder, "moved", run, scripts[ONE]) == [0], said(ladder, "moved")
    assert_exact(ladder.folder / tuned().name, ladder.folder / "moved")


@pytest.mark.nightly
def test_the_chapter_and_the_variant_do_not_resume_each_other(ladder, scripts):
    run = tuned()
    plain = Run(ONE, 1, (*run.args[:7], "--ckpt-freq", 5, "--keep-checkpoints", 9))
    for source, target, script in ((run, plain, ROOT / ONE), (plain, run, scripts[ONE])):
        name = f"out-of-{bool(source.variants)}"
        hand_over(ladder.folder / ladder.run(source), ladder.folder / name, 5)
        assert start(ladder, name, target, script) == [2], said(ladder, name)
        assert re.search(r"started with adapter .* \(see the variant lora\)", said(ladder, name))


@pytest.mark.nightly
def test_without_pretrained_weights_it_is_refused(ladder, scripts):
    plain = Run(ONE, 1, ("-m", "gpt2-narrow"))
    assert start(ladder, "random", plain, scripts[ONE]) == [2]
    assert "Adapters are trained on pretrained weights: give" in said(ladder, "random")
