"""What a person sees while something runs: progress, warnings, and a clean end at Ctrl-C."""
