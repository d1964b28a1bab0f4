"""Production components that run CUDA kernels of csrc/, compiled on first use; see csrc/README.md."""
