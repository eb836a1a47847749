"""Weights sharded within each node and replicated over the nodes: --hsdp on two nodes of two ranks.

Two launchers on one machine are two nodes, as far as torchrun and the script are concerned.
"""

import contextlib
import json
import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from cluster import PATIENCE_S
from helpers import (
    ROOT,
    Ladder,
    Run,
    assert_chapter_1,
    assert_same_losses,
    environment,
    first_then_nightly,
    free_port,
    newest_step,
    register,
    selected_runs,
)
from runner import Ranks
from torch.distributed.checkpoint import FileSystemReader
from torch.optim.optimizer import register_optimizer_step_post_hook

CHAPTER = "04-fsdp"
# By the number of ranks, which are on two nodes: the place of each rank.
PLACES = {
    2 * n: 2 * [{"LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": n} for rank in range(n)] for n in (1, 2, 3)
}


def parts_of_weights(run_dir: Path) -> set[int]:
    """Return in how many parts weights are in a run's newest checkpoint."""
    path = run_dir / f"checkpoints/step-{newest_step(run_dir):08d}"
    saved = FileSystemReader(path).read_metadata().state_dict_metadata
    return {len(tensor.chunks) for name, tensor in saved.items() if name.startswith("model.")}


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
    chosen = selected_runs(request)
    return Ladder(make_folder("hsdp"), chosen, model="gpt2-narrow", places=PLACES)


def alone(ladder: Ladder) -> str:
    return ladder.alone("-m", "gpt2-narrow", "-b", 24)


@pytest.mark.ci
def test_two_launchers_on_one_machine_are_two_nodes(ladder):
    env = environment(HEAD=f"localhost:{free_port()}", NNODES=2, NPROC_PER_NODE=2)
    words = ["bash", ROOT / "04-fsdp/launch.sh", *ladder.flags("launchers", "-b", 6, "--hsdp")]
    nodes = [subprocess.Popen([str(word) for word in words], env=env) for _ in range(2)]
    assert [node.wait(PATIENCE_S) for node in nodes] == [0, 0]
    assert_same_losses(ladder.metrics(alone(ladder)), ladder.metrics("launchers"))
    assert parts_of_weights(ladder.folder / "launchers") == {2}


def assert_two_dimensions(ladder: Ladder, run: Run) -> None:
    """The training of chapter 1, and the parts of the weights are within each node."""
    ladder.run(run)
    n = run.world_size // 2
    for notes in ladder.notes(run):
        mesh, *placements = json.loads(Path(notes).read_text())
        assert mesh == [[*range(n)], [*range(n, 2 * n)]], "the nodes are others"
        assert placements == ["Replicate()", "Shard(dim=0)"]
    assert parts_of_weights(ladder.folder / run.name) == {n}
    assert_chapter_1(ladder, run)


def two_dimensions(world_size: int, *args: object, bug: tuple[str, str] | None = None) -> Run:
    return Run(CHAPTER, world_size, ("-b", 4, "--hsdp", *args), (bug,) if bug else (), note_mesh)


@pytest.mark.parametrize(
    "run",
    first_then_nightly(
        [
            two_dimensions(4, "--reduce-every-backward", "--no-reshard-after-forward"),
            two_dimensions(4, "--cpu-offload", "--activation-checkpointing", "selective"),
            two_dimensions(2),
            two_dimensions(6),
        ]
    ),
    ids=["2 x 2, other traffic", "2 x 2, less memory", "2 x 1", "2 x 3"],
)
def test_same_training_in_two_dimensions(ladder, run):
    assert_two_dimensions(ladder, run)


MESH = 'sharding["mesh"] = mesh_of_nodes(device)'
# By name: what must be red, and what is replaced in the script.
BUGS = {
    "never averaged over nodes": ("the nodes are others", (MESH, f'{MESH}["shard"]')),
    "nodes and ranks swapped": (
        "the nodes are others",
        (
            MESH,
            "mesh = mesh_of_nodes(device); names = mesh.mesh_dim_names; "
            "sharding['mesh'] = type(mesh)('cpu', mesh.mesh.T, mesh_dim_names=names)",
        ),
    ),
    "one dimension": ("the nodes are others", ("if args.hsdp:", "if False:")),
}
for _, bug in BUGS.values():
    register(CHAPTER, [bug])


@pytest.mark.parametrize(
    ("red", "run"), [(red, two_dimensions(4, bug=bug)) for red, bug in BUGS.values()], ids=BUGS
)
def test_planted_bug_is_noticed(ladder, red, run):
    with pytest.raises(AssertionError, match=red):
        assert_two_dimensions(ladder, run)


@pytest.mark.parametrize(
    ("chapter", "ranks", "args", "places"),
    [
        pytest.param(CHAPTER, 2, (), {}, marks=pytest.mark.ci, id="one node"),
        pytest.param(CHAPTER, 4, ("--hsdp",), PLACES[4], marks=pytest.mark.nightly, id="two nodes"),
        pytest.param("01-single-gpu", 1, (), {}, marks=pytest.mark.nightly, id="chapter 1"),
    ],
)
def test_a_run_that_was_stopped_goes_on_anywhere(ladder, chapter, ranks, args, places):
    """One rank is told to stop after step 7, all of them save; the rest is trained elsewhere."""
    name = f"stopped-{chapter}-{ranks}"
    signals = [None, None, None, (7, [signal.SIGUSR1])]
    stderr = [str(ladder.folder / f"{name}-{rank}.stderr") for rank in range(4)]
    options = {"chapter": CHAPTER, "signals_after_steps": signals, "stderr_file": stderr}
    flags = ladder.flags(name, "-b", 4)
    assert Ranks(4, [*flags, "--hsdp"], env=PLACES[4], **options).finish() == [75] * 4
    assert "Told to stop; saved after step 7" in Path(stderr[0]).read_text()
    assert parts_of_weights(ladder.folder / name) == {2}
    resumed = Ranks(ranks, [*flags, *args], chapter=chapter, env=places)
    assert resumed.finish() == [0] * ranks
    assert_same_losses(ladder.metrics(alone(ladder)), ladder.metrics(name))


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
        assert body.count(file.parent.name) == 2 and "srun" not in body
