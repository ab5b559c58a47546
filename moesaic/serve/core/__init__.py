"""The engine: requests, scheduler, page pool, forward pass, sampler, speculative decoding, KV policies."""
