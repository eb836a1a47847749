"""Train a tokenizer on the training part of a corpus and measure it on the evaluation part.

python 01-single-gpu/train_tokenizer.py my-tokenizer
"""

import argparse
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from common import cli, launch
from common.cli import at_least
from common.errors import RunError
from common.inputs.documents import find_documents

END_OF_TEXT = "<|endoftext|>"  # ends each document; its id is 0
UNKNOWN = "<|unknown|>"  # replaces words and characters that are not in the vocabulary
N_BYTES = 256
# A word includes the space before it, so that decoding restores the spaces. Scripts that write no
# spaces are split into characters.
NO_SPACES = r"\p{Han}\p{Hiragana}\p{Katakana}"
WORD = rf"[{NO_SPACES}]| ?[\w&&[^{NO_SPACES}]]+| ?[^\w\s]|\n+| +|\s"
CHARACTER = r"[\s\S]"
LONG_WORD = r"\S{1000}"
KINDS = {"bpe": "byte-level BPE", "word": "words", "character": "characters"}


def get_args() -> argparse.Namespace:
    parser = cli.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("target", type=Path, help="folder to write; it must not exist yet")
    add("-d", "--dataset-name", default="python-stdlib", help="preset, file, folder or hub id")
    add("--dataset-subset", help="configuration of a hub data set")
    add("--text-column", help="column that holds the text (default: text)")
    add("--kind", default="bpe", choices=list(KINDS), help="kind of token")
    add("--vocab-size", default=4096, type=at_least(3), help="limit of tokens")
    add("--min-frequency", default=2, type=at_least(1), help="least occurrences of a token")
    return parser.parse_args()


def main() -> None:
    args = get_args()
    target = args.target
    if target.exists():
        raise RunError(f"{target} already exists: give another folder, or delete it.")
    if args.kind == "bpe" and args.vocab_size <= N_BYTES:
        raise RunError(
            f"--vocab-size {args.vocab_size} is too small for the {N_BYTES} bytes and the "
            f"end-of-text token: give at least {N_BYTES + 1}."
        )

    documents = find_documents(args.dataset_name, args.dataset_subset, args.text_column)

    def read(held_out: bool) -> Iterator[str]:
        return (each.text for each in documents.read() if each.held_out == held_out)

    characters = Counter()
    for text, held_out, _ in documents.read():
        characters[held_out] += len(text)
    trained_on, evaluated_on = characters[False], characters[True]
    if not (trained_on and evaluated_on):
        raise RunError(f"{args.dataset_name} is too short to hold text out: give more text.")
    tokenizer = train(args.kind, args.vocab_size, args.min_frequency, read(held_out=False))
    counts = measure(tokenizer, read(held_out=True))

    # The folder gets its name when it is complete: whoever finds it can use it.
    unfinished = target.with_name(f".{target.name}-{os.getpid()}")
    tokenizer.save_pretrained(unfinished)
    unfinished.rename(target)
    known_tokens = 1 - counts["unknown tokens"] / counts["tokens"]
    known_characters = 1 - counts["unknown characters"] / evaluated_on
    print(
        f"{target}: {KINDS[args.kind]}, {len(tokenizer):,} tokens, trained on "
        f"{trained_on:,} characters of {args.dataset_name}\n"
        f"evaluated on {evaluated_on:,} other characters: "
        f"{counts['tokens'] / evaluated_on:.3f} tokens per character\n"
        f"the vocabulary covers {known_characters:.2%} of these characters and {known_tokens:.2%} "
        f"of the tokens; {counts['unknown tokens']:,} tokens are unknown\n"
        f"to train with it: python 01-single-gpu/train_llm.py --tokenizer-name {target}"
    )


def train(
    kind: str, vocab_size: int, min_frequency: int, texts: Iterator[str]
) -> PreTrainedTokenizerFast:
    """Return a tokenizer with at most vocab_size tokens; the same texts give the same one.

    min_frequency: how often a word, a character, or a pair that BPE merges must occur to become a
    token (BPE: https://arxiv.org/abs/1508.07909).
    """
    common = {"vocab_size": vocab_size, "min_frequency": min_frequency, "show_progress": False}
    special = {"bos_token": END_OF_TEXT, "eos_token": END_OF_TEXT}
    if kind == "bpe":
        tokenizer = Tokenizer(models.BPE())
        # Works on bytes, so that it can encode any text.
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
        # In text without spaces, such as DNA, a word may have a megabyte, and each merge would go
        # through all of it: cut long words for the training.
        cut = pre_tokenizers.Split(Regex(LONG_WORD), "isolated")
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([cut, byte_level])
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        trainer = trainers.BpeTrainer(
            special_tokens=[END_OF_TEXT], initial_alphabet=alphabet, **common
        )
    else:
        tokenizer = Tokenizer(models.WordLevel(unk_token=UNKNOWN))
        pattern = Regex(WORD if kind == "word" else CHARACTER)
        tokenizer.pre_tokenizer = pre_tokenizers.Split(pattern, "isolated")  # keeps all characters
        tokenizer.decoder = decoders.Fuse()  # the default puts spaces between tokens
        trainer = trainers.WordLevelTrainer(special_tokens=[END_OF_TEXT, UNKNOWN], **common)
        special["unk_token"] = UNKNOWN
    tokenizer.train_from_iterator(texts, trainer)
    if kind == "bpe":
        tokenizer.pre_tokenizer = byte_level
    options = {"tokenizer_object": tokenizer, "clean_up_tokenization_spaces": False}
    return PreTrainedTokenizerFast(**options, **special)


def measure(tokenizer: PreTrainedTokenizerFast, texts: Iterator[str]) -> Counter[str]:
    """Count the tokens, the unknown tokens, and the characters in unknown tokens."""
    counts = Counter()
    for text in texts:
        encoding = tokenizer.backend_tokenizer.encode(text, add_special_tokens=False)
        counts["tokens"] += len(encoding)
        pairs = zip(encoding.ids, encoding.offsets, strict=True)
        unknown = [end - start for i, (start, end) in pairs if i == tokenizer.unk_token_id]
        counts["unknown tokens"] += len(unknown)
        counts["unknown characters"] += sum(unknown)
    return counts


if __name__ == "__main__":
    launch.run(main)
