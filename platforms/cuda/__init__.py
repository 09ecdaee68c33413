"""NVIDIA GPUs: probing and opening. The kernels are in headrace.platforms.triton, streams, graphs and process groups
in headrace.platforms.torch_device."""
