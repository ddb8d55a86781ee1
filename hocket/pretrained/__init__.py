"""Weights of published models: config.json and tensors, and their conversion. Tables define reading and writing."""
