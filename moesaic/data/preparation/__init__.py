"""From sources to token shards."""
