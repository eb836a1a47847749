"""Models that users bring: many architectures train in every chapter, and some are refused.

Each architecture is a folder with a tiny model whose weights and buffers are drawn here.
"""

import argparse
import json
import re
import sys
from itertools import product
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
import transformers
from helpers import ROOT, Run, float32, hand_over, plant, random_texts, read_metrics, register
from runner import Series, load_script
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    LlamaConfig,
    MptConfig,
    PretrainedConfig,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from common import launch
from common.data import load_sequences
from common.errors import RunError
from common.inputs import models

from peak_memory import Options, predict

STEPS, SAVED, LENGTH = 6, 3, 32
WINDOW = 16  # tokens that a token sees in a layer with a sliding window; fewer than LENGTH
SIZES = {
    "vocab_size": 4096,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
}
EXPERTS = {"num_experts_per_tok": 2, "num_experts": 4, "num_local_experts": 4}
# By model type: what differs from SIZES; None leaves a setting out. A page has the same list.
MODELS: dict[str, dict[str, object]] = {
    "gpt2": dict.fromkeys(("attn_pdrop", "resid_pdrop", "embd_pdrop"), 0.0),
    "llama": {},
    "mistral": {"sliding_window": WINDOW},
    "mixtral": EXPERTS,
    "qwen2": {},
    "qwen3": {},
    "qwen3_moe": {**EXPERTS, "moe_intermediate_size": 16},
    "gemma": {},
    "gemma2": {"sliding_window": WINDOW, "query_pre_attn_scalar": 8},
    "gemma3_text": {"sliding_window": WINDOW, "query_pre_attn_scalar": 8},
    "gemma4_text": {
        "sliding_window": WINDOW,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 4096,
        "global_head_dim": 16,
        "num_kv_shared_layers": 0,
    },
    "phi3": {},
    "olmo2": {},
    "smollm3": {},
    "granite": {},
    "gpt_neox": {"num_key_value_heads": None},
    "afmoe": {**EXPERTS, "moe_intermediate_size": 16, "num_dense_layers": 1},
    "falcon": {"head_dim": None, "new_decoder_architecture": True, "num_kv_heads": 2},
}
# A mixture of experts; persistent buffers, and tied weights; a sliding window.
QUICK = ("qwen3_moe", "gemma4_text", "mistral")
KINDS = [
    pytest.param(kind, marks=pytest.mark.ci if kind in QUICK else pytest.mark.nightly)
    for kind in MODELS
]
COMPARED = ("01-single-gpu", "02-ddp", "04-fsdp", "05-mixed-precision")
WEIGHTS = {"scratch": (), "pretrained": ("--pretrained",)}


def write_model(kind: str, folder: Path, spread: float = 0.0, **changes: object) -> None:
    """Write the folder of an architecture; no two of its tensors are alike.

    spread: how much the embeddings and the output layer of tokens differ. With little, all tokens
    are about equally likely, whatever these layers are. changes: of the configuration.
    """
    settings = {**SIZES, **MODELS[kind], **changes}
    settings = {key: value for key, value in settings.items() if value is not None}
    torch.manual_seed(99)
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**settings))
    for tensor in model.state_dict().values():
        tensor += torch.rand_like(tensor) / 10
    for layer in (model.get_input_embeddings(), model.get_output_embeddings()):
        layer.weight.data += torch.randn_like(layer.weight) * spread
    model.save_pretrained(folder)
    models.load_tokenizer("llama-tiny").save_pretrained(folder)


