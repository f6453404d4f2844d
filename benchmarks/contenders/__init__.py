"""One short script for each loop that is measured, started as ranks by `contender_processes`."""
