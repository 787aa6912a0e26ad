"""What `make gpu` is made of; tools/gpu.py is the program."""
