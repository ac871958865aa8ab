"""Paired ratios, intervals, tables, pictures."""