class Trainings:
    """Chapter 1 alone and the others on two ranks; one of chapter 4 resumes that of chapter 1.

    All of one number of ranks are done when one of them is asked for.
    """

    def __init__(self, folder: Path, kinds: list[str]) -> None:
        self.folder, self.runs = folder, {}
        self.series: dict[int, Series] = {}
        for kind in kinds:
            write_model(kind, folder / kind)
            for chapter, weights in product(COMPARED, WEIGHTS):
                args = ("-m", folder / kind, *WEIGHTS[weights], *float32(chapter))
                self.runs[f"{kind}-{chapter}-{weights}"] = Run(chapter, 1 + (chapter > "02"), args)
            self.runs[f"{kind}-resumed"] = Run("04-fsdp", 2, ("-m", folder / kind))
        (folder / "corpus.json").write_text(json.dumps(random_texts(10)))

    def __getitem__(self, name: str) -> Path:
        """Return the folder of a run; fails if the run did."""
        ranks = self.runs[name].world_size
        if ranks not in self.series:
            options = {n: self.options(n) for n, r in self.runs.items() if r.world_size == ranks}
            self.series[ranks] = Series(ranks, options, self.folder / f"on-{ranks}")
        self.series[ranks].assert_ended(name)
        return self.folder / name

    def options(self, name: str) -> dict[str, object]:
        run, target = self.runs[name], self.folder / name
        if name.endswith("-resumed"):
            hand_over(self[name.replace("resumed", "01-single-gpu-scratch")], target, SAVED)
        args = [
            *("-d", self.folder / "corpus.json", "-s", LENGTH, "--global-batch-size", 4, "-b", 2),
            *("--max-steps", STEPS, "--warmup-steps", 1, "--lr", 1e-2, "--log-freq", 1),
            *("--eval-sequences", 2, "--ckpt-freq", SAVED, "--save-dir", self.folder, "-e", name),
        ]
        printed = [f"{target}-{rank}.stderr" for rank in range(run.world_size)]
        return {"args": [*args, *run.args], "chapter": run.chapter, "stderr_file": printed}


@pytest.fixture(scope="module")
def trainings(request, make_folder) -> Trainings:
    chosen = {params["kind"] for params in selected(request, "trainings")}
    return Trainings(make_folder("architectures"), [kind for kind in MODELS if kind in chosen])


def selected(request: pytest.FixtureRequest, fixture: str) -> list[dict[str, object]]:
    """Return the parameters of each test of this session that uses a fixture of this module."""
    items = [item for item in request.session.items if item.path == request.path]
    return [item.callspec.params for item in items if fixture in item.fixturenames]


def losses(run: Path) -> list[float]:
    return [line[key] for line in read_metrics(run) for key in ("loss", "eval_loss") if key in line]


