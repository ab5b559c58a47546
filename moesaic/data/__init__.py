"""Training data: text to batches of tokens, in an order that is a pure function of the data, the recipe and the seed.

`moesaic prepare` goes through these files from top to bottom, once:

    sources.py              which files (or builtin texts and tasks) a source names; records.py reads one file of them
    dedupe.py               exact and near deduplication
    quality/                quality scores, one number per document
    tokenizer_training.py   train a BPE tokenizer, or load an existing one
    shards.py               token files with a table of documents and a manifest
    preparation/            all of that; killed at any moment, it resumes

A training run goes through these, each time:

    curricula/              which documents are easy, and when the harder ones are opened
    mixture.py              the plan: how much of which source, when; with interleaving.py and ordering.py
    stream.py               the batches
"""
