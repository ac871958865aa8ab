"""Shards captured from the target, read back for training."""