@pytest.mark.parametrize("kind", KINDS)
def test_same_training_in_every_chapter(trainings, kind):
    """And chapter 4 goes on with a run of chapter 1."""
    first = {}
    for weights in WEIGHTS:
        expected = losses(trainings[f"{kind}-01-single-gpu-{weights}"])
        assert len(expected) == STEPS + 1 and expected[-2] < expected[0] - 0.1
        for chapter in COMPARED[1:]:
            found = losses(trainings[f"{kind}-{chapter}-{weights}"])
            assert found == pytest.approx(expected, rel=1e-5), (chapter, weights)
        first[weights] = expected[0]
    assert first["scratch"] != pytest.approx(first["pretrained"], rel=1e-3)
    run, expected = trainings[f"{kind}-resumed"], trainings[f"{kind}-01-single-gpu-scratch"]
    assert f"resumed after step {SAVED} of" in Path(f"{run}-0.stderr").read_text()
    assert losses(run) == pytest.approx(losses(expected), rel=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_exported(trainings, kind, monkeypatch, tmp_path):
    """Plain transformers computes the logits of the weights that the run has saved."""
    run = trainings[f"{kind}-04-fsdp-pretrained"]
    monkeypatch.setattr(sys, "argv", ["export.py", str(run), str(tmp_path / "model")])
    load_script(ROOT / "04-fsdp/export.py").main()
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    expected = AutoModelForCausalLM.from_config(models.load_config(str(trainings.folder / kind)))
    weights = {"model": expected.state_dict()}
    dcp.load(weights, checkpoint_id=run / f"checkpoints/step-{STEPS:08d}", no_dist=True)
    ids = torch.arange(LENGTH)[None] * 7
    with torch.no_grad():
        found, expected = found(ids).logits, expected.eval()(ids).logits
    assert torch.allclose(found, expected, rtol=0, atol=1e-5) and expected.std() > 0.1


@pytest.mark.parametrize("kind", KINDS)
def test_memory_is_predicted(trainings, kind):
    """memory.py knows what a rank of chapter 4 stores; it needs attention without a matrix."""
    run = trainings[f"{kind}-04-fsdp-scratch"]
    held = re.search("rank 0 holds ([0-9,]+) of", Path(f"{run}-0.stderr").read_text())
    config = models.load_config(str(trainings.folder / kind))
    has_matrix = models.causal_attention(config) == "eager"
    try:
        predicted = predict(config, Options("fsdp", gpus=2, batch_size=2, seq_length=LENGTH))
    except RunError as error:  # since transformers 5.24, Falcon reads numbers from its positions
        assert has_matrix or kind == "falcon"
        assert "cannot be predicted, because" in str(error)
        return
    assert not has_matrix
    assert f"{predicted['parameters']:,}" == held[1]
    assert predicted["peak"] > 4 * predicted["parameters"]


# --- the same loss for all who load a model, with tied and untied output layers ---

# In chapter 4, an output layer that is not tied gets the embeddings.
TIES_ALL = [("full_model = model\n", "full_model = model\n    config.tie_word_embeddings = True\n")]
register("04-fsdp", TIES_ALL)


class Loaded:
    """Models, and runs of chapters 1 and 4 that start from them and change nothing.

    cases: (kind, whether it is tied). The runs of one number of ranks are done in one start.
    """

    def __init__(
        self,
        folder: Path,
        cases: list[tuple[str, bool]],
        chapters: tuple[str, ...] = ("01-single-gpu", "04-fsdp"),
    ) -> None:
        self.folder = folder
        (folder / "corpus.json").write_text(json.dumps(random_texts(10)))
        for kind, is_tied in cases:
            write_model(kind, self.model(kind, is_tied), 0.5, tie_word_embeddings=is_tied)
        self.series = {}
        for chapter in chapters:
            runs = {f"{kind}-{tied}": self.options(chapter, kind, tied) for kind, tied in cases}
            n_ranks = 1 if chapter == "01-single-gpu" else 2
            ended = folder / f"ended-{Path(chapter).name}"
            self.series[chapter] = Series(n_ranks, runs, ended)

    def model(self, kind: str, is_tied: bool) -> Path:
        return self.folder / f"{kind}-{'tied' if is_tied else 'untied'}"

    def run(self, chapter: str, kind: str, is_tied: bool) -> Path:
        """Return the folder of a run; fails if the run did."""
        self.series[chapter].assert_ended(f"{kind}-{is_tied}")
        return self.folder / f"{self.model(kind, is_tied).name}-{Path(chapter).name}"

    def options(self, chapter: str, kind: str, is_tied: bool) -> dict[str, object]:
        model = self.model(kind, is_tied)
        args = [
            *("-m", model, "--pretrained", "--lr", 0, "--max-steps", 1, "--log-freq", 1),
            *("-d", self.folder / "corpus.json", "-s", LENGTH, "--global-batch-size", 4, "-b", 2),
            *("--save-dir", self.folder, "-e", f"{model.name}-{Path(chapter).name}"),
        ]
        return {"args": args, "chapter": chapter}


@pytest.fixture(scope="module")
def loaded(request, make_folder) -> Loaded:
    cases = [(each["kind"], each["is_tied"]) for each in selected(request, "loaded")]
    return Loaded(make_folder("loaded"), cases)


@pytest.mark.parametrize("is_tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=() if kind in ("gpt2", "llama") else pytest.mark.nightly)
        for kind in MODELS
    ],
)
def test_all_who_load_a_model_have_the_same_loss(
    loaded, kind, is_tied, run_main, monkeypatch, tmp_path
):
    """Chapters 1 and 4, evaluate.py, and transformers with the export of a sharded run."""
    for name in launch.RANK_VARIABLES:  # evaluate.py sets them
        monkeypatch.setenv(name, "0")
        monkeypatch.delenv(name)
    original, exported = loaded.model(kind, is_tied), tmp_path / "exported"
    runs = [loaded.run(chapter, kind, is_tied) for chapter in loaded.series]
    found = {str(run): losses(run)[-1] for run in runs}
    run_main(ROOT / "04-fsdp/export.py", runs[-1], exported)
    for folder in (original, *runs, exported):
        output = tmp_path / f"{folder.name}.json"
        corpus = ("-d", loaded.folder / "corpus.json", "-s", LENGTH)
        run_main(ROOT / "01-single-gpu/evaluate.py", folder, *corpus, "--output", output)
        found[f"evaluate.py {folder}"] = json.loads(output.read_text())["loss"]
    # The end of each document is for evaluation.
    names = {"dataset_name": str(loaded.folder / "corpus.json"), "dataset_subset": None}
    args = argparse.Namespace(**names, text_column=None, seq_length=LENGTH)
    _, sequences = load_sequences(args, models.load_tokenizer(str(original)))
    ids = torch.stack([item["input_ids"] for item in sequences])
    for folder in (original, exported):
        model = AutoModelForCausalLM.from_pretrained(folder).eval()
        head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
        assert (head.weight is embedding.weight) == is_tied
        with torch.no_grad():
            found[f"transformers {folder}"] = model(input_ids=ids, labels=ids).loss.item()
    expected = found[f"transformers {original}"]
    assert found == pytest.approx(dict.fromkeys(found, expected), rel=1e-5)


