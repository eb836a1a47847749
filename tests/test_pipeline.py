"""03-multi-node/pipeline.sbatch: tokenizer, training, evaluation, export, a sample as one job."""

import json

import pytest
import torch
from jobs import Lab
from transformers import AutoModelForCausalLM, AutoTokenizer

pytestmark = pytest.mark.ci
JOB = "03-multi-node/pipeline.sbatch"
COMMENT = "our own words, first try"
RESULTS = ("tokenizer", "evaluation.json", "model", "samples.jsonl")


@pytest.fixture(scope="module")
def lab(cluster, make_folder) -> Lab:
    return Lab(cluster, make_folder("pipeline"))


def submit(lab: Lab, name: str, *args: object, **env: object) -> str:
    own = {"VOCAB_SIZE": 300, "PROMPT": "Text number 7", "NPROC_PER_NODE": 1, **env}
    return lab.submit(JOB, name, *args, options=("--comment", COMMENT), **own)


def assert_whole(lab: Lab, name: str) -> None:
    """All results are there, of one model, and that of the last step."""
    run = lab.folder / name
    assert [line["step"] for line in lab.metrics(name)] == list(range(1, 25))
    tokenizer = AutoTokenizer.from_pretrained(run / "tokenizer")
    assert len(tokenizer) == 300
    model = AutoModelForCausalLM.from_pretrained(run / "model")
    assert AutoTokenizer.from_pretrained(run / "model").get_vocab() == tokenizer.get_vocab()
    found = json.loads((run / "evaluation.json").read_text())
    assert found["origin"].startswith("step 24 of ")
    assert found["loss"] == pytest.approx(lab.metrics(name)[-1]["eval_loss"], rel=1e-5)
    (sample,) = map(json.loads, (run / "samples.jsonl").read_text().splitlines())
    assert sample["prompt"] == "Text number 7" and sample["text"]
    ids = tokenizer("Text number 7", return_tensors="pt").input_ids
    assert torch.isfinite(model(ids).logits).all()


def test_from_text_to_a_sample(lab):
    """Stopped in its training it goes on. Once more: what is done stays done.

    Each start adds its comment.
    """
    job = submit(lab, "whole", PAUSE=0.3)
    lab.wait_for_step("whole", 6)
    lab.cluster.shell("scancel", "--signal=USR1", job)
    assert lab.ends(job) == "COMPLETED", lab.log("whole")
    assert lab.cluster.job(job)["Restarts"] == "1"
    assert "The run resumes when the job starts again." in lab.log("whole")
    assert_whole(lab, "whole")
    line, _ = (lab.folder / "whole/comments.txt").read_text().splitlines()
    assert f" job {job}: {COMMENT} (-e whole " in line
    before = {name: (lab.folder / "whole" / name).stat().st_mtime_ns for name in RESULTS}
    (lab.folder / "whole/samples.jsonl").unlink()
    job = submit(lab, "whole")
    assert lab.ends(job) == "COMPLETED", lab.log("whole")
    after = {name: (lab.folder / "whole" / name).stat().st_mtime_ns for name in RESULTS}
    assert {name for name in RESULTS if before[name] != after[name]} == {"samples.jsonl"}
    assert len((lab.folder / "whole/comments.txt").read_text().splitlines()) == 3


def test_weights_that_exist_keep_their_tokenizer(lab):
    """The model of the first run goes on, in a run of another name."""
    job = submit(lab, "further", "-m", lab.folder / "whole/model", "--pretrained")
    assert lab.ends(job) == "COMPLETED", lab.log("further")
    assert not (lab.folder / "further/tokenizer").exists()
    kept = AutoTokenizer.from_pretrained(lab.folder / "further/model").get_vocab()
    assert kept == AutoTokenizer.from_pretrained(lab.folder / "whole/tokenizer").get_vocab()
    assert lab.metrics("further")[0]["loss"] < lab.metrics("whole")[0]["loss"] - 0.1


def test_arguments_that_not_all_steps_would_see(lab):
    """As a tokenizer of one text for the training on another."""
    job = submit(lab, "attached", f"-d{lab.folder}/corpus.json")
    assert lab.ends(job) == "FAILED"
    assert "write -d NAME and -m NAME as two words, and no @file" in lab.log("attached")
    assert not (lab.folder / "attached").exists()


def test_a_step_that_fails_ends_the_job(lab):
    """A text that is not there: one sentence, and nothing is trained."""
    job = submit(lab, "nothing", "-d", lab.folder / "gone.json")
    assert lab.ends(job) == "FAILED"
    assert "gone.json" in lab.log("nothing")
    assert not (lab.folder / "nothing/tokenizer").exists()
    assert lab.metrics("nothing") == []
