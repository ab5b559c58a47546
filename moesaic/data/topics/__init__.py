"""What prepared documents are about: topics found in token shards as they are, and a column with each document's.

    moesaic topics out/data --topics 32
    data: {topics: {topics: 32}, mix_by: topic}

`corpus` reads shards in blocks, `sampler` goes over them by the rule of `saberlda` or `warplda`, `find` goes from a
directory to columns and names.
"""
