"""Two virtual devices on the CPU, for tests with replicas."""

import tensorflow as tf


def split_cpu():
    """Makes TensorFlow see two CPUs; possible only before its first operation.

    All tests share a process, and some run operations while they are collected. So each folder
    whose tests do calls this in its conftest.py; a second call changes nothing.
    """
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
