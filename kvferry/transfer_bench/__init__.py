"""Measure how fast KV blocks travel, beside what the same wire could do without us."""
