"""Triton kernels, for what moves or touches data more than it computes.

Every kernel has a torch formula beside its caller, which is what CPUs run and what the kernel means. Modules here need
Triton, so they are imported where a CUDA tensor asks for them, never at the top of a file.

Kernels compute in fp32 and round once, when they store. Where an order of additions is stated, products and sums are
not fused either, so that a GPU gets the bits of a CPU. Nothing is added to memory that others add to, so all of them
are deterministic.
"""

IGNORED = -100
"""A target that counts for nothing in a loss, as in torch."""
