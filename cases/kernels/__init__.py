"""``harness build`` for the kernels of csrc/."""
