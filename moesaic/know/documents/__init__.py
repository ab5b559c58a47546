"""From files to chunks: readers of each format, archives taken apart with care, and text cut where it may be quoted."""
