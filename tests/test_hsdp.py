"""Weights sharded within each node and replicated over the nodes: hsdp on two nodes of two ranks.

What a launcher tells each rank makes it a node. test_resume_ranks.py resumes such runs.
"""

import contextlib
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from helpers import ROOT, Ladder, Run, assert_chapter_1, first_then_nightly, register, selected_runs
from torch.optim.optimizer import register_optimizer_step_post_hook

CHAPTER = "04-fsdp"
# By the number of ranks, which are on two nodes: the place of each rank.
PLACES = {
    2 * n: 2 * [{"LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": n} for rank in range(n)] for n in (1, 2)
}


@contextlib.contextmanager
def note_mesh(path: str) -> Iterator[None]:
    """Note the ranks on which the weights are, by node, and how they are placed there."""

    def write(optimizer: torch.optim.Optimizer, *_: object) -> None:
        weight = optimizer.param_groups[0]["params"][0]
        found = [weight.device_mesh.mesh.tolist(), *map(repr, weight.placements)]
        Path(path).write_text(json.dumps(found))

    handle = register_optimizer_step_post_hook(write)
    yield
    handle.remove()


@pytest.fixture(scope="module")
def ladder(request, make_folder) -> Ladder:
    return Ladder(make_folder("hsdp"), selected_runs(request), model="gpt2-narrow", places=PLACES)


def assert_two_dimensions(ladder: Ladder, run: Run) -> None:
    """The training of chapter 1, and the parts of the weights are within each node."""
    ladder.run(run)
    n = run.world_size // 2
    for notes in ladder.notes(run):
        mesh, *placements = json.loads(Path(notes).read_text())
        assert mesh == [[*range(n)], [*range(n, 2 * n)]], "the nodes are others"
        assert placements == ["Replicate()", "Shard(dim=0)"]
    assert_chapter_1(ladder, run)


def two_dimensions(world_size: int, *variants: str, replaced: tuple = ()) -> Run:
    return Run(CHAPTER, world_size, ("-b", 4), replaced, note_mesh, ("hsdp", *variants))


@pytest.mark.parametrize(
    "run",
    first_then_nightly(
        [
            two_dimensions(4, "reduce-every-backward", "zero2"),
            two_dimensions(4, "cpu-offload", "selective-recomputation"),
            two_dimensions(2),
        ]
    ),
    ids=["2 x 2, other traffic", "2 x 2, less memory", "2 x 1"],
)
def test_same_training_in_two_dimensions(ladder, run):
    assert_two_dimensions(ladder, run)


MESH = "dist.get_backend_config()),  # as for all ranks\n    )"
NOT_AVERAGED = ((MESH, f'{MESH}["shard"]'),)
register(CHAPTER, NOT_AVERAGED, ["hsdp"])


@pytest.mark.parametrize("run", [two_dimensions(4, replaced=NOT_AVERAGED)], ids=[""])
def test_planted_weights_that_are_never_averaged_over_nodes(ladder, run):
    with pytest.raises(AssertionError, match=r"^the nodes are others"):
        assert_two_dimensions(ladder, run)


@pytest.mark.check
def test_every_chapter_asks_slurm_for_the_same():
    """What a later chapter's job file does not take over from chapter 3's, it repeats."""
    files = sorted(ROOT.glob("[0-9]*/job.sbatch"))
    assert len(files) > 1
    asked = [re.findall("^#+SBATCH .*", file.read_text(), re.MULTILINE) for file in files]
    assert all(lines == asked[0] for lines in asked) and len(asked[0]) == 10
    for file in files[1:]:
        body = file.read_text().partition("\nset -euo pipefail\n")[2]
        assert body.endswith("\nsource 03-multi-node/job.sbatch\n")
        assert body.count(file.parent.name) == 1 and "srun" not in body
