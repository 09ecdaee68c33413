"""NVIDIA GPUs: probing, streams, graphs, NCCL. The kernels are in headrace.platforms.triton."""
