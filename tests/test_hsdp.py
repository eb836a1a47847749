"""Weights sharded within each node and replicated over the nodes: --hsdp on two nodes of two ranks.

Two launchers on one machine are two nodes, as far as torchrun and the script are concerned.
"""

import re
import signal
import subprocess
from collections import defaultdict
from pathlib import Path

import pytest
from cluster import PATIENCE_S
from helpers import (
    ROOT,
    TWO_BY_TWO,
    Ladder,
    Run,
    assert_chapter_1,
    assert_same_losses,
    environment,
    first_then_nightly,
    free_port,
    newest_step,
    register,
    run_on_nodes,
    selected_runs,
)
from jobs import NODES, PAUSE, Lab, note_samples
from runner import finish, start
from torch.distributed.checkpoint import FileSystemReader

CHAPTER = "04-fsdp"
JOB = "04-fsdp/job.sbatch"


def read_layout(run_dir: Path) -> dict[str, list[tuple[int, list[int], int]]]:
    """Return the parts of each weight in a run's newest checkpoint, in order.

    Each is (first row, shape, rank that wrote it). Of ranks that hold the same, one writes it.
    """
    path = run_dir / f"checkpoints/step-{newest_step(run_dir):08d}"
    saved = FileSystemReader(path).read_metadata()
    writers = {}
    for index, stored in saved.storage_data.items():
        if index.offset is not None:
            writers[index.fqn, index.offset] = int(stored.relative_path.split("_")[2])
    layout = defaultdict(list)
    for name, tensor in saved.state_dict_metadata.items():
        if name.startswith("model."):
            for part in tensor.chunks:
                writer = writers[name, part.offsets]
                layout[name].append((part.offsets[0], [*part.sizes], writer))
    return {name: sorted(parts) for name, parts in layout.items()}


