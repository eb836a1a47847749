"""The variant chunked-loss: the same losses and gradients, without all logits in memory."""

import copy

import pytest
import torch
from helpers import (
    CHAPTERS,
    Ladder,
    Run,
    assert_chapter_1,
    assert_same_losses,
    float32,
    register,
    selected_runs,
    without_kernels,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel

import chunked_loss
from chunked_loss import chunk_loss
from common.data import IGNORED
from common.errors import RunError

VOCABULARY, CHUNK = 128, 7
SIZES = {
    **{"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64, "head_dim": 8},
    **{"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2},
    **{"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": None},
}
TIED = {"tie_word_embeddings": True}
NO_DROPOUT = dict.fromkeys(("attn_pdrop", "resid_pdrop", "embd_pdrop"), 0.0)


def make_model(kind: str, **changes: object) -> PreTrainedModel:
    torch.manual_seed(0)
    config = CONFIG_MAPPING[kind](**SIZES | changes)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def make_batch() -> dict[str, torch.Tensor]:
    """Return 3 sequences of 17 tokens, some without a label: the last chunk is smaller."""
    ids = torch.randint(VOCABULARY, (3, 17), generator=torch.Generator().manual_seed(0))
    labels = ids.clone()
    labels[0, 5:9] = IGNORED
    return {"input_ids": ids, "labels": labels}


def train(model: PreTrainedModel, batch: dict) -> dict[str, torch.Tensor]:
    """Return the loss and all gradients of two micro-batches; the first loss is multiplied by 3."""
    model.zero_grad()
    losses = [model(**batch).loss * factor for factor in (3, 1)]
    for loss in losses:
        loss.backward()
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return {"loss": losses[1].detach(), **copy.deepcopy(gradients)}


def assert_same_gradients(model: PreTrainedModel, batch: dict, rel: float, **options: bool) -> None:
    expected = train(model, batch)
    with torch.no_grad():
        expected["evaluated"] = model(**batch).loss
    chunk_loss(model, CHUNK, **{"compile": False, **options})
    found = train(model, batch)
    with torch.no_grad():
        found["evaluated"] = model(**batch).loss
    assert found.keys() == expected.keys()
    for name, right in expected.items():
        difference = (found[name] - right).abs().max() / right.abs().max()
        assert difference < rel, f"the gradient of {name} differs"


MODELS = {
    "llama": ("llama", {}),
    "tied": ("llama", TIED),
    "gpt2": ("gpt2", NO_DROPOUT),
    "qwen3": ("qwen3", {}),
}
ARGUMENTS = {
    "mean": lambda batch: {},
    "of all micro-batches": lambda batch: {"num_items_in_batch": torch.tensor(77)},
    "shifted": lambda batch: {
        "num_items_in_batch": 40.5,
        "shift_labels": batch["labels"].roll(-1, 1),
    },
}


@pytest.mark.ci
@pytest.mark.parametrize("arguments", ARGUMENTS)
@pytest.mark.parametrize("name", MODELS)
def test_same_loss_and_gradients(name, arguments):
    kind, changes = MODELS[name]
    batch = make_batch()
    assert_same_gradients(make_model(kind, **changes), batch | ARGUMENTS[arguments](batch), 1e-5)


def test_a_frozen_output_layer_gets_no_gradient():
    model = make_model("llama")
    model.lm_head.requires_grad_(False)
    assert_same_gradients(model, make_batch(), 1e-5)
    assert model.lm_head.weight.grad is None


@pytest.mark.nightly
def test_same_gradients_compiled():
    """The model's layers and the loss of a chunk; chapters 1 to 3 compile the whole model."""
    model = make_model("llama")
    model.compile(backend="aot_eager")
    assert_same_gradients(model, make_batch(), 1e-5, compile=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradients_in_16_bits_are_as_close_to_float32_as_those_of_all_logits(dtype):
    """With autocast, and with weights in 16 bits. In float16 with a loss scale."""
    for autocast in (True, False):
        errors = []
        for chunked in (False, True):
            model, exact = make_model("llama", **TIED), make_model("llama", **TIED)
            right = train(exact, make_batch())
            if not autocast:
                model.to(dtype)
            if chunked:
                chunk_loss(model, CHUNK, compile=False)
            with torch.autocast("cpu", dtype, enabled=autocast):
                loss = model(**make_batch()).loss
            (loss * 4 * 2**10).backward()  # train adds up gradients of 3 and 1 losses
            assert loss.dtype == torch.float32
            found = model.lm_head.weight.grad.float() / 2**10
            errors.append((found - right["model.embed_tokens.weight"]).norm())
        assert errors[1] < 1.1 * errors[0], (autocast, errors)
        assert errors[0] < 0.03 * right["model.embed_tokens.weight"].norm()


@pytest.mark.gpu
@pytest.mark.parametrize("compile", [False, True], ids=["eager", "compiled"])
def test_gradients_on_a_gpu(compile):
    """In bfloat16, with cuBLAS adding to a float32 gradient, or a temporary matrix up to 2.11."""
    errors, right = [], train(make_model("llama"), make_batch())["lm_head.weight"]
    batch = {key: tensor.cuda() for key, tensor in make_batch().items()}
    for chunked in (False, True):
        model = make_model("llama").to("cuda", torch.bfloat16)
        if chunked:
            chunk_loss(model, CHUNK, compile=compile)
        found = train(model, batch)["lm_head.weight"].float().cpu()
        errors.append((found - right).norm() / right.norm())
    assert errors[1] < max(1.2 * errors[0], 0.01), errors


DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
def test_the_factor_of_the_mean_is_not_rounded_to_16_bits(device):
    """1 / 24,573 would become 0.2% larger, and with it the gradients of all layers."""
    torch.manual_seed(0)
    hidden = torch.randn(64, 32, device=device).bfloat16().requires_grad_()
    weight = torch.randn(VOCABULARY, 32, device=device).bfloat16().requires_grad_()
    labels = torch.randint(VOCABULARY, (64,), device=device)
    gradients = []
    for n_labels in (1, 24573):
        replace = chunked_loss.replace_logits_by_gradient
        total = chunked_loss.SumOfLosses.apply(hidden, weight, labels, CHUNK, replace, True)
        found = torch.autograd.grad(total / n_labels, (hidden, weight))
        gradients.append([each.double() * n_labels for each in found])
    for of_sum, of_mean in zip(*gradients, strict=True):
        factor = (of_sum * of_mean).sum() / of_sum.square().sum()
        assert factor.item() == pytest.approx(1, abs=5e-4)


# --- memory ---


class Largest(TorchDispatchMode):
    """Notes the most numbers in a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        sizes = [t.numel() for t in tree_leaves(result) if isinstance(t, torch.Tensor)]
        self.numel = max([self.numel, *sizes])
        return result


def assert_small(chunk: int) -> None:
    """No tensor is larger than a chunk's logits or the model's largest weight."""
    model = make_model("llama", intermediate_size=16)
    chunk_loss(model, chunk, compile=False)
    ids = torch.zeros((4, 64), dtype=torch.int64)
    largest = Largest()
    with largest:
        model(input_ids=ids, labels=ids).loss.backward()
        with torch.no_grad():
            model(input_ids=ids, labels=ids)
    limit = max(CHUNK * VOCABULARY, *(p.numel() for p in model.parameters()))
    # Attention has 4 heads x 8 numbers for each of the 256 tokens.
    assert largest.numel <= max(limit, ids.numel() * 32), "all logits exist"


@pytest.mark.check
def test_the_logits_of_all_tokens_never_exist():
    assert_small(CHUNK)


@pytest.mark.check
def test_planted_chunk_of_all_tokens():
    with pytest.raises(AssertionError, match=r"^all logits exist"):
        assert_small(4 * 64)


# --- training ---

# Micro-batches of the tests have fewer than 4,096 tokens.
SMALL = (("chunk_tokens=4096", "chunk_tokens=50"),)
for chapter in CHAPTERS:
    register(chapter, SMALL, ["chunked-loss"])


def chunked(chapter: str, ranks: int, *args: object, note=None, stack: tuple = ()) -> Run:
    return Run(chapter, ranks, ("-b", 4, *args), SMALL, note, variants=("chunked-loss", *stack))


RUNS = {
    "FSDP": chunked(CHAPTERS[3], 2, *("-m", "llama-narrow")),
    "one device": chunked(CHAPTERS[0], 1),
    "DDP, compiled": chunked(CHAPTERS[1], 2, "--compile", note=without_kernels),
    "several nodes": chunked(CHAPTERS[2], 2),
    "FSDP, offloaded": chunked(CHAPTERS[3], 2, stack=("cpu-offload", "reduce-every-backward")),
    "chapter 5": chunked(CHAPTERS[4], 2, *float32(CHAPTERS[4]), "--compile", note=without_kernels),
}
SHARED = chunked(CHAPTERS[3], 2, "--context-parallel", 2, stack=("context-parallel", "mesh"))


@pytest.fixture(scope="module")
def ladder(request, make_folder) -> Ladder:
    return Ladder(make_folder("chunked"), selected_runs(request), model="gpt2-narrow")


@pytest.mark.parametrize(
    "run",
    [
        pytest.param(run, marks=pytest.mark.ci if name == "FSDP" else pytest.mark.nightly, id=name)
        for name, run in RUNS.items()
    ],
)
def test_same_training(ladder, run):
    assert_chapter_1(ladder, run)


@pytest.mark.nightly
@pytest.mark.parametrize("run", [SHARED], ids=[""])
def test_same_losses_if_ranks_share_sequences(ladder, run):
    """The labels are shifted before the sequences are cut, and ranks have other numbers of them."""
    found, expected = ladder.metrics(ladder.run(run)), ladder.metrics(ladder.alone("-b", 24))
    assert_same_losses(expected, found)


# --- planted bugs ---


def test_planted_gradients_that_are_not_scaled(monkeypatch):
    def backward(ctx, gradient):
        return *ctx.saved_tensors, None, None, None, None

    monkeypatch.setattr(chunked_loss.SumOfLosses, "backward", staticmethod(backward))
    with pytest.raises(AssertionError, match=r"^the gradient of .* differs"):
        assert_same_gradients(make_model("llama"), make_batch(), 1e-5)


def test_planted_gradient_of_the_last_chunk_only(monkeypatch):
    def replace(total, left, right):
        total.copy_(left @ right)

    monkeypatch.setattr(chunked_loss, "add_matmul", replace)
    with pytest.raises(AssertionError, match=r"^the gradient of lm_head.weight differs"):
        assert_same_gradients(make_model("llama"), make_batch(), 1e-5)


# --- refused ---


@pytest.mark.check
@pytest.mark.parametrize("kind", ["gemma2", "granite", "cohere", "phi"])
def test_refused(kind):
    """Capped logits, scaled ones, and a bias."""
    model = make_model(kind)
    reason = "is not a single matrix" if kind == "phi" else "is followed by more computations"
    with pytest.raises(RunError, match=rf"^The output layer of {kind} {reason}: leave out"):
        chunk_loss(model, CHUNK, compile=False)
        model(**make_batch())
