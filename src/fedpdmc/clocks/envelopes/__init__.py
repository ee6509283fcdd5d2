"""Bounds of rates on intervals of a path, and polynomials with a proved error that decide most candidates."""
