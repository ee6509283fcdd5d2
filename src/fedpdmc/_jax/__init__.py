"""What the package asks of JAX: 64 bits, compilation, random streams."""
