"""Generate text with the newest checkpoint of a run, even while it trains, or with any model.

python 01-single-gpu/generate.py outputs/my-run --prompt "    def"
"""

import argparse
import json
import signal
import sys
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path

import torch
from transformers import GenerationConfig

from common import cli, launch
from common.cli import at_least, between
from common.errors import RunError
from common.inputs.models import NO_MASK, n_positions

from chat import encode_chat, hide_special_tokens, render_chat
from trained_model import TrainedModel, check_output, load_trained, stop_tokens


def get_args() -> argparse.Namespace:
    # A prompt may begin with @.
    parser = cli.ArgumentParser(description=__doc__, argument_files=False)
    add = parser.add_argument_group("model").add_argument
    add("trained", help="folder of a run or a model, or hub id")
    add("-m", "--model-name", help="preset, folder or hub id (default: the run's own)")
    add("--tokenizer-name", help="folder or hub id (default: the run's or the model's own)")
    add("--step", type=at_least(1), help="step of the run's checkpoint (default: the last one)")
    add = parser.add_mutually_exclusive_group().add_argument
    add("-p", "--prompt", help="text to continue (default: each line of stdin)")
    add("--prompts", type=Path, help="file with one prompt per line")
    add = parser.add_argument_group("text").add_argument
    add("--chat", action="store_true", help="answer each prompt, through the chat template")
    add("-n", "--num-samples", default=1, type=at_least(1), help="texts per prompt")
    add("-b", "--batch-size", default=8, type=at_least(1), help="limit of texts per batch")
    add("--max-new-tokens", default=64, type=at_least(1), help="limit of tokens after the prompt")
    add("--output", type=Path, help="JSON Lines file to write; it must not exist yet")
    add = parser.add_argument_group("sampling").add_argument
    add("--temperature", default=0.7, type=at_least(0.0), help="divide logits by this; 0: greedy")
    add("--top-k", default=40, type=at_least(0), help="most likely tokens to sample from; 0: all")
    share = between(1e-6, 1.0)
    add("--top-p", default=1.0, type=share, help="total probability of these tokens; 1: all")
    penalty = at_least(1e-6)
    add("--repetition-penalty", default=1.0, type=penalty, help="for repeated tokens; 1: none")
    add("--seed", default=0, type=at_least(0), help="seed for sampling")
    add("--no-cache", action="store_true", help="recompute the keys and values for each token")
    return parser.parse_args()


def main() -> None:
    args = get_args()
    greedy = args.temperature == 0
    if greedy and args.num_samples > 1:
        raise RunError("--temperature 0 always gives the same text: give --num-samples 1.")
    check_output(args.output)

    # --- model ---
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    trained = load_trained(args.trained, args.model_name, args.tokenizer_name, args.step)
    model, tokenizer = trained.model.to(device), trained.tokenizer
    if args.chat and not tokenizer.chat_template:
        raise RunError(
            f"{tokenizer.name_or_path} has no chat template: leave out --chat, or give "
            "--tokenizer-name a folder with a tokenizer and a chat_template.jinja."
        )
    if model.config._attn_implementation == NO_MASK:  # which ignores the padding mask
        model.set_attn_implementation("sdpa")
    stops = stop_tokens(model, tokenizer)
    # These ids are no tokens. The vocabulary can have gaps, and is often rounded up.
    unused = set(range(model.config.vocab_size)) - set(tokenizer.get_vocab().values())
    # This replaces the other generation settings of a model folder.
    sampling = {"temperature": args.temperature, "top_k": args.top_k, "top_p": args.top_p}
    model.generation_config = GenerationConfig(
        do_sample=not greedy,
        **({} if greedy else sampling),
        repetition_penalty=args.repetition_penalty,
        max_new_tokens=args.max_new_tokens,
        use_cache=not args.no_cache,
        eos_token_id=stops,
        pad_token_id=tokenizer.eos_token_id,  # after a text that ends early
        suppress_tokens=sorted(unused) or None,
        remove_invalid_values=True,  # in case a diverged model gives NaN
    )
    how = "greedy: always the most likely token" if greedy else f"sampled with seed {args.seed}"
    torch.manual_seed(args.seed)

    # --- text ---
    if args.prompt is None and args.prompts is None and sys.stdin.isatty():
        print("Type one prompt per line, and Ctrl-D at the end.", file=sys.stderr)
    prompts = read_prompts(args)
    if trained.begin is not None and not args.chat:  # a chat template has it itself
        how += f"; each prompt begins with {tokenizer.bos_token}, as the tokenizer says"
    print(f"{trained.origin}; {how}", file=sys.stderr)
    for sample in answer(prompts, trained, args):
        if args.output:
            with args.output.open("a", encoding="utf-8") as file:
                file.write(json.dumps(sample) + "\n")
            continue
        if len(prompts) * args.num_samples > 1:
            print(f"--- sample {sample['sample']} of {sample['prompt']!r}")
        print(sample["text"], flush=True)  # a pipe would buffer it otherwise


