"""What a site does with its records: it answers plans, under a privacy budget if it has one."""
