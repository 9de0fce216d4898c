"""Benchmarks: problems that are data, contestants that alternate, rows that are verified before they are timed."""
