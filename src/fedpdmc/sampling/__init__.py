"""From sites and a prior to a posterior: arguments, reference, coordinator, and the engines that run it."""
