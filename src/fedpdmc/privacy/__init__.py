"""What a site gives away, what that costs, and the account it keeps of it. Importing this does not import JAX."""
