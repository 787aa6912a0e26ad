"""What bench/results/tables.py writes into pages, by where it was measured."""
