"""The formulas for activation memory in chapter 4's reference are what peak_memory.py counts."""

import re

import pytest
from helpers import ROOT

from common.inputs.models import load_config

from peak_memory import Options, count_activations

pytestmark = pytest.mark.check
PAGE = (ROOT / "04-fsdp/reference.md").read_text()
ROWS = re.findall(r"^\| `(none|selective|full)` \| (.+?) \| (.+?) \|$", PAGE, re.M)


def sizes(name: str, config) -> dict[str, int]:
    """Return the values of the formulas' letters."""
    d, h = config.hidden_size, config.num_attention_heads
    if name == "gpt2-tiny":
        return {"d": d, "h": h}
    k = config.num_key_value_heads * config.head_dim
    return {"d": d, "h": h, "k": k, "f": config.intermediate_size}


@pytest.mark.parametrize(("checkpointing", "gpt2", "llama"), ROWS)
def test_a_layer_saves_what_the_page_says(checkpointing, gpt2, llama):
    for name, formula in {"gpt2-tiny": gpt2, "llama-tiny": llama}.items():
        config = load_config(name)
        config.num_hidden_layers = 5
        options = Options(sharding="fsdp", batch_size=2, seq_length=128, precision="bf16")
        options = Options(**vars(options) | {"activation_checkpointing": checkpointing})
        *_, phases = count_activations(config, options, "layer")
        peaks = {layer: size for phase, layer, size in phases if phase == "forward"}
        saved = (peaks[4] - peaks[3]) / (options.batch_size * options.seq_length)
        expression = re.sub(r"(\d)([a-z])", r"\1 * \2", formula)
        assert eval(expression, sizes(name, config)) == pytest.approx(saved, rel=0.01), name


def test_the_page_has_a_formula_for_each_way():
    assert [row[0] for row in ROWS] == ["none", "selective", "full"]
