"""Export a run of any chapter as a model folder that transformers can load.

python 04-fsdp/export.py outputs/my-run my-model
"""

import argparse
import re
import shlex
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from safetensors import SafetensorError
from transformers import GenerationConfig
from transformers.utils.logging import disable_progress_bar

from common import cli, launch
from common.cli import at_least
from common.errors import RunError
from common.inputs import models
from common.storage import as_path

sys.path.append(str(Path(__file__).resolve().parents[1] / "01-single-gpu"))
from trained_model import (
    SavedCheckpoint,
    begin_token,
    find_saved,
    import_lora,
    load_weights,
    stop_tokens,
)


def get_args() -> argparse.Namespace:
    parser = cli.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("run", type=as_path, help="run folder, for example outputs/my-run")
    add("target", type=Path, help="folder to write; it must not exist yet")
    add("-m", "--model-name", help="preset, folder or hub id (default: the run's own)")
    add("--tokenizer-name", help="folder or hub id (default: the run's own)")
    add("--step", type=at_least(1), help="step of the checkpoint (default: the last one)")
    dtypes = ["float32", "bfloat16"]
    add("--param-dtype", choices=dtypes, help="of the weights (default: the run's)")
    add("--adapter", action="store_true", help="of a run with lora, export the adapters alone")
    limit = "limit per weight file, such as 500MB"
    add("--max-shard-size", default="5GB", type=size_of_file, help=limit)
    return parser.parse_args()


def size_of_file(text: str) -> str:
    """Return a size as save_pretrained() takes it; an argparse type."""
    found = re.fullmatch(r"(\d+\.?\d*)[KMGT]B", text.upper())
    if not found or float(found[1]) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size such as 500MB or 5GB")
    return text


def main() -> None:
    args = get_args()
    disable_progress_bar()

    # --- run ---
    target = args.target
    if target.exists():
        raise RunError(f"{target} already exists: give another folder, or delete it.")
    if args.adapter and args.param_dtype:
        raise RunError("Adapters are exported as they are: leave out --param-dtype.")
    saved = find_saved(args.run, args.step)
    if args.adapter:
        export_adapter(saved, target, args.model_name, args.tokenizer_name)
        return

    # --- model ---
    dtype = args.param_dtype or saved.settings["param_dtype"]
    model, weights, tokenizer, origin = load_weights(
        saved, args.model_name, args.tokenizer_name, getattr(torch, dtype)
    )
    model.load_state_dict(weights, strict=False, assign=True)  # assign: without a copy
    model.tie_weights()
    assert not any(tensor.is_meta for tensor in model.state_dict().values())
    if begin_token(tokenizer) is not None:
        tokenizer.add_bos_token = False  # as the model was trained
    model.config.use_cache = True  # training turns this off
    # transformers and inference servers stop at these tokens. The run's tokenizer may be another
    # one than that of the original model.
    stops = stop_tokens(model, tokenizer)
    model.config.eos_token_id = tokenizer.eos_token_id
    # Keeps the generation settings of the original model, such as its temperature.
    try:
        model.generation_config.validate(strict=True)  # save_pretrained() does the same
    except ValueError:
        model.generation_config = GenerationConfig.from_model_config(model.config)
    model.generation_config.use_cache = True  # a model without such settings has copied it
    model.generation_config.eos_token_id = stops if len(stops) > 1 else stops[0]

    # --- folder ---
    def fill(folder: Path) -> None:
        model.save_pretrained(folder, max_shard_size=args.max_shard_size)
        tokenizer.save_pretrained(folder)

    size = write_folder(target, fill)
    name = shlex.quote(str(target))
    print(
        f"{target}: {origin}\n"
        f"{model.num_parameters():,} parameters in {dtype}, {size / 1e6:,.1f} MB\n"
        f"to train it further: bash 04-fsdp/launch.sh --pretrained -m {name}\n"
        f"in Python: transformers.AutoModelForCausalLM.from_pretrained({str(target)!r})"
    )


def write_folder(target: Path, fill: Callable[[Path], None]) -> int:
    """Write a folder that is complete if it exists, even if the process is killed.

    fill: writes the files to the folder that it is given. Returns their bytes. Raises RunError if
    the folder cannot be written.
    """
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{target.name}-", dir=target.parent) as folder:
            unfinished = Path(folder) / target.name
            unfinished.mkdir()
            fill(unfinished)
            config = next(file for file in unfinished.iterdir() if file.suffix == ".json")
            for file in unfinished.glob("*.safetensors"):  # only the owner could read them
                file.chmod(config.stat().st_mode)
            unfinished.replace(target)
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise RunError(
            f"{target} could not be written ({reason}): make room, or give another folder."
        ) from error
    return sum(file.stat().st_size for file in target.iterdir())


def export_adapter(
    saved: SavedCheckpoint, target: Path, model_name: str | None, tokenizer_name: str | None
) -> None:
    """Write the adapters of a run with the variant lora in the format of PEFT.

    model_name, tokenizer_name: None for those of the run.
    """
    if "adapter" not in saved.settings:
        raise RunError(f"{saved.run} was not trained with the variant lora: leave out --adapter.")
    lora, sources = import_lora(), saved.settings["sources"]
    base = model_name or sources["model_name"]
    tokenizer = models.load_tokenizer(tokenizer_name or sources["tokenizer_name"] or base)
    config = models.load_config(base, tokenizer)
    model = lora.load_adapted(saved.path, saved.settings, base, config)
    size = write_folder(target, partial(lora.save_adapters, model, base))
    print(
        f"{target}: the adapters of step {saved.step} of {saved.run}, {size / 1e6:,.1f} MB\n"
        f"in Python: peft.AutoPeftModelForCausalLM.from_pretrained({str(target)!r}), which loads "
        f"the model from {base}"
    )


if __name__ == "__main__":
    launch.run(main)
