"""A run becomes a folder that transformers loads, with the run's own numbers, and trains on."""

import json
import os
import resource
import shutil
import signal
import sys
from pathlib import Path

import helpers
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from helpers import CHAPTERS, ROOT, first_then_nightly, float32, read_metrics
from runner import Ranks, finish, load_script, server_context, start
from safetensors.torch import load_file
from torch import nn
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM, AutoTokenizer

from common import checkpoint, launch, models, trained

SCRIPT = ROOT / "04-fsdp/export.py"
SMALL = ["-s", 32, "--global-batch-size", 6, "--max-steps", 4, "--ckpt-freq", 2, "--log-freq", 1]
IDS = torch.arange(64).view(2, 32) * 61 % 4096
RUNS = {"gpt2": "gpt2-tiny", "llama": "llama-tiny", "zero": "gpt2-tiny", "fsdp": "llama-tiny"}
TIED = "lm_head.weight"


def random_model(name: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    """Return a model of which no two tensors are alike, the same each time."""
    model = AutoModelForCausalLM.from_config(models.load_config(name)).to(dtype)
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        nn.init.normal_(parameter.data, std=0.1, generator=generator)
    return model


def save_run(run_dir: Path, name: str, model: nn.Module, dtype: str = "float32") -> None:
    training = {"model": checkpoint.describe_model(model), "seq_length": 32, "param_dtype": dtype}
    training["sources"] = {"model_name": name, "tokenizer_name": None}
    helpers.save_run(run_dir, model, 7, training)


def save_sharded(rank: int, run_dir: Path, name: str) -> None:
    """Save a run as the ranks of FSDP2 do, each its shards."""
    dist.init_process_group("gloo", f"file://{run_dir}.store", rank=rank, world_size=2)
    model = random_model(name)
    for block in model.model.layers:
        fully_shard(block)
    fully_shard(model)
    save_run(run_dir, name, model)
    dist.barrier()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def runs(make_folder) -> Path:
    """Return a folder with a corpus, and with the runs that tests have asked for."""
    folder = make_folder("runs")
    corpus = "".join(f"Text number {n}, of many words. " * 20 for n in range(50))
    (folder / "corpus.txt").write_text(corpus)
    provide(folder, "gpt2")
    return folder


def provide(folder: Path, name: str) -> None:
    """Train a run of chapter 1, or one with ZeRO-1, or save that of FSDP2, if it is not there."""
    if (folder / name).exists():
        return
    args = ["-d", folder / "corpus.txt", *SMALL, "--save-dir", folder, "-m", RUNS[name], "-e", name]
    if name == "fsdp":
        process = server_context().Process
        ranks = [process(target=save_sharded, args=(n, folder / name, RUNS[name])) for n in (0, 1)]
        for each in ranks:
            each.start()
        assert [finish(each) for each in ranks] == [0, 0]
    elif name == "zero":
        assert Ranks(2, [*args, "--zero1"], chapter="02-ddp").finish() == [0, 0]
    else:
        assert finish(start(args)) == 0


@pytest.fixture
def export(monkeypatch, capfd):
    """Return a function that runs the script in this process and returns what it printed."""

    def run(*args: object) -> str:
        script = load_script(SCRIPT)
        monkeypatch.setattr(sys, "argv", ["export.py", *map(str, args)])
        capfd.readouterr()
        script.main()
        return capfd.readouterr().out

    return run


@pytest.fixture
def refuse(monkeypatch, capfd, tmp_path):
    """Return a function that expects a refusal and returns its one sentence."""

    def run(*args: object) -> str:
        before = listing(tmp_path)
        monkeypatch.setattr(sys, "argv", ["export.py", *map(str, args)])
        capfd.readouterr()
        with pytest.raises(SystemExit) as exit_:
            launch.run(load_script(SCRIPT).main)
        out, err = capfd.readouterr()
        assert exit_.value.code == 2 and not out, err
        assert len(err.splitlines()) == 1 and err.endswith(".\n"), err
        assert listing(tmp_path) == before, "nothing was written, nothing lost"
        return err

    return run


def listing(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() if path.is_file() else b"" for path in folder.rglob("*")}


def read_run(run_dir: Path, name: str, step: int) -> nn.Module:
    """Return the model that the run had after a step, by another way than the script's."""
    model = AutoModelForCausalLM.from_config(models.load_config(name))
    path = run_dir / f"checkpoints/step-{step:08d}"
    dcp.load({"model": model.state_dict()}, checkpoint_id=path, no_dist=True)
    return model


def read_weights(folder: Path) -> dict[str, torch.Tensor]:
    files = [load_file(path) for path in folder.glob("*.safetensors")]
    merged = {name: tensor for tensors in files for name, tensor in tensors.items()}
    assert len(merged) == sum(map(len, files)), "each tensor stands in one file"
    return merged


def compare(folder: Path, expected: nn.Module) -> None:
    """Compare what plain transformers makes of a folder with a model, in all weights and logits."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    state, expected_state = model.state_dict(), expected.state_dict()
    assert state.keys() == expected_state.keys()
    for name, tensor in expected_state.items():
        assert state[name].dtype == tensor.dtype and torch.equal(state[name], tensor), name
    with torch.no_grad():
        logits, expected_logits = model(IDS).logits, expected.eval()(IDS).logits
    assert expected_logits.std() > 0.1
    assert torch.allclose(logits, expected_logits, rtol=0, atol=1e-5)


@pytest.mark.parametrize("run", first_then_nightly(["gpt2", "llama", "zero"]))
def test_transformers_has_the_numbers_of_the_run(run, runs, export, tmp_path):
    provide(runs, run)
    out = export(runs / run, tmp_path / "model")
    expected = read_run(runs / run, RUNS[run], 4)
    compare(tmp_path / "model", expected)
    names = f"(model {RUNS[run]}, tokenizer {RUNS[run]})"
    first_line, second_line, *_ = out.splitlines()
    assert first_line == f"{tmp_path}/model: step 4 of {runs / run} {names}"
    assert second_line.startswith(f"{expected.num_parameters():,} parameters in float32, ")
    assert f"bash 04-fsdp/launch.sh --pretrained -m {tmp_path}/model\n" in out
    assert list(tmp_path.iterdir()) == [tmp_path / "model"]
    modes = {path.stat().st_mode for path in (tmp_path / "model").iterdir()}
    assert len(modes) == 1, "who may read one file may read all"


@pytest.mark.ci
def test_shards_of_two_ranks_become_whole(runs, export, tmp_path):
    provide(runs, "fsdp")
    run = runs / "fsdp"
    assert {path.name[:4] for path in run.glob("checkpoints/*/*.distcp")} == {"__0_", "__1_"}
    export(run, tmp_path / "model")
    compare(tmp_path / "model", random_model("llama-tiny"))


@pytest.mark.nightly
def test_tokenizer_and_settings_come_back(runs, export, tmp_path):
    for run in ("gpt2", "llama"):
        provide(runs, run)
        folder = tmp_path / run
        export(runs / run, folder)
        before, after = models.load_tokenizer(RUNS[run]), AutoTokenizer.from_pretrained(folder)
        assert models.load_tokenizer(str(folder)).get_vocab() == before.get_vocab()
        for text in (
            "def f(x):\n\treturn 'x' * 2\n",
            "Stra\u00dfe, \u65e5\u672c <|endoftext|> a  b",
        ):
            ids = after(text)["input_ids"]
            assert ids == before(text)["input_ids"] and after.decode(ids) == text
        assert after.eos_token_id == before.eos_token_id == 0
        # A run that begins from the folder is of the same model, to the last setting.
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(models.load_config(str(folder)))
        training = json.loads((runs / run / "state.json").read_text())["training"]
        assert checkpoint.describe_model(model) == training["model"]
        model = AutoModelForCausalLM.from_pretrained(folder)
        assert model.generation_config.eos_token_id == 0
        assert model.config.use_cache and model.generation_config.use_cache
        text = model.generate(IDS[:1, :5], max_new_tokens=3, do_sample=False, pad_token_id=0)
        assert text.shape[1] <= 8


@pytest.mark.nightly
def test_tied_weights_stand_there_once(runs, export, tmp_path):
    for run, tied in (("gpt2", True), ("llama", False)):
        provide(runs, run)
        export(runs / run, tmp_path / run)
        weights, expected = read_weights(tmp_path / run), read_run(runs / run, RUNS[run], 4)
        assert (TIED not in weights) == tied
        assert weights.keys() == dict(expected.named_parameters()).keys()
        expected.save_pretrained(tmp_path / "usual")
        names = {path.name for path in (tmp_path / "usual").iterdir()}
        assert names < {path.name for path in (tmp_path / run).iterdir()}
        usual = load_file(tmp_path / "usual/model.safetensors")
        assert all(torch.equal(weights[name], usual.pop(name)) for name in weights) and not usual


@pytest.mark.ci
@pytest.mark.parametrize("chapter", first_then_nightly(reversed(CHAPTERS)))
def test_training_goes_on_from_the_folder(chapter, runs, export, tmp_path):
    """A step at rate 0 changes no weight, so its evaluation is that of the folder."""
    folder = tmp_path / "model"
    export(runs / "gpt2", folder)
    args = ["-d", runs / "corpus.txt", *SMALL, "--max-steps", 1, "--lr", 0, "--seed", 5]
    args += ["--save-dir", tmp_path, "-m", folder, *float32(chapter)]
    processes = [
        start([*args, "-e", "run", "--pretrained"], chapter=chapter),
        start([*args, "-e", "anew"], chapter=chapter),
    ]
    assert [finish(process) for process in processes] == [0, 0]
    expected = read_metrics(runs / "gpt2")[-1]["eval_loss"]
    found = {name: read_metrics(tmp_path / name)[-1]["eval_loss"] for name in ("run", "anew")}
    assert found["run"] == pytest.approx(expected, rel=1e-6)
    assert found["anew"] != pytest.approx(expected, rel=1e-2), "without --pretrained"


@pytest.mark.nightly
def test_several_files_of_weights(runs, export, tmp_path):
    provide(runs, "llama")
    export(runs / "llama", tmp_path / "model", "--max-shard-size", "1MB")
    index = json.loads((tmp_path / "model/model.safetensors.index.json").read_text())
    files = {path.name for path in (tmp_path / "model").glob("*.safetensors")}
    assert set(index["weight_map"].values()) == files and len(files) > 2
    compare(tmp_path / "model", read_run(runs / "llama", "llama-tiny", 4))


@pytest.mark.nightly
def test_dtypes(runs, export, tmp_path):
    export(runs / "gpt2", tmp_path / "half", "--param-dtype", "bfloat16")
    rounded = read_run(runs / "gpt2", "gpt2-tiny", 4).to(torch.bfloat16)
    compare(tmp_path / "half", rounded)
    model = random_model("gpt2-tiny", torch.bfloat16)
    save_run(tmp_path / "run", "gpt2-tiny", model, "bfloat16")
    export(tmp_path / "run", tmp_path / "as-trained")
    compare(tmp_path / "as-trained", model)
    export(tmp_path / "run", tmp_path / "wide", "--param-dtype", "float32")
    compare(tmp_path / "wide", model.float())


def change_one_number(content, **options) -> None:
    LOAD(content, **options)
    content["model"]["transformer.ln_f.bias"][3] += 1e-3


LOAD = dcp.load


def test_planted_number_that_changes_is_noticed(runs, export, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(trained.dcp, "load", change_one_number)
        export(runs / "gpt2", tmp_path / "model")
    with pytest.raises(AssertionError):
        compare(tmp_path / "model", read_run(runs / "gpt2", "gpt2-tiny", 4))


@pytest.mark.nightly
def test_bad_input(runs, refuse, tmp_path):
    provide(runs, "llama")
    target = tmp_path / "model"
    assert "no run's folder" in refuse(tmp_path / "nothing", target)
    assert "no run's folder" in refuse(runs, target)
    assert "no run's folder" in refuse(runs / "corpus.txt", target)
    assert "another model than gpt2-tiny: give -m" in refuse(
        runs / "llama", target, "-m", "gpt2-tiny"
    )
    assert "another model than gpt2: give -m" in refuse(runs / "gpt2", target, "-m", "gpt2")
    assert "no checkpoint of step 3: give one of 2, 4" in refuse(runs / "gpt2", target, "--step", 3)
    assert "There is no model or tokenizer at" in refuse(
        runs / "gpt2", target, "-m", tmp_path / "nope"
    )
    assert "has no usable tokenizer" in refuse(runs / "gpt2", target, "--tokenizer-name", runs)
    target.mkdir()
    (target / "thesis.txt").write_text("the only copy")
    assert f"{target} already exists" in refuse(runs / "gpt2", target)
    assert "already exists" in refuse(runs / "gpt2", target / "thesis.txt")
    assert "File exists" in refuse(runs / "gpt2", target / "thesis.txt" / "model")


@pytest.mark.nightly
def test_damaged_runs(runs, export, refuse, tmp_path):
    run, target = tmp_path / "run", tmp_path / "model"
    shutil.copytree(runs / "gpt2", run)
    (file,) = run.glob("checkpoints/step-00000004/*.distcp")
    os.truncate(file, file.stat().st_size - 1)
    assert f"{file} is damaged: give another --step." in refuse(run, target)
    file.unlink()
    assert f"{file} is damaged" in refuse(run, target)
    export(run, target, "--step", 2)
    compare(target, read_run(runs / "gpt2", "gpt2-tiny", 2))
    shutil.rmtree(target)
    shutil.rmtree(run / "checkpoints")
    assert "with a complete checkpoint" in refuse(run, target)
    for text in ("{", "[]", "{}", '{"format": 9, "training": {}, "checkpoints": []}'):
        (run / "state.json").write_text(text)
        assert "state.json is damaged" in refuse(run, target)


@pytest.mark.nightly
def test_what_stops_the_reading(runs, refuse, export, tmp_path, monkeypatch):
    """A run that goes on deletes old checkpoints; Ctrl-C stays Ctrl-C."""
    run, target = tmp_path / "run", tmp_path / "model"
    shutil.copytree(runs / "gpt2", run)
    monkeypatch.setattr(trained, "damaged_file", lambda path: None)
    next(run.glob("checkpoints/step-00000004/*.distcp")).unlink()
    assert "cannot be read ([Errno 2] No such file or directory" in refuse(run, target)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(FileSystemReader, "read_data", interrupt)
    with pytest.raises(KeyboardInterrupt):
        export(run, target)
    assert not target.exists()


@pytest.mark.nightly
def test_full_disk(runs, refuse, export, tmp_path):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    for limit in (500_000, 500):  # the weights do not fit, nor does config.json
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
        try:
            sentence = refuse(runs / "gpt2", tmp_path / "model")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert "could not be written" in sentence and "File too large" in sentence
    export(runs / "gpt2", tmp_path / "model")


def killed_export(run: Path, target: Path) -> None:
    def kill(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    script = load_script(SCRIPT)
    script.Path.replace = kill  # all is written, but not yet under its name
    sys.argv = ["export.py", str(run), str(target)]
    script.main()


@pytest.mark.nightly
def test_a_kill_leaves_nothing_under_the_name(runs, export, tmp_path):
    target = tmp_path / "model"
    process = server_context().Process(target=killed_export, args=(runs / "gpt2", target))
    process.start()
    assert finish(process) == -signal.SIGKILL
    assert not target.exists() and len(list(tmp_path.glob(".model-*/model/*.safetensors"))) == 1
    export(runs / "gpt2", target)
    compare(target, read_run(runs / "gpt2", "gpt2-tiny", 4))