def test_planted_an_output_layer_that_one_chapter_ties(make_folder, tmp_path):
    """The losses differ."""
    chapter = str(plant("04-fsdp", tmp_path / "04-fsdp", TIES_ALL))
    loaded = Loaded(make_folder("planted"), [("llama", False)], ("01-single-gpu", chapter))
    runs = [losses(loaded.run(each, "llama", False))[-1] for each in loaded.series]
    assert runs[1] != pytest.approx(runs[0], rel=1e-4)


# --- refused ---

DECODER = {"is_decoder": True, "is_encoder_decoder": False}
OWN_CODE = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}
FP8 = {"quantization_config": {"quant_method": "fp8"}}
BOTH_WAYS = {"use_bidirectional_attention": True}
# By what is wrong: the type, what else is in config.json, and the sentence.
REFUSED = {
    "quantized weights": ("llama", FP8, "are quantized: choose"),
    "own code": ("own", {"auto_map": OWN_CODE}, "has no usable model"),
    "sees later tokens": ("gemma3_text", BOTH_WAYS, "(gemma3_text) is not a causal language model"),
    "labels not shifted": ("blenderbot", DECODER, "(blenderbot) is not a causal language model"),
}


@pytest.mark.parametrize(("kind", "settings", "sentence"), REFUSED.values(), ids=REFUSED)
def test_refused(kind, settings, sentence, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind, **settings}))
    with pytest.raises(RunError, match=re.escape(sentence)):
        models.load_config(str(tmp_path))


# Sizes of all types, by the names that they use.
SMALL = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "embed_dim", "word_embed_proj_dim"), 32),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "decoder_ffn_dim", "encoder_ffn_dim"), 64),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 64),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), 2),
    **dict.fromkeys(("encoder_layers", "decoder_layers", "num_decoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk"), 2),
    **dict.fromkeys(("n_group", "num_expert_group", "topk_group"), 1),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "zero_expert_num"), 2),
    **dict.fromkeys(("max_position_embeddings", "n_positions"), 64),
    **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), 0),
    **{"vocab_size": 128, "head_dim": 8, "expert_ffn_hidden_size": 32},
}
TOWER = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4}
PER_LAYER = {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 128}
NO_INPUTS = dict.fromkeys(PER_LAYER, 0)
ROPE = {"rope_type": "default", "rope_theta": 1e4}
# What else a type needs to be small.
ALSO: dict[str, dict[str, object]] = {
    "bamba": {"mamba_n_heads": 4},
    "codegen": {"rotary_dim": 8},
    "cohere_compass_text": {"rope_parameters": {"full_attention": ROPE}},
    "dbrx": {"attn_config": {"rope_theta": 1e4, "kv_n_heads": 2, "clip_qkv": 8}},
    "dots1": {"n_shared_experts": 1},
    "gemma3n_text": {**PER_LAYER, "num_kv_shared_layers": 0},
    "gemma4_assistant": {"text_config": NO_INPUTS},
    "gemma4_text": {**PER_LAYER, "num_kv_shared_layers": 0, "global_head_dim": 16},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "gptj": {"rotary_dim": 8},
    "granitemoehybrid": {"mamba_n_heads": 4},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "mamba2": {"head_dim": 16},
    "phi4_multimodal": {
        "vision_config": {**TOWER, "num_hidden_layers": 2},
        "audio_config": {**TOWER, "num_blocks": 1},
    },
    "reformer": {"axial_pos_embds_dim": [16, 16], "axial_pos_shape": [8, 8]},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"num_hidden_layers": 8},
    "zamba2": {"num_hidden_layers": 54},
    "zaya": {"num_experts_per_tok": 1},
}
NOT_TEXT_ALONE = ("git",)  # it fails without an image
# transformers 5.17 makes no small configuration of these.
NOT_SMALL = ("cohere_compass_text", "musicgen", "musicgen_melody")


