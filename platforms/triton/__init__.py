"""Triton kernels that every GPU platform shares: contracts of headrace.platforms, no vendor named here."""
