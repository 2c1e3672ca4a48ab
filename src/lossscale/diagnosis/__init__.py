"""What float16 does to the gradients of a model, and which rule of loss scaling it needs."""
