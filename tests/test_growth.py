"""05-mixed-precision/growth.py: its formulas by hand, its check, and what the page shows of it."""

import json
import math
import sys
from dataclasses import replace
from xml.etree import ElementTree

import growth_chart
import growth_check
import matplotlib
import pytest
import report
from helpers import ROOT, run_script
from runner import load_script

growth = growth_check.growth
RING, TREE = growth.HOPS["ring"], growth.HOPS["tree"]
NODE = growth.Cluster(bus=100.0)  # bytes/s: slow enough that latency does not count
# Two blocks of 100 numbers, 60 others, 50 of them the embedding's; 10 s and 20 s of computing.
SMALL = growth.Work("ddp", 8, 2, 100, 60, 50, 3000.0, 10.0, 20.0, 1.0)


# --- collectives, by hand ---


@pytest.mark.check
def test_a_gather_sends_all_but_ones_own_part():
    # 8 GPUs, 800 bytes: 7/8 of them at 100 bytes/s, and 7 hops.
    assert growth.one_way(800, 8, NODE) == pytest.approx(7 + 7 * RING[0])
    assert growth.one_way(800, 1, NODE) == 0


@pytest.mark.check
def test_an_all_reduce_sends_twice_as_much():
    assert growth.all_reduce(800, 8, NODE) == pytest.approx(14 + 14 * RING[0])
    # Latency for each call, bytes for all of them together.
    five = growth.all_reduce(800, 8, NODE, calls=5)
    assert five == pytest.approx(14 + 5 * 14 * RING[0])


@pytest.mark.check
def test_over_nodes_the_ports_decide_if_they_carry_less():
    # 2 nodes of 4, all ports of a node 4 x 10 bytes/s, of which 100/450e9 arrive as on NVLink.
    two = growth.Cluster(bus=100.0, port=10.0 * growth.NVLINK / 100, node=4)
    hops = 6 * RING[0] + 1 * RING[1]
    assert growth.one_way(800, 8, two) == pytest.approx(700 / 40 + hops)
    assert growth.one_way(800, 4, two) == pytest.approx(600 / 100 + 3 * RING[0])  # within a node
    fast = replace(two, port=10 * two.port)
    assert growth.one_way(800, 8, fast) == pytest.approx(700 / 100 + hops)


@pytest.mark.check
def test_an_all_reduce_of_many_takes_the_tree():
    # 1,024 GPUs on 128 nodes: 2 (7 x 28 + 7 x 50) us; the ring has 2 (896 x 3.4 + 127 x 9.6) us.
    tree = growth.all_reduce(0, 1024, growth.Cluster(1e9))
    assert tree == pytest.approx(2 * (7 * TREE[0] + 7 * TREE[1]))
    assert tree < 2 * (896 * RING[0] + 127 * RING[1])


# --- what is exposed, by hand ---


@pytest.mark.check
def test_ddp_hides_all_but_the_embedding():
    # 210 numbers early: 840 bytes twice at 7/8, 14.7 s, beside half of the 20 s: 4.7 s are left.
    # The embedding's 200 bytes take 3.5 s.
    assert growth.exposed(SMALL, 8, NODE) == pytest.approx(4.7 + 3.5, rel=1e-3)
    long = replace(SMALL, backward=40.0)  # now all of the early ones hide
    assert growth.exposed(long, 8, NODE) == pytest.approx(3.5, rel=1e-3)
    assert growth.exposed(SMALL, 1, NODE) == 0


@pytest.mark.check
def test_fsdp_hides_what_a_block_computes():
    # A gather of a block: 2 x 100 bytes, 1.75 s; a sum: 4 x 100 bytes, 3.5 s. A block computes for
    # (1 - 6 x 50 / 3000) / 2 = 0.45 of a pass: 4.5 s and 9 s, longer than what is sent.
    work = replace(SMALL, strategy="fsdp")
    # Nothing computes beside the first block's sum, which comes last.
    root = 1.05 + 2.1
    assert growth.exposed(work, 8, NODE) == pytest.approx(1.75 + 3.5 + root, rel=1e-3)
    # Ten times as fast: 0.45 s and 0.9 s. One gather waits ahead, two gathers and sums behind.
    fast = replace(work, forward=1.0, backward=2.0)
    ahead, behind = 1.75 - 0.45, 2 * (1.75 + 3.5 - 0.9)
    assert growth.exposed(fast, 8, NODE) == pytest.approx(1.75 + root + ahead + behind, rel=1e-3)


@pytest.mark.check
def test_a_step_shards_the_update_only_with_fsdp():
    fsdp = replace(SMALL, strategy="fsdp")
    for work, update in ((SMALL, 1.0), (fsdp, 1 / 8)):
        expected = 30 + update + growth.exposed(work, 8, NODE)
        assert growth.step(work, 8, NODE) == pytest.approx(expected)
        assert growth.step(work, 8, NODE, wait=2.0) == pytest.approx(expected + 2)
    assert growth.step(SMALL, 1, NODE, wait=2.0) == 31  # nobody to wait for


