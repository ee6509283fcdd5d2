"""gRPC streams with mutual TLS."""
