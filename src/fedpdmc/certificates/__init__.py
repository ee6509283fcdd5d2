"""Keys and certificates of the parties of a study."""
