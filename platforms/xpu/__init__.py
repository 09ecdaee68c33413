"""Intel GPUs: found through Level Zero, driven through torch.xpu; IPEX's kernels where they are, Triton's else."""
