"""Code that Keras 3 and tf_keras share, the optimizer and its step; imports neither."""
