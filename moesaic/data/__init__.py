"""From raw text to batches of tokens, in an order that is a pure function of the data, the recipe and the seed.

`moesaic prepare` goes through these files from top to bottom, once:

    sources.py              which files (or builtin texts and tasks) a source names; records.py reads one file of them
    dedupe.py               leave out what was said before
    quality/                a number for each document, better ones higher
    tokenizer_training.py   make a tokenizer, or take an existing one
    shards.py               token files with a table of documents and a manifest
    prepare.py              all of that, killed at any moment and taken up again

A training run goes through these, each time:

    curricula/              which documents are easy, and when the harder ones are opened
    mixture.py              the plan: how much of what, when; rotation.py interleaves, ordering.py shuffles and sorts
    stream.py               the batches
"""
