"""Serve a model that does not fit: its experts, or all its layers, lie on disk or in host memory and come when needed.

`--offload experts`: attention, routers and shared experts stay; each layer has a bounded cache of its experts
(`expert_cache.py`), of which those with most load stay. Experts that are missing are fetched (`transfers.py`) from
where they are (`expert_store.py`), and those that the next layer's own router predicts ahead of time (`experts.py`).
`--offload weights`: whole layers are streamed through two buffers, one after the other (`weights.py`). Either way every
token has the bits it has when all is in memory: the kernels are the same, and sum in the same order (`slot_sums.py`).
"""
