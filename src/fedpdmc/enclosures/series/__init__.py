"""Values on a cell as series in time with a remainder."""
