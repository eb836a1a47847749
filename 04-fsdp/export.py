"""Turn a run of any chapter into a model's folder, as the hub has them and transformers loads them.

python 04-fsdp/export.py outputs/my-run my-model
"""

import argparse
import re
import shlex
from contextlib import suppress
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError
from transformers import GenerationConfig
from transformers.utils.logging import disable_progress_bar

from common import cli, launch, models, runs
from common.cli import at_least
from common.folders import check_new_folder, complete_folder, let_others_read
from common.remote import as_path
from common.writer import open_reader


def file_size(text: str) -> str:
    if not re.fullmatch(r"[1-9]\d*[KMGT]B", text):
        raise argparse.ArgumentTypeError(f"{text!r} is no size such as 500MB or 5GB")
    return text


def get_args() -> argparse.Namespace:
    parser = cli.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("run", type=as_path, help="folder of the run, such as outputs/my-run")
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
    disable_progress_bar()

    # --- run ---
    target = args.target
    check_new_folder(target)
    kept = runs.find_kept(args.run, args.step)

    # --- model ---
    config = models.load_config(args.model_name)
    config.use_cache = True  # for who generates with it; training turns it off by itself
    tokenizer = models.load_tokenizer(args.tokenizer_name or args.model_name)
    models.check_sizes(config, tokenizer, None)  # a preset takes the tokenizer's size
    model = runs.build_on_meta(kept, config, args.model_name)
    models.check_sizes(config, tokenizer, kept.training["seq_length"])
    # What the model's own says of generating, if it has one: more end tokens, a temperature.
    with suppress(OSError, ValueError):
        generation_config = GenerationConfig.from_pretrained(models.resolve_model(args.model_name))
        generation_config.validate(strict=True)  # or it could not be saved
        model.generation_config = generation_config

    # --- weights ---
    runs.check_files(kept)
    dtype = args.param_dtype or kept.training["param_dtype"]
    weights = runs.empty_weights(model, getattr(torch, dtype))
    with runs.reading(kept.path):
        # Reads the parts of all ranks into the tensors, and no moments: nobody asks for them.
        dcp.load({"model": weights}, storage_reader=open_reader(kept.path), no_dist=True)
    model.load_state_dict(weights, strict=False, assign=True)  # these tensors, no copies
    model.tie_weights()
    assert not any(tensor.is_meta for tensor in model.state_dict().values())

    # --- folder ---
    with complete_folder(target, (OSError, SafetensorError)) as unfinished:
        model.save_pretrained(unfinished, max_shard_size=args.max_shard_size)
        tokenizer.save_pretrained(unfinished)
        let_others_read(unfinished)
    size = sum(file.stat().st_size for file in target.iterdir())
    name = shlex.quote(str(target))
    print(
        f"{target}: step {kept.step} of {args.run}, {model.num_parameters():,} parameters in "
        f"{dtype}, {size / 1e6:,.1f} MB\n"
        f"to train it further: bash 04-fsdp/launch.sh --pretrained -m {name}\n"
        f"in Python: transformers.AutoModelForCausalLM.from_pretrained({str(target)!r})"
    )


if __name__ == "__main__":
    launch.run(main)
