"""Export a run of any chapter as a model folder that transformers can load.

python 04-fsdp/export.py outputs/my-run my-model
"""

import argparse
import re
import shlex
from contextlib import suppress
from pathlib import Path

import torch
from safetensors import SafetensorError
from transformers import GenerationConfig
from transformers.utils.logging import disable_progress_bar

from common import cli, distributed, models
from common.checkpoint import trained
from common.cli import at_least
from common.models import check_new_folder, complete_folder, let_others_read
from common.storage import as_path


def file_size(text: str) -> str:
    if not re.fullmatch(r"[1-9]\d*[KMGT]B", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a size such as 500MB or 5GB")
    return text


def get_args() -> argparse.Namespace:
    parser = cli.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("run", type=as_path, help="run folder, for example outputs/my-run")
    add("target", type=Path, help="folder to write; it must not exist yet")
    add("-m", "--model-name", default="gpt2-tiny", help="preset, folder or hub id, as in training")
    add("--tokenizer-name", help="folder or hub id (default: the model's tokenizer)")
    add("--step", type=at_least(1), help="step of the checkpoint (default: the last one)")
    dtypes = ["float32", "bfloat16"]
    add("--param-dtype", choices=dtypes, help="of the weights (default: the run's)")
    add("--max-shard-size", default="5GB", type=file_size, help="limit per weight file")
    return parser.parse_args()


def main() -> None:
    args = get_args()
    disable_progress_bar()

    # --- run ---
    target = args.target
    check_new_folder(target)
    saved = trained.find_saved(args.run, args.step)

    # --- model ---
    config = models.load_config(args.model_name)
    config.use_cache = True  # for generation; training turns it off
    tokenizer = models.load_tokenizer(args.tokenizer_name or args.model_name)
    models.check_sizes(config, tokenizer, None)  # adapts a preset's vocabulary to the tokenizer
    model = trained.build_on_meta(saved, config, args.model_name)
    models.check_sizes(config, tokenizer, saved.settings["seq_length"])
    # Keeps the generation settings of the original model: end tokens, temperature.
    with suppress(OSError, ValueError):
        generation_config = GenerationConfig.from_pretrained(models.resolve_model(args.model_name))
        generation_config.validate(strict=True)  # save_pretrained() does the same
        model.generation_config = generation_config

    # --- weights ---
    dtype = args.param_dtype or saved.settings["param_dtype"]
    weights = trained.load_weights(saved, model, getattr(torch, dtype))
    model.load_state_dict(weights, strict=False, assign=True)  # assign: without a copy
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
        f"{target}: step {saved.step} of {args.run}, {model.num_parameters():,} parameters in "
        f"{dtype}, {size / 1e6:,.1f} MB\n"
        f"to train it further: bash 04-fsdp/launch.sh --pretrained -m {name}\n"
        f"in Python: transformers.AutoModelForCausalLM.from_pretrained({str(target)!r})"
    )


if __name__ == "__main__":
    distributed.run(main)
