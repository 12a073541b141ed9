"""Everything that speaks HTTP or decides about a request (design, section 1)."""
