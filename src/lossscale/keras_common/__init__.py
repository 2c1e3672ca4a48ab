"""What the optimizers and monitors of both generations of Keras share."""
