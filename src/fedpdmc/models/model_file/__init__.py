"""Models as data: a text of operations that a site reads, checks and rebuilds, in place of code that it must trust."""
