"""Values along an interval of path as polynomials of time with a proved error."""
