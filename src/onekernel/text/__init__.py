"""Strings and token ids: tokenizer, chat template, streaming detokenizer, stop strings."""
