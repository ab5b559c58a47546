"""GGUF files: header, config, tokenizer and tensors, read without loading the whole."""
