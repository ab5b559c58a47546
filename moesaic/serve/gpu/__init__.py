"""The engine on a GPU: decode steps as CUDA graphs, the next one queued while the last one runs."""
