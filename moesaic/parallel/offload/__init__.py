"""Training state that lives outside the device: on the host or in files, and copies that run beside the device's work.

ZeRO-Offload and SuperOffload, in three parts: where it is (`host_memory.py`), how it moves (`staging.py`), and
activations (`activations.py`). The optimizer that stands on them is `train/optimizers/_offloaded.py`.
"""