@pytest.mark.check
def test_efficiency_is_passes_over_the_step():
    assert growth.efficiency(SMALL, 1, NODE) == pytest.approx(30 / 31)
    assert growth.efficiency(SMALL, 1, NODE, tokens=16) == pytest.approx(60 / 61)  # not the update


@pytest.mark.check
def test_the_smallest_batch_is_the_smallest():
    least = growth.smallest_batch(SMALL, 8, NODE, 0.9)
    assert growth.efficiency(SMALL, 8, NODE, least) >= 0.9
    assert growth.efficiency(SMALL, 8, NODE, least - 1) < 0.9


@pytest.mark.check
def test_most_gpus_keep_a_sequence_each():
    free = growth.Cluster(bus=math.inf, port=math.inf, node=2**30)
    work = replace(SMALL, update=0.0, forward=1e9, backward=2e9)
    assert growth.most_gpus(work, 1024, 16, free, 0.9) == 64
    slow = growth.most_gpus(SMALL, 64, 1, NODE, 0.9)
    assert growth.efficiency(SMALL, slow, NODE, 64 / slow) >= 0.9
    assert growth.efficiency(SMALL, 2 * slow, NODE, 32 / slow) < 0.9


@pytest.mark.check
@pytest.mark.parametrize(
    ("name", "blocks", "block", "late", "whole"),
    [
        # 12 d^2 + 13 d for each block; positions and the last norm are the rest.
        ("gpt2", 12, 12 * 768**2 + 13 * 768, 50304 * 768, 124_475_904),
        # 2 d^2 + 2 d x 1024 for attention, 3 d x 14336 for the MLP, two norms.
        ("llama-3.1-8b", 32, 2 * 4096**2 + 2 * 4096 * 1024 + 3 * 4096 * 14336 + 2 * 4096,
            128256 * 4096, 8_030_261_248),
    ],
)  # fmt: skip
def test_parameters_of_a_preset(name, blocks, block, late, whole):
    work = growth.work_of("ddp", name, 1024, 1024, 1.0, 2.0, 0.1)
    assert (work.layers, work.layer, work.embedding) == (blocks, block, late)
    assert work.layers * work.layer + work.root == whole


# --- planted bugs ---

TESTS = [
    test_a_gather_sends_all_but_ones_own_part,
    test_an_all_reduce_sends_twice_as_much,
    test_over_nodes_the_ports_decide_if_they_carry_less,
    test_an_all_reduce_of_many_takes_the_tree,
    test_ddp_hides_all_but_the_embedding,
    test_fsdp_hides_what_a_block_computes,
    test_a_step_shards_the_update_only_with_fsdp,
    test_efficiency_is_passes_over_the_step,
    test_the_smallest_batch_is_the_smallest,
    test_most_gpus_keep_a_sequence_each,
]


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("(n - 1) / n * size", "size"),
        ("(nodes - 1) * HOPS", "nodes * HOPS"),
        ("min(n, cluster.node) * cluster.port", "cluster.port"),
        ("return 2 * one_way(size", "return one_way(size"),
        ("calls * min(ring, tree)", "min(ring, tree)"),
        ("min(ring, tree)", "ring"),
        ("max(0.0, sent - hidden)", "sent"),
        (" + all_reduce(4 * work.embedding, n, cluster)", ""),
        ("(work.layers - 1) / work.layers", "1"),
        ("gather + scatter - share", "gather - share"),
        ("1 - 6 * work.embedding / work.flops", "1"),
        ("return root + gather", "return root"),
        ('n if work.strategy == "fsdp" else 1', "1"),
        ("wait * (n > 1)", "wait"),
        ("backward=part * work.backward", "backward=work.backward"),
        ("and batch / n >= length", ""),
    ],
)
def test_planted_bug(right, wrong, tmp_path, monkeypatch):
    text = (ROOT / "05-mixed-precision/growth.py").read_text()
    assert text.count(right) == 1
    script = tmp_path / "growth.py"
    script.write_text(text.replace(right, wrong))
    bad = load_script(script)
    monkeypatch.setattr(sys.modules[__name__], "growth", bad)
    monkeypatch.setattr(sys.modules[__name__], "NODE", bad.Cluster(bus=100.0))
    red = 0
    for test in TESTS:
        try:
            test()
        except (AssertionError, ValueError):
            red += 1
    assert red


# --- the check and the page ---


def read_inputs() -> dict:
    return json.loads((ROOT / "05-mixed-precision/growth.json").read_text())


