"""Undocumented names of TensorFlow that lossscale uses; they are looked up only here.

`tf.__internal__` is its interface for Keras, as undocumented as the modules below
`tensorflow.python`.
"""

from __future__ import annotations

from collections.abc import Callable

import tensorflow as tf

from lossscale.common.private_names import private_module, private_name
from lossscale.framework_types import Class, Function, Library, Tensor

Trackable: Class = private_name(
    "tensorflow",
    "__internal__.tracking.Trackable",
    "have a place in checkpoints that is no `tf.Module`",
)
DelegatingTrackableMixin: Class = private_name(
    "tensorflow",
    "__internal__.tracking.DelegatingTrackableMixin",
    "be one node in a checkpoint with the inner optimizer",
)
strategy_supports_no_merge_call: Callable[[], bool] = private_name(
    "tensorflow",
    "__internal__.distribute.strategy_supports_no_merge_call",
    "see whether replicas can meet inside of a branch",
    # Without the name, replicas synchronize outside of it, which is always correct.
    fallback=lambda: False,
)
_AUTOGRAPH = "__internal__.autograph"
_TRANSLATE = "translate what users wrote where they called this library"
tf_convert: Callable[..., Function] = private_name(
    "tensorflow", f"{_AUTOGRAPH}.tf_convert", _TRANSLATE
)
control_status_ctx: Callable[[], object] = private_name(
    "tensorflow", f"{_AUTOGRAPH}.control_status_ctx", _TRANSLATE
)
is_in_xla: Callable[[tf.Graph], bool] = private_name(
    "tensorflow.python.ops.control_flow_util",
    "GraphOrParentsInXlaContext",
    "see whether a function that is being traced will be compiled",
    # Without the name, XLA gets a branch as graphs do, which is only slower.
    fallback=lambda graph: False,
)
xla_optimization_barrier: Callable[[list[Tensor]], list[Tensor]] = private_name(
    "tensorflow.compiler.tf2xla.ops.gen_xla_ops",
    "xla_optimization_barrier",
    "keep XLA from taking a fixed scale together with a learning rate",
    # Without the name, an update may be 0 at a fixed scale above 2**100.
    fallback=lambda input: input,
)


def own_loss_scales() -> Library:
    """Returns the module with which tf.compat.v1's loss scale optimizer reads its argument."""
    return private_module(
        "tensorflow.python.training.experimental.loss_scale",
        "let tf.compat.v1's loss scale optimizer read the loss scales of lossscale.install()",
    )


def as_one_operation(branch: Tensor) -> Tensor:
    """Keeps TensorFlow from rewriting a branch to a switch for each tensor that enters it.

    A step has hundreds of these tensors, and one operation costs less. But it runs on one device,
    where all of its inputs must be, so with several devices nothing is done.

    Args:
        branch: The result of `tf.cond`, a tensor; in eager mode nothing is done.

    Returns:
        The branch.
    """
    if tf.executing_eagerly() or len(tf.config.list_logical_devices()) > 1:
        return branch
    operation = branch.op
    while operation.type == "Identity":
        operation = operation.inputs[0].op
    # Without the name, the branch is rewritten, which is only slower.
    if operation.type in ("If", "StatelessIf") and hasattr(operation, "_set_attr"):
        operation._set_attr("_lower_using_switch_merge", tf.compat.v1.AttrValue(b=False))
    return branch
