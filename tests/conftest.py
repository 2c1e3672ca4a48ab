"""What has to be settled before any test module imports a framework."""

import os

# Each is read once, while the framework is imported. A value from outside wins.
os.environ.setdefault("KERAS_BACKEND", "tensorflow")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
# oneDNN picks summation orders by CPU, so the same test would round differently elsewhere.
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
