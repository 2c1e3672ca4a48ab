"""What tf_keras does not document and is used here.

Objects are taken here and nowhere else. Of attributes there is a list, by what has them; the tests
hold each release to it, and hold the sources to the list.
"""

from __future__ import annotations

from typing import Any

from lossscale.frameworks.common.private_names import private_module, private_name

_LOSS_SCALING = "tf_keras.src.mixed_precision.loss_scale_optimizer"

# Not by the public name, which lossscale.install() replaces.
BaseLossScaleOptimizer: Any = private_name(
    _LOSS_SCALING, "BaseLossScaleOptimizer", "see whether an optimizer has loss scaling already"
)
LossScaleOptimizerV3: Any = private_name(
    _LOSS_SCALING, "LossScaleOptimizerV3", "be an instance of tf_keras' class for new optimizers"
)
LegacyLossScaleOptimizer: Any = private_name(
    _LOSS_SCALING, "LossScaleOptimizer", "be an instance of tf_keras' class for legacy optimizers"
)
LossScaleOptimizerMetaclass: Any = private_name(
    _LOSS_SCALING, "LossScaleOptimizerMetaclass", "pick the class by the optimizer to wrap"
)
RandomGenerator: Any = private_name(
    "tf_keras.src.backend", "RandomGenerator", "let layers draw the same numbers in each run"
)
AutoCastVariable: Any = private_name(
    "tf_keras.src.mixed_precision.autocast_variable",
    "AutoCastVariable",
    "see whether a layer reads a variable in another dtype",
)
create_autocast_variable: Any = private_name(
    "tf_keras.src.mixed_precision.autocast_variable",
    "create_autocast_variable",
    "let a layer read a variable as it would in float16",
)
track_variable: Any = private_name(
    "tf_keras.src.backend",
    "track_variable",
    "have variables initialized in graphs of TensorFlow 1",
    fallback=lambda variable: None,
)

_UNDER_INSTALL = "let `compile` make the documented class under lossscale.install()"


def loss_scaling() -> Any:
    """Returns the module that has tf_keras' own loss scale optimizers."""
    return private_module(_LOSS_SCALING, _UNDER_INSTALL)


def optimizers() -> Any:
    """Returns the module whose `convert_to_legacy_optimizer` is what `compile` calls."""
    return private_module("tf_keras.src.optimizers", _UNDER_INSTALL)


def trainers() -> tuple[Any, Any]:
    """Returns the modules of `compile`: the one of TensorFlow 2, and that of 1."""
    engine = "tf_keras.src.engine"
    return (
        private_module(f"{engine}.training", _UNDER_INSTALL),
        private_module(f"{engine}.training_v1", _UNDER_INSTALL),
    )


OF_OPTIMIZERS = {
    "_learning_rate": "the variable, which is no weight in the documents",
    "_variables": "all variables, to which `add_weight` adds",
    "_index_dict": "the variables that it was built with",
    "_var_key": "what slots are found by",
    "_mesh": "whether gradients are of DTensor, and whole already",
    "_run_with_dtensor": "whether gradients are of DTensor, and whole already",
    "_build_learning_rate": "a schedule of a file as what the optimizer has",
    "_deferred_dependencies": "values of a checkpoint for variables that are made later",
    "_lookup_dependency": "the children of an optimizer in a checkpoint",
    "_create_or_restore_slot_variable": "slots in a checkpoint",
    "_track_trackable": "the place of the loss scale in a checkpoint",
}
OF_LEGACY_OPTIMIZERS = {
    "_hyper": "the names of settings",
    "_set_hyper": "a setting of a file",
    "_initial_decay": "a setting of a file",
    "_create_all_weights": "slots for variables",
    "_compute_gradients": "gradients of a scaled loss",
    "_aggregate_gradients": "the sum over replicas, before the check",
    "_transform_unaggregated_gradients": "what comes before that sum",
}
OF_MODELS = {
    "_flatten_layers": "the layers inside of layers",
    "_is_graph_network": "whether a model is a graph of layers",
}
OF_LAYERS = {
    "_dtype_policy": "what a layer computes in, replaced while gradients are measured",
    "_compute_dtype_object": "what a layer computes in, replaced while gradients are measured",
}
OF_COMPILED_LOSSES = {
    "_user_losses": "what `compile` was given",
    "_user_loss_weights": "what `compile` was given",
}
OF_TENSORS = {"_keras_history": "which layer has made a tensor of a graph"}
OF_VARIABLES = {"_unique_id": "what slots of legacy optimizers are found by"}
OF_AUTOCAST_VARIABLES = {"_variable": "the variable that assignments are passed on to"}
OF_CALLBACKS = {"_supports_tf_logs": "whether `logs` may stay on the device"}
OF_SOME = {
    "_keras_mask": "of tensors that a layer has masked: the mask",
    "_momentum": "of legacy SGD: whether it has slots",
    "_random_generator": "of layers that draw numbers: their seeds, to be put back",
    "_generator": "of such a generator: its state",
    "_seed": "of such a generator: its seed",
    "_u_product": "of Nadam: the product that older files lack",
    "_u_product_counter": "of Nadam: which step the product is of, which no file has",
    "_is_wrapped_by_loss_scale_optimizer": "of wrapped optimizers: tf_keras' mark",
    "_loss_scale_value": "of fixed loss scales under tf.compat.v1: their number",
    "_coalesced_children": "of optimizers that are in a checkpoint: a list that grows stale",
}
