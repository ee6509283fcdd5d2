"""Messages between the coordinator and sites on other machines."""
