"""All derivatives of a value up to an order, enclosed on balls about a point."""