def assert_sharded_within_nodes(run_dir: Path) -> None:
    """Two parts of each weight: the first on the first ranks of the nodes, the other on the second.

    Both nodes write some: were the parts on one node only, the other one would have nothing.
    """
    layout = read_layout(run_dir)
    assert len(layout) > 10
    writers = defaultdict(set)
    for name, parts in layout.items():
        assert len(parts) == 2, f"{name} is in {len(parts)} parts"
        (first, above, _), (second, below, _) = parts
        rows = above[0] + below[0]
        assert (first, second) == (0, above[0]) and above[0] == -(-rows // 2), name
        assert above[1:] == below[1:]
        for half, (_, _, writer) in enumerate(parts):
            writers[half].add(writer)
    assert dict(writers) == {0: {0, 2}, 1: {1, 3}}, "the parts are not where they should be"


@pytest.fixture(scope="module")
def ladder(request, make_folder) -> Ladder:
    """On two nodes, whatever the number of ranks."""
    places = {
        2 * n: 2 * [{"LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": n} for rank in range(n)]
        for n in (1, 2, 3)
    }
    chosen = selected_runs(request)
    return Ladder(make_folder("hsdp"), chosen, model="gpt2-narrow", places=places)


def alone(ladder: Ladder) -> str:
    return ladder.alone("-m", "gpt2-narrow", "-b", 24)


@pytest.mark.ci
def test_two_launchers_on_one_machine_are_two_nodes(ladder):
    env = environment(HEAD=f"localhost:{free_port()}", NNODES=2, NPROC_PER_NODE=2)
    words = ["bash", ROOT / "04-fsdp/launch.sh", *ladder.flags("launchers", "-b", 6, "--hsdp")]
    nodes = [subprocess.Popen([str(word) for word in words], env=env) for _ in range(2)]
    assert [node.wait(PATIENCE_S) for node in nodes] == [0, 0]
    assert_same_losses(ladder.metrics(alone(ladder)), ladder.metrics("launchers"))
    assert_sharded_within_nodes(ladder.folder / "launchers")


def assert_two_dimensions(ladder: Ladder, run: Run) -> None:
    """The training of chapter 1, and the parts of the weights are within each node."""
    layout = read_layout(ladder.folder / ladder.run(run))
    for name, parts in layout.items():
        assert len(parts) == run.world_size // 2, f"{name} is in {len(parts)} parts"
    if run.world_size == 4:
        assert_sharded_within_nodes(ladder.folder / run.name)
    assert_chapter_1(ladder, run)


def two_dimensions(world_size: int, *args: object, bug: tuple[str, str] | None = None) -> Run:
    return Run(CHAPTER, world_size, ("-b", 4, "--hsdp", *args), (bug,) if bug else ())


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
SYNC = "model.set_requires_gradient_sync(last_backward or args.reduce_every_backward)"
# By name: what must be red, and what is replaced in the script.
BUGS = {
    "never averaged over nodes": ("the loss differ", (MESH, f'{MESH}["shard"]')),
    "nodes and ranks swapped": (
        "the parts are not where",
        (
            MESH,
            "mesh = mesh_of_nodes(device); names = mesh.mesh_dim_names; "
            "sharding['mesh'] = type(mesh)('cpu', mesh.mesh.T, mesh_dim_names=names)",
        ),
    ),
    "one dimension": ("is in 4 parts", ("if args.hsdp:", "if False:")),
    "a block without the second sum": (  # FSDP then gives it no gradients at all
        "the loss differ",
        (SYNC, f"{SYNC}; layers[0].set_requires_all_reduce(False)"),
    ),
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
    ("chapter", "nodes"),
    [
        pytest.param(CHAPTER, (0, 1), marks=pytest.mark.ci, id="one node"),
        pytest.param(CHAPTER, TWO_BY_TWO, marks=pytest.mark.nightly, id="two nodes"),
        pytest.param("01-single-gpu", (0,), marks=pytest.mark.nightly, id="chapter 1"),
    ],
)
def test_a_run_that_was_stopped_goes_on_anywhere(ladder, chapter, nodes):
    """One rank is told to stop after step 7, all of them save; the rest is trained elsewhere."""
    name = f"stopped-{chapter}-{len(nodes)}"
    signals = [None, None, None, (7, [signal.SIGUSR1])]
    stderr = [str(ladder.folder / f"{name}-{rank}.stderr") for rank in range(4)]
    options = {"chapter": CHAPTER, "signals_after_steps": signals, "stderr_file": stderr}
    flags = ladder.flags(name, "-b", 4)
    assert run_on_nodes(TWO_BY_TWO, [*flags, "--hsdp"], **options) == [75] * 4
    assert "Told to stop; saved after step 7" in Path(stderr[0]).read_text()
    assert_sharded_within_nodes(ladder.folder / name)
    args = ["--hsdp"] if nodes == TWO_BY_TWO else []
    assert run_on_nodes(nodes, [*flags, *args], chapter=chapter) == [0] * len(nodes)
    assert_same_losses(ladder.metrics(alone(ladder)), ladder.metrics(name))


# --- on a cluster ---


@pytest.fixture(scope="module")
def lab(cluster, make_folder) -> Lab:
    """With chapter 1's run."""
    lab = Lab(cluster, make_folder("hsdp-lab"))
    notes = {"NOTES": lab.environment("straight")["NOTES"]}
    assert finish(start(lab.flags("straight"), env=notes, plant=note_samples)) == 0
    return lab


@pytest.mark.nightly
def test_same_losses_on_two_nodes_of_two_ranks(lab):
    """Told to stop, the job saves, goes back to the queue, and goes on when it starts again."""
    job = lab.submit(JOB, "hsdp", "--hsdp", PAUSE=PAUSE)
    lab.wait_for_step("hsdp", 10)
    lab.cluster.shell("scancel", "--signal=USR1", job)
    assert lab.ends(job) == "COMPLETED", lab.log("hsdp")
    assert lab.cluster.job(job)["Restarts"] == "1"
    assert len(lab.stops("hsdp")) == 1
    lab.assert_same("hsdp", "straight", exact=False)
    norms = [[line["grad_norm"] for line in lab.metrics(name)] for name in ("hsdp", "straight")]
    assert norms[0] == pytest.approx(norms[1], rel=1e-3)
    assert lab.hosts("hsdp") == sorted(4 * NODES)
    assert_sharded_within_nodes(lab.folder / "hsdp")
    # torchrun's folders of logs say on which node a rank was.
    logs = lab.folder.glob("hsdp/logs/*/*/attempt_0/*/stderr.log")
    nodes = {path.parts[-5]: path.parent.name for path in logs if "step 24/24" in path.read_text()}
    assert nodes == {"node1": "0"}, "rank 0 is the first one of the first node"
    assert f"to resume it after a stop: sbatch {JOB} " in lab.log("hsdp")


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
