"""The variant document-mask: the same losses as one document at a time."""

import pytest
import torch
from helpers import (
    CHAPTERS,
    Ladder,
    Run,
    assert_same_losses,
    float32,
    selected_runs,
    without_kernels,
)
from torch.nn.functional import cross_entropy
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel

import document_mask
from common.errors import RunError
from common.inputs.models import causal_attention
from document_mask import keep_documents_apart, positions_of

END, CPU = 1, torch.device("cpu")
SIZES = {
    **{"vocab_size": 128, "hidden_size": 64, "intermediate_size": 64, "head_dim": 16},
    **{"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2},
    **{"bos_token_id": 0, "eos_token_id": END, "pad_token_id": None},
}
NO_DROPOUT = dict.fromkeys(("attn_pdrop", "resid_pdrop", "embd_pdrop"), 0.0)
SLIDING = {"sliding_window": 6}
MODELS = {
    "gpt2": NO_DROPOUT,
    "llama": {},
    "qwen3": {},
    "mistral": SLIDING,
    "gemma2": SLIDING,
}


def make_model(kind: str, **changes: object) -> PreTrainedModel:
    torch.manual_seed(0)
    config = CONFIG_MAPPING[kind](**SIZES | changes, use_cache=False)  # as load_config
    config._attn_implementation = causal_attention(config)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for parameter in model.parameters():
        parameter.data += torch.randn_like(parameter) / 5
    return model


def make_sequences() -> torch.Tensor:
    """Return two sequences of 24 tokens: some end in the middle of a document, one is only END."""
    ids = torch.randint(2, 128, (2, 24), generator=torch.Generator().manual_seed(0))
    ids[0, [4, 5, 15]] = END
    ids[1, [9, 23]] = END
    return ids


def one_at_a_time(model: PreTrainedModel, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the logits of each document alone [sequences, positions, vocabulary], and the loss."""
    logits = []
    for sequence in ids:
        lengths = torch.diff((sequence[:-1] == END).nonzero()[:, 0] + 1, prepend=torch.tensor([0]))
        documents = sequence.split([*lengths.tolist(), len(sequence) - int(lengths.sum())])
        logits.append(torch.cat([model(input_ids=each[None]).logits[0] for each in documents]))
    logits = torch.stack(logits)
    return logits, cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def assert_apart(model: PreTrainedModel, **options: object) -> None:
    """The logits, the loss and the gradients are those of one document at a time."""
    ids = make_sequences()
    logits, loss = one_at_a_time(model, ids)
    loss.backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    together = model(input_ids=ids).logits
    assert (together - logits).abs().max() > 0.01 * logits.abs().max(), "nothing to keep apart"
    keep_documents_apart(model, END, CPU)
    if options:
        model.compile(**options)
    output = model(input_ids=ids, labels=ids)
    output.loss.backward()
    assert torch.allclose(output.logits, logits, rtol=0, atol=1e-5 * logits.abs().max().item())
    assert output.loss.item() == pytest.approx(loss.item(), rel=1e-5)
    for name, parameter in model.named_parameters():
        difference = (parameter.grad - expected[name]).abs().max()
        assert difference <= 1e-4 * expected[name].abs().max(), name


@pytest.mark.check
def test_positions_begin_anew_after_each_end_of_text():
    ids = torch.tensor([[5, END, 3, 4, END, END, 7], [END, 2, 3, 4, 5, 6, END]])
    expected = [[0, 1, 0, 1, 2, 0, 0], [0, 0, 1, 2, 3, 4, 5]]
    assert positions_of(ids, END).tolist() == expected


@pytest.mark.ci
@pytest.mark.parametrize("kind", MODELS)
def test_same_losses_as_one_document_at_a_time(kind):
    assert_apart(make_model(kind, **MODELS[kind]))


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_same_losses_if_the_whole_model_is_compiled(kind):
    assert_apart(make_model(kind, **MODELS[kind]), backend="aot_eager")


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_same_logits_with_blocks(kind, monkeypatch):
    """What a GPU gets; on a CPU, FlexAttention has no backward pass."""
    if "AVX512" not in torch.backends.cpu.get_cpu_capability():
        pytest.skip("FlexAttention returns nan on CPUs without AVX-512")
    model = make_model(kind, **MODELS[kind])
    ids = make_sequences()
    with torch.no_grad():
        expected, _ = one_at_a_time(model, ids)
        monkeypatch.setattr(document_mask, "has_flex_attention", lambda *_: True)
        keep_documents_apart(model, END, CPU)
        assert model.config._attn_implementation == "flex_attention"
        found = model(input_ids=ids).logits
    assert torch.allclose(found, expected, rtol=0, atol=1e-5 * expected.abs().max().item())


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_same_losses_on_a_gpu(kind):
    """With FlexAttention, forward and backward, in float32; 300 positions are three blocks."""
    ids = torch.randint(2, 128, (2, 300), generator=torch.Generator().manual_seed(0))
    ids[0, [4, 140, 141]] = END
    ids[1, 299] = END
    results = []
    for device in (CPU, torch.device("cuda")):
        model = make_model(kind, **MODELS[kind]).to(device)
        keep_documents_apart(model, END, device)
        loss = model(input_ids=ids.to(device), labels=ids.to(device)).loss
        loss.backward()
        gradients = [parameter.grad.cpu() for parameter in model.parameters()]
        results.append((loss.item(), model.config._attn_implementation, gradients))
    (right, _, expected), (found, implementation, gradients) = results
    assert implementation == "flex_attention" and found == pytest.approx(right, rel=1e-4)
    for one, other in zip(expected, gradients, strict=True):
        assert (one - other).abs().max() < 1e-2 * one.abs().max()


@pytest.mark.check
def test_flex_attention_is_used_where_it_computes_the_same():
    gpu = torch.device("cuda")
    for kind, changes, expected in (
        ("llama", {}, True),
        ("llama", {"attention_dropout": 0.1}, False),
        ("gpt2", {}, False),  # its default has dropout
        ("gpt2", NO_DROPOUT, True),
        ("gemma2", {}, False),
    ):
        config = CONFIG_MAPPING[kind](**changes)
        assert document_mask.has_flex_attention(config, gpu) is expected, (kind, changes)
        assert not document_mask.has_flex_attention(config, CPU)


# --- planted bugs, refused models ---


def test_planted_positions_that_go_on(monkeypatch):
    """Without them, transformers makes no mask."""
    monkeypatch.setattr(
        document_mask, "positions_of", lambda ids, _: torch.arange(ids.shape[1]).expand_as(ids)
    )
    with pytest.raises(RunError, match=r"^Models of the type llama mix the documents"):
        keep_documents_apart(make_model("llama"), END, CPU)


def test_planted_attention_without_a_mask(monkeypatch):
    monkeypatch.setattr(document_mask, "WITH_MASK", document_mask.NO_MASK)
    with pytest.raises(RunError, match=r"^Models of the type llama mix the documents"):
        keep_documents_apart(make_model("llama"), END, CPU)


@pytest.mark.check
@pytest.mark.parametrize("end", [0, 1, 2])
def test_a_vocabulary_of_three_tokens(end):
    """As of a text of few characters. The trial of the model has no other tokens."""
    model = make_model("llama", **{"vocab_size": 3, "eos_token_id": end})
    keep_documents_apart(model, end, CPU)
    assert model(input_ids=torch.tensor([[0, 1, 2]])).logits.shape == (1, 3, 3)


@pytest.mark.check
@pytest.mark.parametrize("kind", ["bloom", "opt", "mamba", "mpt"])
def test_refused(kind):
    sizes = {"n_heads": 4, "d_model": 64, "n_layers": 2} if kind == "mpt" else {}
    with pytest.raises(RunError, match=rf"^Models of the type {kind} mix the documents"):
        keep_documents_apart(make_model(kind, **sizes), END, CPU)


# --- training ---

APART = ("document-mask",)
RUNS = {
    "DDP": Run(CHAPTERS[1], 2, ("-b", 4), variants=APART),
    "compiled": Run(CHAPTERS[1], 2, ("-b", 4, "--compile"), note=without_kernels, variants=APART),
    "several nodes": Run(CHAPTERS[2], 2, ("-b", 4), variants=APART),
    "FSDP": Run(CHAPTERS[3], 2, ("-b", 4), variants=(*APART, "cpu-offload")),
    "chapter 5": Run(
        CHAPTERS[4],
        2,
        ("-b", 4, "--compile", *float32(CHAPTERS[4])),
        note=without_kernels,
        variants=(*APART, "chunked-loss"),
    ),
}


@pytest.fixture(scope="module")
def ladder(request, make_folder) -> Ladder:
    return Ladder(make_folder("documents"), selected_runs(request), model="llama-narrow", length=64)


@pytest.mark.parametrize(
    "run",
    [
        pytest.param(run, marks=pytest.mark.ci if name == "DDP" else pytest.mark.nightly, id=name)
        for name, run in RUNS.items()
    ],
)
def test_same_training_in_every_chapter(ladder, run):
    """As in chapter 1 with the variant, and not as in chapter 1."""
    expected = ladder.metrics(ladder.run(Run(CHAPTERS[0], 1, ("-b", 24), variants=APART)))
    assert_same_losses(expected, ladder.metrics(ladder.run(run)))
    plain = ladder.metrics(ladder.alone("-b", 24))
    changes = [abs(a["loss"] / b["loss"] - 1) for a, b in zip(plain, expected, strict=True)]
    assert max(changes) > 1e-4, "the documents are not apart"
