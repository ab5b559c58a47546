"""The experts of an MoE layer in Triton: routing, sorting, grouped matmuls for decode, mid-size and large batches."""
