"""Write text with a model: a run's newest checkpoint, also while it trains, or a model's folder.

python 01-single-gpu/generate.py outputs/my-run --prompt "    def"
"""

import argparse
import json
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from transformers import GenerationConfig

from common import cli, distributed
from common.checkpoint.trained import TrainedModel, load_trained
from common.cli import InputError, above_zero, at_least, share


def get_args() -> argparse.Namespace:
    parser = cli.ArgumentParser(description=__doc__)
    add = parser.add_argument_group("model").add_argument
    add("trained", help="folder of a run or of a model, or hub id")
    add("-m", "--model-name", default="gpt2-tiny", help="of a run, as in its training")
    add("--tokenizer-name", help="folder or hub id (if absent: the model's)")
    add("--step", type=at_least(1), help="of a kept checkpoint (if absent: last)")
    add = parser.add_mutually_exclusive_group().add_argument
    add("-p", "--prompt", help="text to go on with (if absent: stdin's lines)")
    add("--prompts", type=Path, help="file of prompts, one on each line")
    add = parser.add_argument_group("text").add_argument
    add("-n", "--num-samples", default=1, type=at_least(1), help="texts for each prompt")
    add("-b", "--batch-size", default=8, type=at_least(1), help="most texts at once")
    add("--max-new-tokens", default=64, type=at_least(1), help="most tokens after the prompt")
    add("--output", type=Path, help="file for JSON lines; must not exist yet")
    add = parser.add_argument_group("the next token").add_argument
    add("--temperature", default=0.7, type=at_least(0.0), help="divides the logits; 0: greedy")
    add("--top-k", default=40, type=at_least(0), help="draw from so many tokens; 0: from all")
    add("--top-p", default=1.0, type=share, help="draw from this share of them; 1: from all")
    add("--repetition-penalty", default=1.0, type=above_zero, help="of tokens seen; 1: none")
    add("--seed", default=0, type=at_least(0), help="of what is drawn")
    add("--no-cache", action="store_true", help="compute all keys and values each time")
    return parser.parse_args()


def main() -> None:
    args = get_args()
    greedy = args.temperature == 0
    if greedy and args.num_samples > 1:
        raise InputError("--temperature 0 is greedy: all --num-samples would be the same text.")
    cli.check_output(args.output)

    # --- model ---
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    trained = load_trained(args.trained, args.model_name, args.tokenizer_name, args.step)
    model, tokenizer = trained.model.to(device), trained.tokenizer
    model.set_attn_implementation("sdpa")  # it knows masks, training's does not
    # All that decides on a token: what a model's folder says of it does not count here.
    drawn = {"temperature": args.temperature, "top_k": args.top_k, "top_p": args.top_p}
    model.generation_config = GenerationConfig(
        do_sample=not greedy,
        **({} if greedy else drawn),
        repetition_penalty=args.repetition_penalty,
        max_new_tokens=args.max_new_tokens,
        use_cache=not args.no_cache,
        eos_token_id=tokenizer.eos_token_id,  # a document in training ends with it
        pad_token_id=tokenizer.eos_token_id,  # after a text that ends before the others
        suppress_tokens=[*range(len(tokenizer), model.config.vocab_size)] or None,  # not in use
        remove_invalid_values=True,  # a run that diverged still ends
    )
    how = "greedy: always the likeliest token" if greedy else f"drawn with seed {args.seed}"
    torch.manual_seed(args.seed)

    # --- text ---
    at_terminal = args.prompt is None and args.prompts is None and sys.stdin.isatty()
    ask = "; give a prompt on each line, Ctrl-D ends" if at_terminal else ""
    print(f"{trained.origin}; {how}{ask}", file=sys.stderr)
    for prompts in read_prompts(args):
        try:
            for facts in answer(prompts, trained, args):
                if args.output:
                    with args.output.open("a", encoding="utf-8") as file:
                        file.write(json.dumps(facts) + "\n")
                    continue
                if len(prompts) * args.num_samples > 1:
                    print(f"--- sample {facts['sample']} of {facts['prompt']!r}")
                print(facts["text"], flush=True)  # to a pipe too, as soon as it is there
        except InputError as error:
            if not at_terminal:
                raise
            print(error, file=sys.stderr)  # there is somebody who can give another line


def read_prompts(args: argparse.Namespace) -> Iterator[list[str]]:
    """Yield what is answered at once: the prompt, all of a file, or a line of stdin."""
    if args.prompt is not None:
        yield [args.prompt]
    elif args.prompts:
        try:
            yield args.prompts.read_text(encoding="utf-8").removesuffix("\n").split("\n")
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"{args.prompts} cannot be read: {error}.") from error
    else:
        yield from ([line.rstrip("\n")] for line in sys.stdin)


def answer(prompts: list[str], trained: TrainedModel, args: argparse.Namespace) -> Iterator[dict]:
    """Yield the facts of each text. Raises InputError for a prompt that is too long."""
    model, tokenizer, end = trained.model, trained.tokenizer, trained.tokenizer.eos_token_id
    positions = getattr(model.config, "max_position_embeddings", None) or 2**31
    rows = []
    for prompt in prompts:
        text = prompt.encode(errors="replace").decode()  # a terminal's bytes that are no UTF-8
        # After the end of a document the next one begins.
        ids = tokenizer(text, add_special_tokens=False)["input_ids"] or [end]
        if (room := positions - len(ids)) < args.max_new_tokens:
            way_out = f"give --max-new-tokens {room} or less" if room > 0 else "give a shorter one"
            what = f"The prompt {prompt[:30]!r} has {len(ids)} tokens"
            raise InputError(f"{what} and the model {positions} positions: {way_out}.")
        rows += [ids] * args.num_samples
    for start in range(0, len(rows), args.batch_size):
        batch = rows[start : start + args.batch_size]
        input_ids, mask = (tensor.to(model.device) for tensor in pad(batch))
        tokens = model.generate(input_ids, attention_mask=mask)[:, input_ids.shape[1] :]
        for number, (ids, new) in enumerate(zip(batch, tokens.tolist(), strict=True), start):
            new = new[: new.index(end)] if end in new else new
            prompt, sample = divmod(number, args.num_samples)
            facts = {"prompt": prompts[prompt], "sample": sample + 1, "new_tokens": len(new)}
            yield facts | {"text": tokenizer.decode(ids + new, skip_special_tokens=True)}


def pad(rows: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the ids of rows of several lengths and their mask, int64 [rows, longest] each.

    The padding is on the left, so that all go on at the same place. It is the row's own first
    token: the repetition penalty of transformers 5.17 would count any other as one of the text.
    """
    missing = [max(map(len, rows)) - len(ids) for ids in rows]
    input_ids = [ids[:1] * n + ids for n, ids in zip(missing, rows, strict=True)]
    mask = [[0] * n + [1] * len(ids) for n, ids in zip(missing, rows, strict=True)]
    return torch.tensor(input_ids), torch.tensor(mask)


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # who reads the text may stop, as head does
    sys.stdin.reconfigure(errors="replace")
    distributed.run(main)
