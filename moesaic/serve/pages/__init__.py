"""Pages of the KV cache outside of it: their names, their bytes, the tiers below the cache, and how they travel."""
