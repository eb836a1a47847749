"""Chapter 1's GPT-2 in plain PyTorch: logits, loss and gradients are those of transformers."""

import shutil
from pathlib import Path
from types import ModuleType

import pytest
import torch
from helpers import ROOT, register, replace_in, write_corpus, write_narrow
from runner import load_script
from transformers import AutoConfig, AutoModelForCausalLM

SCRIPT = ROOT / "01-single-gpu/model_by_hand.py"
TRANSPOSED = ("c_attn.weight", "c_proj.weight", "c_fc.weight")
BUGS = {
    "a position sees later tokens": ("is_causal=True", "is_causal=False"),
    "labels are not shifted": ("(0, 1), value=-100)[:, 1:]", "(0, 1), value=-100)[:, :-1]"),
}
for bug in BUGS.values():
    register(SCRIPT, [bug])


def narrow_model(folder: Path) -> torch.nn.Module:
    """Return a model of transformers in which no bias is 0 and no gain of a norm is 1."""
    shape = {"n_layer": 3, "n_head": 4, "vocab_size": 512}
    config = AutoConfig.from_pretrained(write_narrow(folder / "narrow", "gpt2", **shape))
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return model


def assert_same(module: ModuleType, theirs: torch.nn.Module) -> None:
    ours = module.GPT2(theirs.config)
    ours.load(theirs.state_dict())
    ids = torch.randint(theirs.config.vocab_size, (2, 20))
    expected = theirs(input_ids=ids, labels=ids)
    torch.testing.assert_close(ours(ids), expected.logits, rtol=1e-4, atol=1e-4)
    loss = ours(ids, ids)
    torch.testing.assert_close(loss, expected.loss)
    loss.backward()
    expected.loss.backward()
    assert {name for name, _ in ours.named_parameters()} == dict(theirs.named_parameters()).keys()
    for name, parameter in ours.named_parameters():
        gradient = theirs.get_parameter(name).grad
        gradient = gradient.T if name.endswith(TRANSPOSED) else gradient
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-3, atol=1e-5)


def test_logits_loss_and_gradients(tmp_path):
    assert_same(load_script(SCRIPT), narrow_model(tmp_path))


@pytest.mark.parametrize("bug", BUGS)
def test_planted_mistakes_change_them(tmp_path, bug):
    replace_in(Path(shutil.copy(SCRIPT, tmp_path)), *BUGS[bug])
    with pytest.raises(AssertionError):
        assert_same(load_script(tmp_path / SCRIPT.name), narrow_model(tmp_path))


def test_starts_from_weights_of_the_same_spread(tmp_path):
    config = narrow_model(tmp_path).config
    theirs, ours = AutoModelForCausalLM.from_config(config), load_script(SCRIPT).GPT2(config)
    for name, parameter in ours.named_parameters():
        expected = theirs.get_parameter(name)
        spread = pytest.approx(expected.std().item(), rel=0.1, abs=1e-6)
        assert parameter.std().item() == spread, name
        assert parameter.mean().item() == pytest.approx(expected.mean().item(), abs=0.01), name


def test_loads_a_run(tmp_path, train, run_main, refuse):
    few = ("-d", write_corpus(tmp_path), "-s", 32, "--max-steps", 2)
    train(*few, name="ours")
    out, _ = run_main(SCRIPT, tmp_path / "ours", "--prompt", "Text number")
    text, difference = out.rsplit("largest difference to the logits of transformers: ", 1)
    assert text.startswith("Text number") and float(difference) < 1e-3
    train(*few, "-m", "llama-tiny", name="other")
    assert "is a llama: give a GPT-2" in refuse(SCRIPT, tmp_path / "other")
