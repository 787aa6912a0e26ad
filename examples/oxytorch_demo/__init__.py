"""The demo: real models trained by plain PyTorch, by the best of stock PyTorch and by Oxytorch, interleaved."""
