"""Triton kernels for GPU platforms to share, by the contracts of headrace.platforms. No kernel is
written for one vendor; a name stands only where Triton and PyTorch have no other: Triton's intrinsics for dependent
launches (launch.py), the targets to compile for (compile_all.py), and `is_cuda`, which ROCm's tensors answer as well.
"""
