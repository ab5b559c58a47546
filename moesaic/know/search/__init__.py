"""Finding chunks: by words, by vectors, by the graph of chunks and entities, and by several of these together."""
