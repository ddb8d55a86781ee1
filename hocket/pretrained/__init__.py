"""Weights of published models: their configuration and tensors, and how hocket has them. Read and written by tables."""
