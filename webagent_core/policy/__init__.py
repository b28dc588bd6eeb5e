"""A policy that a CPU can train: a word-level tokenizer made from what the pages say, and a two-layer causal LM."""
