"""Two virtual devices on the CPU, for tests with replicas."""

import functools

import tensorflow as tf


def split_cpu():
    """Makes TensorFlow see two CPUs; possible only before its first operation.

    All tests share a process, and some run operations while they are collected. So each folder
    whose tests do calls this in its conftest.py; a second call changes nothing.
    """
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)


@functools.cache
def strategy():
    """Two replicas. One strategy for all tests: TensorFlow numbers the collectives anew for each of
    a process, and those of a second one meet those of the first."""
    made = tf.distribute.MirroredStrategy(["/cpu:0", "/cpu:1"])
    assert made.num_replicas_in_sync == 2
    return made
