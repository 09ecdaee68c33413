"""AMD's library of tuned kernels (the package amd-aiter) behind the contracts of headrace.platforms.

rows.py says what it can serve, without importing it; vendor.py is the only place that does. The tests bind every call
that is made here to the signatures of the real package (tests/platforms/rocm/aiter_facts.json).
"""
