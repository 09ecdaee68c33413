"""AMD GPUs: probing, RCCL, AITER. Streams, memory and graphs are in headrace.platforms.torch_device, the other kernels
in headrace.platforms.triton."""
