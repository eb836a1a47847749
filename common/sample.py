"""A text that a model writes, to see what it has learned."""

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

PROMPTS = {"python-stdlib": "    def"}


@torch.no_grad()
def sample_text(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    device: torch.device,
    dataset_name: str,
    length: int,
    seed: int,
) -> tuple[str, str]:
    """Return a prompt, and it with what the model goes on with, up to `length` or 256 tokens.

    The prompt is the end-of-text token, after which a document begins; for the built-in corpus,
    most of whose documents begin with many lines of comment, it is the start of a method.
    """
    torch.manual_seed(seed)
    prompt = PROMPTS.get(dataset_name, tokenizer.eos_token)
    encoded = tokenizer(prompt, add_special_tokens=False, return_tensors="pt").to(device)
    if encoded["input_ids"].shape[1] >= length:
        return prompt, prompt
    model.eval()
    with torch.compiler.set_stance("force_eager"):  # every length would be compiled anew
        tokens = model.generate(
            encoded["input_ids"],
            attention_mask=encoded["attention_mask"],
            max_length=min(length, 256),
            do_sample=True,
            temperature=0.7,
            top_k=40,
            remove_invalid_values=True,  # a run that diverged still ends
            use_cache=True,
            pad_token_id=tokenizer.eos_token_id,
        )
    return prompt, tokenizer.decode(tokens[0], skip_special_tokens=True)
