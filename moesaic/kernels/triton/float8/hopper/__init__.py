"""Float8 matmuls of many rows on Hopper: one warp copies, two warpgroups multiply and scale in turns."""
