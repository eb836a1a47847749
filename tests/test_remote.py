"""Checkpoints and data at an address, against an S3 server that the tests start on this machine.

test_failures.py has what can happen to such a run.
"""

import logging
import uuid

import pytest
from helpers import ROOT, write_corpus

from common import storage

s3fs = pytest.importorskip("s3fs", reason="needs s3fs, of the extra s3")
import fsspec  # noqa: E402

SMALL = ["-s", 32, "--global-batch-size", 6, "--max-steps", 8, "--ckpt-freq", 2, "--log-freq", 1]


@pytest.fixture
def bucket(s3) -> str:
    """Return an address of this test's own."""
    return f"s3://bucket/{uuid.uuid4().hex}"


def store() -> s3fs.S3FileSystem:
    return fsspec.filesystem("s3", use_listings_cache=False)


@pytest.mark.ci
def test_data_and_checkpoints_at_an_address(bucket, train, run_main, caplog, tmp_path):
    for name in ("train_llm", "common.tracker"):
        caplog.set_level(logging.INFO, logger=name)
    texts, data = write_corpus(tmp_path), f"{bucket}/data/corpus.json"
    store().put(str(texts), data)
    straight = train(*SMALL, "-d", texts, name="straight")
    args = (*SMALL, "-d", data, "--checkpoint-dir", f"{bucket}/runs")
    root = f"{bucket}/runs/run".removeprefix("s3://")
    for step in (0, 6):  # the second start resumes
        caplog.clear()
        found = train(*args)
        assert (f"resumed after step {step} of 8" in caplog.messages) == (step > 0)
        assert [line["step"] for line in found] == list(range(1, 9))
        assert [line["loss"] for line in found] == [line["loss"] for line in straight]
        names = {name.removeprefix(f"{root}/") for name in store().find(root)}
        files = ("settings.json", ".metadata", "__0_0.distcp")
        assert names == {f"step-0000000{step}/{file}" for step in (6, 8) for file in files}
        if not step:
            store().rm(f"{root}/step-00000008", recursive=True)
    here = {path.name for path in (tmp_path / "run").iterdir()}
    assert here == {".lock", "newest", "metrics.jsonl"}, "nothing else is on this machine"
    assert (tmp_path / "run/newest").read_text() == f"s3://{root}/step-00000008\n"
    train(*args)
    assert any("all steps of this run are done" in line for line in caplog.messages)
    sources = {"of a run": tmp_path / "run", "of an address": f"s3://{root}"}
    for name, source in {**sources, "of a folder": tmp_path / "straight"}.items():
        run_main(ROOT / "04-fsdp/export.py", source, tmp_path / name)
    exported = [path.read_bytes() for path in tmp_path.glob("of a*/model.safetensors")]
    assert len(exported) == 3 and len(set(exported)) == 1


@pytest.mark.nightly
def test_a_folder_is_fetched_once_and_again_when_it_changes(bucket):
    fs = store()
    for name, text in (("a.txt", "one"), ("deep/b.txt", "two"), (".hidden.txt", "x")):
        fs.pipe_file(f"{bucket}/{name}", text.encode())
    folder = storage.fetch(bucket)
    found = {path.relative_to(folder).as_posix(): path.read_text() for path in folder.rglob("*.*")}
    assert found == {"a.txt": "one", "deep/b.txt": "two", ".hidden.txt": "x"}
    (folder / "a.txt").write_text("not fetched again")
    assert storage.fetch(bucket) == folder and (folder / "a.txt").read_text() != "one"
    fs.pipe_file(f"{bucket}/a.txt", b"new")  # of the same size
    other = storage.fetch(bucket)
    assert other != folder and (other / "a.txt").read_text() == "new"
