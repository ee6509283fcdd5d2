"""Proofs that a program is continuous in its parameters."""
