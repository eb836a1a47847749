"""The tokens of a chat, in which the name of a special token in a message is text."""

import bisect
import datetime
import functools
import itertools
import re

from transformers import PreTrainedTokenizerBase

from common.errors import RunError

PRIVATE = 0x10F000  # characters from here on, for private use, stand for special tokens' names
UNKNOWN = chr(0x10FFFF)  # a character that merges with no other one
# Some templates write today's date. With a fixed one, a run can resume on another day. Llama's
# templates write this date if they do not know today's.
DATE = datetime.date(2024, 7, 26)


@functools.cache
def special_tokens(tokenizer: PreTrainedTokenizerBase) -> dict[str, str]:
    """Return the names of the special tokens, longest first, by a private character for each."""
    special = [str(token) for token in tokenizer.added_tokens_decoder.values() if token.special]
    special.sort(key=len, reverse=True)
    return {chr(PRIVATE + number): token for number, token in enumerate(special)}


def hide_special_tokens(message: str, tokenizer: PreTrainedTokenizerBase) -> str:
    """Return a message in which private characters stand for the names of special tokens."""
    for character, token in special_tokens(tokenizer).items():
        message = message.replace(token, character)
    return message


def render_chat(
    messages: list[dict[str, str]],
    tokenizer: PreTrainedTokenizerBase,
    add_generation_prompt: bool = False,
) -> str:
    """Return a conversation as text, as the chat template writes it on DATE.

    Raises RunError if the tokenizer has several templates by name and none of them is the default.
    """
    templates = tokenizer.chat_template
    if isinstance(templates, dict) and "default" not in templates:
        raise RunError(
            f"{tokenizer.name_or_path} has several chat templates ({', '.join(templates)}) and no "
            "default: leave one, as its chat_template.jinja."
        )
    template = re.sub(
        r"strftime_now\(\s*(['\"])(.*?)\1\s*\)",
        lambda call: repr(DATE.strftime(call[2])),
        tokenizer.get_chat_template(),
    )
    return tokenizer.apply_chat_template(
        messages,
        chat_template=template,
        add_generation_prompt=add_generation_prompt,
        tokenize=False,
    )


def encode_chat(parts: list[str], tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    """Return the tokens of each part of a rendered conversation.

    The parts are consecutive, and their messages went through hide_special_tokens. Each part is
    tokenized alone, so no token is in two of them, and a prompt has the same tokens with and
    without its answer. Some tokenizers would add a space to each part: see the function below.
    """
    if adds_space(tokenizer):
        return encode_at_once(parts, tokenizer)
    names = special_tokens(tokenizer)
    tokens = [[] for _ in parts]
    for part, part_tokens in zip(parts, tokens, strict=True):
        for piece in re.split(f"([{''.join(names)}])", part):
            options = {"add_special_tokens": False, "split_special_tokens": piece in names}
            part_tokens += tokenizer.encode(names.get(piece, piece), verbose=False, **options)
    return tokens


@functools.cache
def adds_space(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return whether a word has other tokens at the beginning of a text than later in it.

    For example, SentencePiece tokenizers, such as those of Llama 2 and Mistral, add a space there.
    """
    alone = tokenizer.encode("a", add_special_tokens=False)
    later = tokenizer.encode(f"{UNKNOWN}a", add_special_tokens=False)
    return later[-len(alone) :] != alone


def encode_at_once(parts: list[str], tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    """Tokenize all parts as one text. A token in two parts belongs to the second one."""
    names, rendered = special_tokens(tokenizer), "".join(parts)
    part_ends = list(itertools.accumulate(map(len, parts)))
    tokens = [[] for _ in parts]
    done = 0  # characters
    for token, start, end in encode_with_offsets(rendered, tokenizer):
        part_tokens = tokens[bisect.bisect_left(part_ends, end)]
        # A private character is one unknown token, or one token for each of its bytes.
        for character in rendered[done:end]:
            if character in names:
                text = UNKNOWN + names[character]  # not at the beginning, so without a space
                found = encode_with_offsets(text, tokenizer, split_special_tokens=True)
                part_tokens += [name_token for name_token, _, name_end in found if name_end > 1]
        if not any(character in names for character in rendered[start:end]):
            part_tokens.append(token)
        done = max(done, end)
    return tokens


def encode_with_offsets(
    text: str, tokenizer: PreTrainedTokenizerBase, **options: bool
) -> list[tuple[int, int, int]]:
    """Return each token, and the characters of the text where it starts and ends."""
    encoded = tokenizer(
        text, add_special_tokens=False, return_offsets_mapping=True, verbose=False, **options
    )
    offsets = encoded["offset_mapping"]
    return [(i, *where) for i, where in zip(encoded["input_ids"], offsets, strict=True)]
