"""What a site reveals, what that costs in privacy, and how the cost is accounted for. Importing this does not import JAX."""
