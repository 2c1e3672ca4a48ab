"""What this release of tf_keras and TensorFlow has of what they do not document."""

from __future__ import annotations

import pytest
import tensorflow as tf
import tf_keras

from lossscale.callbacks import LossScaleMonitor
from lossscale.tensorflow import private_names as of_tensorflow
from lossscale.tf_keras import private_names


def test_attributes_mean_what_is_assumed():
    optimizer, weights = tf_keras.optimizers.SGD(0.5), [tf.Variable(1.0), tf.Variable(2.0)]
    optimizer.build(weights)
    assert {optimizer._var_key(weight) for weight in weights} == set(optimizer._index_dict)
    legacy = tf_keras.optimizers.legacy.SGD(0.5, momentum=0.5)
    assert "learning_rate" in legacy._hyper
    assert hasattr(legacy, "_momentum")
    nadam = tf_keras.optimizers.Nadam()
    nadam.build(weights)
    assert hasattr(nadam, "_u_product")
    assert hasattr(nadam, "_u_product_counter")


def test_logs_stay_on_the_device_if_a_callback_says_so():
    class Noting(tf_keras.callbacks.Callback):
        seen = None

        def __init__(self):
            super().__init__()
            self._supports_tf_logs = True

        def on_train_batch_end(self, batch, logs=None):
            self.seen = logs["loss"]

    model = tf_keras.Sequential([tf_keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    noting = Noting()
    callbacks = tf_keras.callbacks.CallbackList([noting], model=model)
    callbacks.on_train_batch_end(0, {"loss": tf.constant(1.0)})
    assert isinstance(noting.seen, tf.Tensor)
    assert LossScaleMonitor(framework="tf_keras")._supports_tf_logs


def test_modules_and_classes_are_those_that_are_meant():
    own = private_names.loss_scaling()
    assert own.BaseLossScaleOptimizer is private_names.BaseLossScaleOptimizer
    for cls in (private_names.LossScaleOptimizerV3, private_names.LegacyLossScaleOptimizer):
        assert issubclass(cls, private_names.BaseLossScaleOptimizer)
    training, training_v1 = private_names.trainers()
    assert training.lso.BaseLossScaleOptimizer
    assert training_v1.loss_scale_optimizer.LossScaleOptimizer
    assert private_names.optimizers().convert_to_legacy_optimizer


def test_tensorflow_has_its_own():
    assert issubclass(of_tensorflow.DelegatingTrackableMixin, object)
    assert isinstance(tf.Variable(1.0), of_tensorflow.Trackable)
    assert of_tensorflow.own_loss_scales().get(2.0).get_config()
    found = []
    for compiled in (True, False):
        tf.function(
            lambda: found.append(bool(of_tensorflow.is_in_xla(tf.compat.v1.get_default_graph()))),
            jit_compile=compiled,
        ).get_concrete_function()
    # False for both where the fallback serves.
    assert found == [True, False]
    assert isinstance(of_tensorflow.strategy_supports_no_merge_call(), bool)


def test_a_node_of_a_checkpoint_is_asked_for_what_is_overridden(tmp_path):
    asked = []

    class Node(of_tensorflow.Trackable):
        def _trackable_children(self, save_type="checkpoint", **kwargs):
            asked.append("children")
            return super()._trackable_children(save_type, **kwargs)

        def _serialize_to_tensors(self):
            asked.append("written")
            return {"number": tf.constant(3)}

        def _restore_from_tensors(self, restored_tensors):
            asked.append(int(restored_tensors["number"]))

    path = tf.train.Checkpoint(node=Node()).write(str(tmp_path / "checkpoint"))
    tf.train.Checkpoint(node=Node()).read(path)
    assert {"children", "written", 3} <= set(asked)


def test_what_can_be_waited_for_in_a_graph():
    with tf.Graph().as_default():
        assert hasattr(tf.compat.v1.Variable(1.0, use_resource=True), "_as_graph_element")
    assert not hasattr(1.0, "_as_graph_element")


def test_a_marked_function_is_not_translated():
    def branching(x):
        return x + 1 if x > 0 else x

    def calling(function):
        return tf.function(lambda x: function(x))(tf.constant(1.0))

    assert float(calling(branching)) == 2.0
    branching.autograph_info__ = {}
    with pytest.raises(tf.errors.OperatorNotAllowedInGraphError):
        calling(branching)


def test_what_users_wrote_is_translated():
    def branching(x):
        return x + 1 if x > 0 else x

    @tf.function
    def traced(x):
        convert, status = of_tensorflow.tf_convert, of_tensorflow.control_status_ctx()
        return convert(branching, status, convert_by_default=False)(x)

    assert float(traced(tf.constant(1.0))) == 2.0
