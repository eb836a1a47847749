"""What a reader brings: texts, tokens, tokenizers and models; ../README.md is a map."""
