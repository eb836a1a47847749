"""The tokens of a chat, in which the name of a special token in a message is text."""

import functools
import re

from transformers import PreTrainedTokenizerBase

PRIVATE = 0x10F000  # characters from here on, for private use, stand for special tokens' names


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


def encode_chat(rendered: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the tokens of a conversation, or of a part, whose messages went through the above."""
    names, tokens = special_tokens(tokenizer), []
    for piece in re.split(f"([{''.join(names)}])", rendered):
        options = {"add_special_tokens": False, "split_special_tokens": piece in names}
        tokens += tokenizer.encode(names.get(piece, piece), verbose=False, **options)
    return tokens