def read_prompts(args: argparse.Namespace) -> list[str]:
    """Return --prompt, or the lines of --prompts or of stdin."""
    if args.prompt is not None:
        return [args.prompt]
    try:
        text = args.prompts.read_text(encoding="utf-8-sig") if args.prompts else sys.stdin.read()
    except (OSError, UnicodeDecodeError) as error:
        raise RunError(f"Cannot read the prompts ({error}): give a UTF-8 text file.") from error
    return text.removesuffix("\n").split("\n")


def answer(prompts: list[str], trained: TrainedModel, args: argparse.Namespace) -> Iterator[dict]:
    """Yield a record of each generated text. Raises RunError for a prompt that is too long."""
    model, tokenizer = trained.model, trained.tokenizer
    stops = model.generation_config.eos_token_id
    positions = n_positions(model.config)
    rows = []
    for prompt in prompts:
        ids = encode_prompt(prompt, trained, args.chat)
        if (room := positions - len(ids)) < args.max_new_tokens:
            remedy = f"give --max-new-tokens {room} or less" if room > 0 else "shorten the prompt"
            raise RunError(
                f"The prompt {prompt[:30]!r} has {len(ids)} tokens and the model has {positions} "
                f"positions: {remedy}."
            )
        rows += [ids] * args.num_samples
    for start in range(0, len(rows), args.batch_size):
        batch = rows[start : start + args.batch_size]
        input_ids, mask = (tensor.to(model.device) for tensor in pad(batch))
        tokens = model.generate(input_ids, attention_mask=mask)[:, input_ids.shape[1] :]
        for number, (ids, new) in enumerate(zip(batch, tokens.tolist(), strict=True), start):
            new = list(takewhile(lambda token: token not in stops, new))
            prompt, sample = divmod(number, args.num_samples)
            text = tokenizer.decode(new if args.chat else ids + new, skip_special_tokens=True)
            yield {
                "prompt": prompts[prompt],
                "sample": sample + 1,
                "new_tokens": len(new),
                "text": text,
            }


def encode_prompt(prompt: str, trained: TrainedModel, chat: bool) -> list[int]:
    """Return a prompt's tokens; in a chat, the name of a special token is text, as in training."""
    tokenizer = trained.tokenizer
    text = prompt.encode(errors="replace").decode()  # bytes that are not UTF-8
    if chat:
        messages = [{"role": "user", "content": hide_special_tokens(text, tokenizer)}]
        rendered = render_chat(messages, tokenizer, add_generation_prompt=True)
        return encode_chat([rendered], tokenizer)[0]
    begin = [] if trained.begin is None else [trained.begin]
    # An empty prompt starts a new document: in training, one follows each end-of-text token.
    return begin + tokenizer.encode(text, add_special_tokens=False) or [tokenizer.eos_token_id]


def pad(rows: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the padded ids and their attention mask, int64 [rows, longest row] each.

    The padding is on the left, so that all rows continue at the same position. It repeats the
    row's first token, because the repetition penalty of transformers 5.17 also counts padding.
    """
    missing = [max(map(len, rows)) - len(ids) for ids in rows]
    input_ids = [ids[:1] * n + ids for n, ids in zip(missing, rows, strict=True)]
    mask = [[0] * n + [1] * len(ids) for n, ids in zip(missing, rows, strict=True)]
    return torch.tensor(input_ids), torch.tensor(mask)


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # exit silently if the reader of a pipe stops
    sys.stdin.reconfigure(errors="replace")
    launch.run(main)
