"""TensorFlow without Keras: gradients, the step, the tape, and the data for a monitor."""
