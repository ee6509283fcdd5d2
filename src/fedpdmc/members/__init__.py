"""What a site does with its records: it answers plans, within its privacy budget if there is one."""
