"""Train the built-in tokenizer (byte-level BPE, 4096 tokens) on the built-in corpus.

python common/presets/train_tokenizer.py common/presets/tokenizer
"""

import sys
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from common.launch import run
from common.sources import BUILT_IN, find_source

VOCABULARY_SIZE = 4096
END_OF_TEXT = "<|endoftext|>"


def train_tokenizer(folder: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json to the folder. Takes a few seconds."""
    tokenizer = Tokenizer(models.BPE())
    # Bytes, not characters, so that no text at all is outside the vocabulary.
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    documents, _ = find_source(BUILT_IN, subset=None, text_column=None).load()
    tokenizer.train_from_iterator(documents["text"], trainer)
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        clean_up_tokenization_spaces=False,
    ).save_pretrained(folder)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(f"usage: python {sys.argv[0]} FOLDER")
    run(lambda: train_tokenizer(Path(sys.argv[1])))
