"""The gallery's page: its table is what the .diff files say."""

import re

import gallery
import pytest

from common import variants

pytestmark = pytest.mark.check
PAGE = gallery.PAGE.read_text()


def test_the_table_is_made_from_the_files():
    assert gallery.fill(PAGE) == PAGE, "run make diffs"
    names = {variant.name for variant in variants.all_variants()}
    assert re.findall(r"^\| `([\w-]+)` \|", gallery.table(), re.MULTILINE) == sorted(names)
    assert gallery.MEASURED.keys() <= names


@pytest.mark.parametrize(
    ("pattern", "wrong"),
    [
        (r"^\| `zero2` .*\n", ""),
        (r"\[\+1 -1\]", "[+1 -2]"),
        (r"`hsdp`, `instruct` \|", "`zero2`, `instruct` |"),
        (r"(^\| `zero1` .*\n)", r"\1\1"),
    ],
)
def test_a_wrong_table_is_noticed(pattern, wrong):
    rotten = re.sub(pattern, wrong, PAGE, count=1, flags=re.MULTILINE)
    assert rotten != PAGE, "nothing to replace"
    assert gallery.fill(rotten) == PAGE != rotten


@pytest.mark.parametrize(
    ("ratio", "words"),
    [
        (0.991, "about as fast"),
        (1.004, "about as fast"),
        (0.9622, "4% slower"),
        (1.226, "23% faster"),
    ],
)
def test_speeds_are_compared_in_words(ratio, words):
    assert gallery.speed_in_words(ratio) == words


def test_equal_peaks_are_told_once():
    assert gallery.memory_in_words(54.51, 67.6) == "54.5 GiB instead of 67.6 GiB"
    assert gallery.memory_in_words(74.53, 74.51) == "74.5 GiB in both cases"
    assert "% tokens/s" not in gallery.table()


def test_the_table_names_what_make_refuses():
    """Also where only a variant that is needed makes a pair senseless."""
    rows = [row.split("|") for row in gallery.table().splitlines()[2:]]
    excluded = {row[1].strip(" `"): re.findall(r"`([\w-]+)`", row[5]) for row in rows}
    assert "hsdp" in excluded["tensor-parallel"] and "zero2" not in excluded["tensor-parallel"]
    with pytest.raises(variants.VariantError, match="do not go together"):
        variants.choose(5, ["hsdp", "mesh", "tensor-parallel"])
    assert variants.choose(5, ["mesh", "tensor-parallel", "zero2"])
    for name, others in excluded.items():
        assert all(name in excluded[other] for other in others), name
