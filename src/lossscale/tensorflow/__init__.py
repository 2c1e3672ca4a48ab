"""TensorFlow without Keras: arrays, the step, the tape, what a monitor reads."""
