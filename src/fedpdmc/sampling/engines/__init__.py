"""How rounds are run: compiled for sites in this process, one message at a time for all others."""
