"""What a run leaves: paths, posterior, diagnostics, certificate, archive."""