def small_config(kind: str, **changes: object) -> PretrainedConfig:
    """Return a small configuration of a type that has the sizes which its default has."""
    create, also = CONFIG_MAPPING[kind], ALSO.get(kind, {})
    try:
        known = create().to_dict()
    except Exception:  # it has a class of its own
        known = create(**also).to_dict()
    sizes = {name: value for name, value in SMALL.items() if name in known}
    if "qk_rope_head_dim" in known:  # latent attention: its head size follows from others
        sizes = {**sizes, "num_key_value_heads": 4}
        sizes.pop("head_dim", None)
    return create(**{**sizes, **also, **changes})


def find_fault(config: PretrainedConfig) -> str | None:
    """Return why the loss of a model means nothing, or None."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    for parameter in model.parameters():
        parameter.data += torch.randn_like(parameter) / 10
    tokens = torch.arange(2, 26)[None]
    other = tokens.clone()
    other[0, -1] = 0
    with torch.no_grad():
        logits, output = model(input_ids=tokens).logits, model(input_ids=other, labels=other)
    assert output.logits.isfinite().all()
    if (logits - output.logits)[0, :-1].abs().max() > 1e-4 * logits.abs().max():
        return "sees later tokens"
    shifted = torch.nn.functional.cross_entropy(output.logits[0, :-1], other[0, 1:])
    close = torch.isclose(output.loss, shifted, rtol=1e-3)
    return None if close else "does not shift its labels"


@pytest.mark.nightly
@pytest.mark.parametrize("kind", sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))
def test_each_type_predicts_the_next_token_or_is_refused(kind, tmp_path):
    """An encoder, or both, is refused, and also tried as a decoder."""
    if kind in NOT_SMALL and transformers.__version__.startswith("5.17."):
        pytest.skip("needs a newer transformers")
    for changes in ({}, DECODER):
        small_config(kind, **changes).save_pretrained(tmp_path)
        try:
            config = models.load_config(str(tmp_path))
        except RunError as error:
            assert " is not a causal language model: choose one " in str(error)
            continue
        assert kind in NOT_TEXT_ALONE or find_fault(config) is None
        return


def test_the_loss_of_a_router_is_left_out(tmp_path, caplog):
    for asked in (False, True):
        CONFIG_MAPPING["qwen3_moe"](output_router_logits=asked).save_pretrained(tmp_path)
        assert not models.load_config(str(tmp_path)).output_router_logits
        assert ("The auxiliary loss of" in caplog.text) == asked


@pytest.mark.check
def test_positions_by_other_names():
    assert models.sequence_length(MptConfig(max_seq_len=64), None) == 64
    assert models.sequence_length(LlamaConfig(max_position_embeddings=-1), None) == 1024


@pytest.mark.check
def test_the_page_lists_the_tested_architectures():
    page = (ROOT / "01-single-gpu/reference.md").read_text().replace("\n", " ")
    (listed,) = re.findall(r"train, resume and export these architectures [^:]*: ([^.]*)", page)
    for kind in MODELS:
        family = re.match(r"[a-z]+(_neox)?", kind)[0].replace("_", "")
        assert family in re.sub(r"[^a-z]", "", listed.lower()), kind
