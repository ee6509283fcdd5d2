"""The site's side of a study: requests checked, answered once, and logged."""