def test_the_committed_file_is_of_todays_formulas_and_files():
    found, inputs = report.content(ROOT / report.result("growth")), read_inputs()
    cluster = growth.Cluster(growth_check.measured_bus())
    assert inputs["bus"] == pytest.approx(cluster.bus)
    stale = f"run python tests/benchmarks/growth_check.py --output {report.result('growth')}"
    for row, now in zip(found["checks"], growth_check.checks(cluster), strict=True):
        assert row == pytest.approx(now), stale
    now = growth_check.paper(cluster.bus, inputs["works"])
    for row, each in zip(found["paper"], now, strict=True):
        assert row == pytest.approx(each), stale
    for title, each in growth_check.works().items():
        kept = inputs["works"][title]
        assert kept["work"] == pytest.approx(each["work"]), stale
        assert kept["from"] == each["from"], stale
    assert found["limits"] == growth_check.limits(cluster.bus, inputs["works"]), stale


@pytest.mark.check
def test_the_bus_is_what_the_page_of_chapter_2_says():
    assert growth_check.measured_bus() == pytest.approx(345e9, rel=0.03)


@pytest.mark.check
def test_a_series_is_fitted_on_two_gpus_and_predicts_the_others():
    def row(ms: float) -> dict:
        return {"median": {"time/total": ms}}

    cluster = growth.Cluster(bus=1e15)  # nothing to send: only the wait is left
    rows = {1: row(31_000), 2: row(33_000), 4: row(34_000)}
    two, four = growth_check.series(cluster, "file", "label", SMALL, rows)
    assert two["ideal_ms"] == pytest.approx(31_000, rel=1e-4) and "with_wait_ms" not in two
    assert four["with_wait_ms"] == pytest.approx(33_000, rel=1e-4)
    assert four["measured_ms"] == 34_000


@pytest.mark.check
def test_what_the_page_says_of_the_check():
    rows = report.content(ROOT / report.result("growth"))["checks"]
    off = {
        (row["source"], row["label"][:9], row["gpus"]): {
            key: row[key] / row["measured_ms"] - 1 for key in row if key.endswith("_ms")
        }
        for row in rows
    }
    ddp = [each for (source, _, _), each in off.items() if source == "ddp_gpu"]
    assert all(abs(each["with_wait_ms"]) < 0.0065 for each in ddp if "with_wait_ms" in each)
    assert all(-0.07 < each["ideal_ms"] < 0.02 for each in off.values())


@pytest.mark.ci
def test_script_prints_what_the_file_has():
    out = run_script("05-mixed-precision/growth.py").stdout
    found = report.content(ROOT / report.result("growth"))["paper"]
    for row in found:
        if row["network"] in ("within a node", "400 Gbit/s per GPU"):
            assert f"{row['tokens_per_s']:,.0f}" in out
            assert f"{row['smallest_batch']:,}" in out


def test_figure_is_drawn_from_the_file(tmp_path):
    inputs = read_inputs()
    chart = tmp_path / "growth.svg"
    growth_check.draw(inputs["bus"], inputs["works"], chart)
    assert ElementTree.fromstring(chart.read_text()).tag.endswith("svg")
    again = tmp_path / "again.svg"
    growth_check.draw(inputs["bus"], inputs["works"], again)
    assert chart.read_text() == again.read_text()
    assert growth_check.FIGURE.exists()


def test_mfu_of_what_is_computed_leaves_out_pairs_and_positions():
    """One block, 8 wide, 16 positions: 12 x 8 x 16 for attention, 6 x 8 x 16 looked up."""
    row = {"preset": "gpt2", "command": "train_llm.py -s 16 -b 1", "runs": [None, {"mfu": 0.5}]}
    row["shape"] = {"n_layer": 1, "n_embd": 8, "n_positions": 16}
    assert report.causal_mfu(row, 1000) == pytest.approx(0.5 * (6000 - 768 + 768) / (6000 + 1536))
    row |= {"preset": "llama-3.1-8b"}
    row["shape"] = {"num_hidden_layers": 1, "hidden_size": 8, "vocab_size": 10}
    assert report.causal_mfu(row, 1080) == pytest.approx(0.5 * (6000 + 768) / (6000 + 1536))


def test_the_figure_of_what_was_measured_is_of_todays_files(tmp_path, monkeypatch):
    committed = (growth_check.FIGURE.parent / "growth_measured.svg").read_text()
    if f"Matplotlib v{matplotlib.__version__}," not in committed:
        pytest.skip("another matplotlib drew the figure")
    chart = tmp_path / "chart.svg"
    growth_chart.draw(chart)
    assert chart.read_text() == committed
    monkeypatch.setattr(growth_chart, "GPU_GIB", 80)
    growth_chart.draw(chart)
    assert chart.read_text() != committed
