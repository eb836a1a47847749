"""Turn a run of any chapter into a model's folder, as the hub has them and transformers loads them.

python 04-fsdp/export.py outputs/my-run my-model
"""

import argparse
import json
import re
import shlex
import tempfile
import warnings
from contextlib import suppress
from itertools import chain
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError
from torch import nn
from torch.distributed.checkpoint import CheckpointException
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.utils.logging import disable_progress_bar

from common import cli, launch, models
from common.cli import InputError, at_least
from common.record import FORMAT, describe_model, measure_file


def file_size(text: str) -> str:
    if not re.fullmatch(r"[1-9]\d*[KMGT]B", text):
        raise argparse.ArgumentTypeError(f"{text!r} is no size such as 500MB or 5GB")
    return text


def get_args() -> argparse.Namespace:
    parser = cli.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("run", type=Path, help="folder of the run, such as outputs/my-run")
    add("target", type=Path, help="folder to write; must not exist yet")
    add("-m", "--model-name", default="gpt2-tiny", help="preset, folder or hub id, as in training")
    add("--tokenizer-name", help="folder or hub id (if absent: the model's)")
    add("--step", type=at_least(1), help="of a kept checkpoint (if absent: last)")
    dtypes = ["float32", "bfloat16"]
    add("--param-dtype", choices=dtypes, help="of the weights (if absent: the run's)")
    add("--max-shard-size", default="5GB", type=file_size, help="bytes per file of weights")
    return parser.parse_args()


def main() -> None:
    args = get_args()
    warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
    disable_progress_bar()

    # --- run ---
    target = args.target
    if target.is_file() or (target.is_dir() and any(target.iterdir())):
        raise InputError(f"{target} exists already: give a folder that does not, or delete it.")
    if str(target) in models.PRESET_NAMES:
        raise InputError(f"{target} is the name of a preset: give the folder another one.")
    record_file = args.run / "state.json"
    try:
        record = json.loads(record_file.read_text(encoding="utf-8"))
        training, checkpoints = record["training"], record["checkpoints"]
        if record["format"] != FORMAT:
            raise ValueError(f"format {record['format']}, not {FORMAT}")
        kept = {c["step"]: c for c in checkpoints if (args.run / c["path"]).is_dir()}
    except (FileNotFoundError, NotADirectoryError) as error:
        reason = "there is no such folder" if not args.run.exists() else "it has no state.json"
        raise InputError(
            f"{args.run} is no run's folder with a complete checkpoint: {reason}."
        ) from error
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"{record_file} is damaged ({error!r}): restore it.") from error
    if not kept:
        raise InputError(f"The run {args.run} has no complete checkpoint: its folders are gone.")
    step = args.step or max(kept)
    if step not in kept:
        steps = ", ".join(map(str, sorted(kept)))
        raise InputError(f"The run {args.run} keeps no checkpoint of step {step}, only of {steps}.")

    # --- model ---
    config = models.load_config(args.model_name)
    config.use_cache = True  # for who generates with it; training turns it off by itself
    with torch.device("meta"):  # names and shapes, no memory
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    if describe_model(model) != training["model"]:
        name = args.model_name
        raise InputError(f"The run {args.run} was trained with another model than {name}: give -m.")
    tokenizer = models.load_tokenizer(args.tokenizer_name or args.model_name)
    models.check_sizes(config, tokenizer, training["seq_length"])
    # What the model's own says of generating, if it has one: more end tokens, a temperature.
    with suppress(OSError, ValueError):
        generation_config = GenerationConfig.from_pretrained(models.resolve_model(args.model_name))
        generation_config.validate(strict=True)  # or it could not be saved
        model.generation_config = generation_config

    # --- weights ---
    checkpoint = args.run / kept[step]["path"]
    for name, expected in kept[step]["files"].items():
        if measure_file(checkpoint / name) != expected:
            others = ", ".join(str(other) for other in sorted(kept) if other != step)
            way_out = f"give another --step ({others})" if others else "no other step is kept"
            raise InputError(f"The checkpoint file {checkpoint / name} is damaged: {way_out}.")
    dtype = args.param_dtype or training["param_dtype"]
    # A tied weight once. Not the tables that a model computes itself: no checkpoint has them.
    persistent = model.state_dict().keys()
    weights = {
        name: torch.empty(
            tensor.shape,
            dtype=getattr(torch, dtype) if isinstance(tensor, nn.Parameter) else tensor.dtype,
        )
        for name, tensor in chain(model.named_parameters(), model.named_buffers())
        if name in persistent
    }
    try:
        # Reads the parts of all ranks into the tensors, and no moments: nobody asks for them.
        dcp.load({"model": weights}, checkpoint_id=checkpoint, no_dist=True)
    except CheckpointException as error:  # holds what was raised, Ctrl-C as well
        cause = next(iter(error.failures.values()))[0]
        if not isinstance(cause, OSError):
            raise cause from error
        raise InputError(
            f"The checkpoint {checkpoint} cannot be read ({cause.strerror}): if the run went on "
            "and deleted it, start this once more."
        ) from error
    model.load_state_dict(weights, strict=False, assign=True)  # these tensors, no copies
    model.tie_weights()
    assert not any(tensor.is_meta for tensor in model.state_dict().values())

    # --- folder ---
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        # Under its name only when it is complete, whenever this process is killed.
        with tempfile.TemporaryDirectory(prefix=f".{target.name}-", dir=target.parent) as folder:
            unfinished = Path(folder) / target.name
            model.save_pretrained(unfinished, max_shard_size=args.max_shard_size)
            tokenizer.save_pretrained(unfinished)
            for file in unfinished.iterdir():  # safetensors makes its own for the owner alone
                file.chmod((unfinished / "config.json").stat().st_mode)
            unfinished.replace(target)
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(
            f"{target} could not be written ({reason}): make room, or give another folder."
        ) from error
    size = sum(file.stat().st_size for file in target.iterdir())
    name = shlex.quote(str(target))
    print(
        f"{target}: step {step} of {args.run}, {model.num_parameters():,} parameters in {dtype}, "
        f"{size / 1e6:,.1f} MB\n"
        f"to train it further: bash 04-fsdp/launch.sh --pretrained -m {name}\n"
        f"in Python: transformers.AutoModelForCausalLM.from_pretrained({str(target)!r})"
    )


if __name__ == "__main__":
    launch.run(main)
