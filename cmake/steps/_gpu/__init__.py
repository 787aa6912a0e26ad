"""What `make gpu` is made of; cmake/steps/gpu.py is the program."""
