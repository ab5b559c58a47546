"""What a run shows and leaves behind: metrics, events, progress, plots."""
