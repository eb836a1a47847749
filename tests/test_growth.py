"""05-mixed-precision/growth.py: its formulas by hand, its result file and its figures."""

import json
from dataclasses import replace

import growth_check
import matplotlib
import pytest
import report
from helpers import ROOT

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


# --- result files and figures ---


@pytest.mark.check
def test_the_committed_file_is_of_todays_formulas():
    found = report.content(ROOT / report.result("growth"))
    inputs = json.loads((ROOT / "05-mixed-precision/growth.json").read_text())
    bus = inputs["bus"]
    stale = f"run python tests/benchmarks/growth_check.py --output {report.result('growth')}"
    for row, now in zip(found["paper"], growth_check.paper(bus, inputs["works"]), strict=True):
        assert row == pytest.approx(now), stale
    for row, now in zip(found["limits"], growth_check.limits(bus, inputs["works"]), strict=True):
        assert row == pytest.approx(now), stale


@pytest.mark.check
def test_the_figure_is_of_todays_files_and_formulas(tmp_path):
    committed = growth_check.FIGURE.read_text()
    if f"Matplotlib v{matplotlib.__version__}," not in committed:
        pytest.skip("another matplotlib drew the figure")
    chart = tmp_path / "chart.svg"
    inputs = json.loads((ROOT / "05-mixed-precision/growth.json").read_text())
    growth_check.draw(inputs["bus"], inputs["works"], chart)
    assert chart.read_text() == committed
