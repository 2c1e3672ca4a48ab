"""What Keras 3 does not document and is used here.

Objects are taken here and nowhere else. Of attributes there is a list, by what has them; the tests
hold each release to it, and hold the sources to the list.
"""

from __future__ import annotations

from typing import Any

from lossscale.frameworks.common.private_names import private_module, private_name

no_automatic_dependency_tracking: Any = private_name(
    "keras.src.utils.tracking",
    "no_automatic_dependency_tracking",
    "keep the variables that are trained out of the optimizer's own, as Keras' `build` does",
)
random_functions: Any = private_name(
    "keras.src.backend", "random", "let layers draw the same numbers in float16 and in float32"
)
in_stateless_scope: Any = private_name(
    "keras.src.backend.common.stateless_scope",
    "in_stateless_scope",
    "see whether variables hold their values, or a stateless scope does",
)


def trainer() -> Any:
    """Returns the module whose `LossScaleOptimizer` is what `compile` makes."""
    return private_module(
        "keras.src.trainers.trainer",
        "let `compile` make the documented class under lossscale.install()",
    )


OF_OPTIMIZERS = {
    "_iterations": "the counter of applied steps, where `iterations` may be divided",
    "_learning_rate": "the variable or the schedule, which is no weight in the documents",
    "_variables": "all variables, of which the wrapper makes a list of its own",
    "_trainable_variables": "what the optimizer was built with, in the order of its slots",
    "_tracker": "what puts variables into that list",
    "_var_key": "what slots are found by",
    "_get_variable_index": "which slot belongs to a variable",
    "_check_variables_are_known": "the error about a variable that it was not built with",
    "_track_variable": "what lists a variable, to see which of them `add_variable` has made",
}
OF_OPTIMIZERS_ON_TENSORFLOW = {
    "_all_reduce_sum_gradients": "the sum over replicas, left out for gradients that are summed",
}
OF_MODELS = {
    "_compute_loss": "the loss with what the layers add",
    "_compile_loss": "the loss that the model was compiled with",
    "_compile_metrics": "the metrics that the model was compiled with, set aside for a while",
    "_call_has_training_arg": "whether `call` takes `training`",
    "_flatten_layers": "the layers inside of layers",
    "_inputs_struct": "how inputs are nested",
    "_outputs_struct": "how outputs are nested",
}
OF_SEQUENTIALS = {"_functional": "the graph of its layers"}
OF_LAYERS = {
    "_dtype_policy": "what a layer computes in, replaced while gradients are measured",
    "_trainable_variables": "the order of variables in old files",
    "_non_trainable_variables": "the order of variables in old files",
}
OF_COMPILED_LOSSES = {
    "_user_loss": "what `compile` was given",
    "_user_loss_weights": "what `compile` was given",
}
OF_TENSORS = {"_keras_history": "which layer has made a tensor of a graph"}
OF_VARIABLES = {"_value": "the tensor of PyTorch, which is changed in place"}
OF_SOME = {
    "_keras_mask": "of tensors that a layer has masked: the mask",
    "_u_product": "of Nadam: the product that older files lack",
    "_momentum": "of SGD: whether it has slots",
}
