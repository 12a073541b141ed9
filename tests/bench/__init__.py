"""Benchmarks that `stepwell bench` runs; each prints one JSON object with stable row names (design, section 11)."""
