"""Anthropic's Messages API: a translation to a chat (`translate.py`), and of its outputs to blocks (`blocks.py`)."""
