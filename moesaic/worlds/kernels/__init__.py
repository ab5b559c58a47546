"""Write a Triton kernel, judged by correctness and speed (MSKernelBench): tasks, rules, and trials in the sandbox."""
