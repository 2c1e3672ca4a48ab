"""TensorFlow, for Keras 3 and tf_keras alike: gradients, the step, the tape, overflow tracking.

It imports neither Keras.
"""
