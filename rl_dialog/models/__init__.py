"""Policies: any causal LM with optional value heads, and their checkpoints."""
