"""Questions and answers -> chat template -> tokens and labels -> packed sequences."""

import argparse
import ast
import dataclasses
import logging
import sys
import sysconfig
import textwrap
from itertools import chain
from pathlib import Path

import torch
import xxhash
from jinja2 import TemplateError
from torch.utils.data import Dataset
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from common.data import IGNORED
from common.errors import RunError
from common.inputs.documents import BUILT_IN, NOT_CODE, is_held_out, load_table
from common.inputs.models import tokenizer_checksum
from common.variants import ROOT

sys.path.append(str(ROOT / "01-single-gpu"))
from chat import encode_chat, hide_special_tokens, render_chat

logger = logging.getLogger(__name__)

KEYS = ("input_ids", "labels", "position_ids")
COLUMNS = "question,answer"  # of a table without a column "messages"
Messages = list[dict[str, str]]  # of one conversation: {"role": ..., "content": ...}
Rows = list[tuple[int, Messages]]  # of a table, with the numbers of the rows, from 1 on


@dataclasses.dataclass
class Conversations(Dataset):
    """Packed sequences. Item: a tensor for each of KEYS, int64 [seq_length].

    rows: int32 [sequences, 3, seq_length]. tokens_per_byte: of the answers, for bits per byte.
    tokenizer_checksum: of the tokenizer that made the tokens.
    """

    rows: torch.Tensor
    tokens_per_byte: float
    tokenizer_checksum: str | None = None

    @property
    def digest(self) -> str:
        return xxhash.xxh3_64_hexdigest(self.rows.numpy().tobytes())

    def sample(self, limit: int) -> "Conversations":
        """Return at most `limit` of the sequences, evenly spaced, always the same ones."""
        count = min(limit, len(self))
        return dataclasses.replace(self, rows=self.rows[torch.arange(count) * len(self) // count])

    def pad_to_multiple(self, multiple: int) -> "Conversations":
        """Append sequences without labels until the number of sequences divides by `multiple`."""
        padding = self.rows[:1].repeat(-len(self) % multiple, 1, 1)
        padding[:, KEYS.index("labels")] = IGNORED
        return dataclasses.replace(self, rows=torch.cat([self.rows, padding]))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return dict(zip(KEYS, self.rows[index].long(), strict=True))


def load_conversations(
    args: argparse.Namespace, tokenizer: PreTrainedTokenizerBase
) -> tuple[Conversations, Conversations]:
    """Return the training and the evaluation conversations of args.dataset_name.

    Raises RunError for an unknown data set, a missing column, a row that is no conversation, a
    conversation that does not fit in args.seq_length tokens, or a tokenizer without a chat
    template, or with one that refuses a row. Of the built-in example, only the conversations that
    fit are used.
    """
    is_built_in, name = args.dataset_name == BUILT_IN, args.dataset_name
    seq_length = args.seq_length
    checksum = tokenizer_checksum(tokenizer)
    parts, described = [], []
    for rows in stdlib_functions() if is_built_in else read_table(args):
        encoded = [encode_row(number, messages, name, tokenizer) for number, messages in rows]
        sizes = [len(input_ids) for input_ids, _ in encoded]
        fitting = [each for each, size in zip(encoded, sizes, strict=True) if size <= seq_length]
        if not fitting or (len(fitting) < len(encoded) and not is_built_in):
            raise RunError(
                f"{len(encoded) - len(fitting)} of {len(encoded)} conversations of {name} do not "
                f"fit in {seq_length} tokens (the longest has {max(sizes)}): give a larger "
                "--seq-length, or shorten the answers."
            )
        sequences = pack(fitting, seq_length)
        labels = sequences[:, KEYS.index("labels")]
        answers = labels[labels != IGNORED]
        n_bytes = len(tokenizer.decode(answers, skip_special_tokens=True).encode())
        parts.append(Conversations(sequences, len(answers) / n_bytes, checksum))
        n_tokens = sum(len(input_ids) for input_ids, _ in fitting)
        described.append(
            f"{len(fitting):,} conversations, {len(answers) / n_tokens:.0%} of the tokens are "
            f"answers, {len(sequences):,} sequences, {1 - n_tokens / labels.numel():.0%} padding"
        )
    logger.info("training: {}\nevaluation: {}".format(*described))
    return parts[0], parts[1]


# --- tokens, labels, sequences ---


def encode_row(
    number: int, messages: Messages, name: str, tokenizer: PreTrainedTokenizerBase
) -> tuple[list[int], list[int]]:
    """Return what encode returns; raise RunError if the chat template refuses the row."""
    try:
        return encode(messages, tokenizer)
    except (TemplateError, TypeError) as error:  # for example: None is no text
        raise RunError(
            f"Row {number} of {name} cannot be rendered with the chat template of "
            f"{tokenizer.name_or_path}: {str(error).rstrip('.')}. Change the roles of the row's "
            "messages, or use another template."
        ) from error


def encode(messages: Messages, tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[int]]:
    """Return the tokens of a conversation up to its last answer, and the label of each token.

    The label of an answer's token is the token itself. All other labels are IGNORED. A prompt is
    rendered and tokenized as it is for generation, so training and generation agree. The name of a
    special token in a message is text.
    """
    name = tokenizer.name_or_path
    if not tokenizer.chat_template:
        raise RunError(
            f"The tokenizer of {name} has no chat template: give --tokenizer-name a folder with a "
            "tokenizer and a chat_template.jinja."
        )
    messages = [{**m, "content": hide_special_tokens(m["content"], tokenizer)} for m in messages]
    parts, done = [], ""  # prompt, answer, prompt, answer, ...
    for turn, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        # Some templates raise an error for a role, such as system, or for an order of roles.
        prompt = render_chat(messages[:turn], tokenizer, add_generation_prompt=True)
        answered = render_chat(messages[: turn + 1], tokenizer)
        if not (prompt.startswith(done) and answered.startswith(prompt)):
            raise RunError(
                f"The chat template of {name} changes earlier messages when "
                "later ones follow: use another template, or conversations with one answer."
            )
        parts += [prompt[len(done) :], answered[len(prompt) :]]
        done = answered
    tokens = encode_chat(parts, tokenizer)
    prompts, answers = tokens[::2], tokens[1::2]
    labels = [
        [IGNORED] * len(prompt) + answer for prompt, answer in zip(prompts, answers, strict=True)
    ]
    return list(chain(*tokens)), list(chain(*labels))


def pack(encoded: list[tuple[list[int], list[int]]], seq_length: int) -> torch.Tensor:
    """Return int32 [sequences, 3, seq_length]: in each, one or several conversations and padding.

    Best fit, longest first: each conversation goes where the least room remains. Its positions
    begin at 0. From this, transformers makes the mask that keeps attention within a conversation.
    """
    by_room = [[] for _ in range(seq_length + 1)]  # sequences by how many more tokens fit in them
    for conversation in sorted(encoded, key=lambda each: -len(each[0])):
        size = len(conversation[0])
        assert size <= seq_length
        room = next((room for room in range(size, seq_length) if by_room[room]), seq_length)
        sequence = by_room[room].pop() if by_room[room] else []
        sequence.append(conversation)
        by_room[room - size].append(sequence)
    sequences = list(chain(*by_room))
    rows = torch.empty(len(sequences), len(KEYS), seq_length, dtype=torch.int32)
    for row, conversations in zip(rows, sequences, strict=True):
        n_padding = seq_length - sum(len(input_ids) for input_ids, _ in conversations)
        conversations.append(([0] * n_padding, [IGNORED] * n_padding))
        input_ids, labels = (list(chain(*part)) for part in zip(*conversations, strict=True))
        positions = [i for each, _ in conversations for i in range(len(each))]
        row[:] = torch.tensor([input_ids, labels, positions])
    return rows


# --- attention ---


def keep_apart(model: PreTrainedModel, full_model: PreTrainedModel | None) -> None:
    """Give models an attention whose mask keeps the conversations of a sequence apart.

    full_model: the same model with its weights, or None on ranks that do not have them. Raises
    RunError if a conversation changes what it computes for the next one. Some models, such as OPT
    and Bloom, make their mask without the positions, and some have layers without attention.
    """
    for each in filter(None, (model, full_model)):
        if each.config._attn_implementation != "eager":  # else it is the only one of the model
            each.set_attn_implementation("sdpa")
    if full_model is not None and mixes_conversations(full_model):
        raise RunError(
            f"Models of the type {full_model.config.model_type} mix the conversations in a "
            "sequence: choose another one with -m, such as GPT-2, Llama, Qwen3 or Gemma 2."
        )


@torch.no_grad()
@torch.compiler.set_stance("force_eager")  # or it would compile for the shape of this trial
def mixes_conversations(model: PreTrainedModel) -> bool:
    """Return whether the logits of a conversation depend on the conversation before it."""
    was_training = model.training
    model.eval()  # without dropout
    first, other, second = torch.arange(2, 26).view(3, 8) % model.config.vocab_size
    positions = torch.arange(8).repeat(2)[None]
    logits = []
    for before in (first, other):
        input_ids = torch.cat([before, second])[None].to(model.device)
        found = model(input_ids=input_ids, position_ids=positions.to(model.device)).logits
        logits.append(found[0, 8:])
    model.train(was_training)
    # Other tokens can change the order of sums in a mixture of experts, and so the rounding.
    rounding = max(1e-5, torch.finfo(found.dtype).eps)
    change = (logits[0] - logits[1]).abs().mean()
    return (change > rounding * logits[0].abs().mean()).item()


# --- sources ---


def stdlib_functions() -> tuple[Rows, Rows]:
    """Return conversations for training and evaluation from functions of the standard library.

    The question is the function's head and the first line of its docstring, the answer is the rest
    of its body. The files for evaluation are those that chapter 1 evaluates on.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    paths = [path.relative_to(root).as_posix() for path in root.rglob("*.py")]
    parts, seen = ([], []), set()
    for path in sorted(path for path in paths if not NOT_CODE.search(path)):
        source = (root / path).read_text(encoding="utf-8", errors="replace")
        try:
            tree = ast.parse(source)
        except (SyntaxError, ValueError):
            continue
        lines = source.splitlines()
        for node in ast.walk(tree):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            docstring = ast.get_docstring(node)
            if not docstring or len(node.body) == 1 or node.lineno == node.body[0].lineno:
                continue
            head = lines[node.lineno - 1 : node.body[0].lineno - 1]
            body = lines[node.body[0].end_lineno : node.end_lineno]
            first_line = f'    """{docstring.splitlines()[0]}"""'
            question = textwrap.dedent("\n".join(head)) + f"\n{first_line}"
            answer = textwrap.indent(textwrap.dedent("\n".join(body)).strip("\n"), "    ")
            if answer and (question, answer) not in seen:
                seen.add((question, answer))
                parts[is_held_out(path)].append((len(seen), as_messages(question, answer)))
    return parts


def as_messages(question: str, answer: str) -> Messages:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def read_table(args: argparse.Namespace) -> tuple[Rows, Rows]:
    """Return the conversations of a table: of its split "validation" for evaluation, if it has one.

    Without that split, a checksum selects one conversation in 20, and at least one.
    """
    name = args.dataset_name
    table = load_table(name, args.dataset_subset)
    train = read_rows(table["train"], name, args.text_column)
    if "validation" in table:
        return train, read_rows(table["validation"], name, args.text_column)
    held_out = [is_held_out(str(messages[:-1])) for _, messages in train]
    held_out[0] |= not any(held_out)
    parts = ([], [])
    for row, is_out in zip(train, held_out, strict=True):
        parts[is_out].append(row)
    if not parts[0]:
        raise RunError(
            f"{name} has only one conversation: give at least two with different questions."
        )
    return parts


def read_rows(rows, name: str, text_column: str | None) -> Rows:
    """Return the rows of one split, a datasets.Dataset, as conversations.

    text_column: "QUESTION,ANSWER", or the name of one column of messages. The default is the column
    "messages", or otherwise COLUMNS.
    """
    known = rows.column_names
    columns = (text_column or ("messages" if "messages" in known else COLUMNS)).split(",")
    if missing := [column for column in columns if column not in known]:
        raise RunError(
            f"{name} has no column {missing[0]!r}: give --text-column QUESTION,ANSWER, or one "
            f"column of messages, from: {', '.join(known)}."
        )
    values = zip(*(rows[column] for column in columns), strict=True)
    conversations = [as_messages(*v) if len(v) == 2 else v[0] for v in values]
    numbered = list(enumerate(conversations, start=1))
    for number, messages in numbered:
        if not is_conversation(messages):
            raise RunError(
                f"Row {number} of {name} is no conversation: give each row a question and an "
                "answer, or messages with role and content, one of them of the assistant."
            )
        if messages[0]["role"] == "assistant":
            raise RunError(
                f"Row {number} of {name} begins with an answer: give it a question, or remove the "
                "first message."
            )
    return numbered


def is_conversation(messages: object) -> bool:
    if not isinstance(messages, list) or not all(isinstance(m, dict) for m in messages):
        return False
    texts = [(message.get("role"), message.get("content")) for message in messages]
    is_text = all(isinstance(t, str) and t.strip() for pair in texts for t in pair)
    return is_text and "assistant" in [role for role, _ in texts[1:]]
