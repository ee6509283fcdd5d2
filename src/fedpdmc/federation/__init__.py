"""How plans reach sites."""
