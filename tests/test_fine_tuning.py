"""The learning rate of fine-tuning; test_architectures.py compares losses of pretrained weights."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from common.inputs import models


@pytest.mark.check
def test_the_default_rate_is_lower_for_pretrained_weights(train, corpus, tmp_path):
    model = AutoModelForCausalLM.from_config(models.load_config("gpt2-tiny"), dtype=torch.float32)
    model.save_pretrained(tmp_path / "model")
    models.load_tokenizer("gpt2-tiny").save_pretrained(tmp_path / "model")
    few = ("-m", tmp_path / "model", "-d", corpus, "-s", 16, "--max-steps", 1, "--warmup-steps", 0)
    for args, rate in (((), 1 / 128), (("--pretrained",), 5e-5)):
        (line,) = train(*few, *args, name=f"run-{len(args)}")
        assert line["lr"] == pytest.approx(rate)
