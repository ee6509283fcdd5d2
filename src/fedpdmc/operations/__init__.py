"""What an operator uses around a study: checks before it, a bundle for each site, services, and a status page."""
