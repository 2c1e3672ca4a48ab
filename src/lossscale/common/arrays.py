"""What the optimizers of Keras 3 and tf_keras need of a framework: a record of functions.

`tensorflow/arrays.py` has that of Keras on TensorFlow and of tf_keras, `keras/backends` those of
JAX and PyTorch.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import lossscale.framework_types as ft

Location: TypeAlias = tuple[object, Sequence[int]]
"""Where a call is made: the graph being traced or None, and the numbers of the replicas."""


@dataclasses.dataclass(frozen=True, eq=False)
class Arrays:
    """Functions of a framework's arrays and variables; the defaults are those of one device."""

    # --- Losses and gradients -----------------------------------------------------------------

    # Multiplies a loss by the scale, in float32 or wider.
    scaled: Callable[[ft.Array, ft.Scalar], ft.Tensor]
    # Divides gradients by the scale, in float32 or wider; sparse stays sparse. The last argument
    # says whether the scale is a power of two.
    unscaled: Callable[[ft.Gradients, ft.Scalar, bool], ft.Gradients]
    # Returns whether gradients are finite when they are unscaled, a boolean scalar tensor. Takes
    # the same arguments; without a scale they are unscaled already.
    all_finite: Callable[..., ft.Scalar]
    # Returns the gradients in a nest, without None.
    flat_gradients: Callable[[ft.Structure], list[ft.Gradient]]

    # --- Scalar variables ---------------------------------------------------------------------

    # Returns the current value, a tensor that does not change with the variable.
    read: Callable[[ft.Variable], ft.Tensor]
    # Set a variable to a tensor or a Python number, and add one to it; a bool counts as 1 or 0.
    # Both return the operation in a graph.
    assign: Callable[[ft.Variable, ft.Scalar], ft.Operation]
    add: Callable[[ft.Variable, ft.Scalar], ft.Operation]
    # Whether a variable is in the memory of the host, so that nothing waits to read it.
    is_on_host: Callable[[ft.Variable], bool]

    # --- A step -------------------------------------------------------------------------------

    # Applies gradients or skips, then updates the loss scale. Takes
    #   finite: whether the gradients are finite on all replicas;
    #   step: the step;
    #   inner: the inner optimizer;
    #   written: returns the variables that it may change;
    #   apply: divides a list of gradients by a scale and applies it;
    #   update: updates the loss scale and the counters, given `finite`.
    # Returns the operation that does it in a graph of TensorFlow.
    branch: Callable[..., ft.Operation]
    # Runs a step of guarded models, and puts weights back if it was skipped. Takes
    #   models, step: the models, and their step with its arguments, a `functools.partial`;
    #   counters: the numbers of skipped steps of the loss scale optimizers, variables;
    #   weights: the weights of the models to put back.
    # Returns what the step returns.
    run_guarded: Callable[..., ft.Structure]
    # Returns what tracks overflows for a monitor.
    new_overflow_tracker: Callable[[], Any]
    # Returns whether the gradients of a step are finite, and the step, unscaled on the way; takes
    # the step, the rule and this record. None: they are checked by `all_finite`, and divided when
    # they are applied.
    check: Callable[..., tuple[ft.Scalar, Any]] | None = None
    # Whether the gradients are finite on every replica, given whether they are on this one.
    on_all_replicas: Callable[[ft.Scalar], ft.Scalar] = lambda finite: finite
    # Whether the host sees the result of a step with these gradients while it is taken.
    runs_now: Callable[[ft.Gradients], bool] = lambda gradients: True
    # Returns what reads a scalar variable as a Python number, if the host may update the rule's
    # state with such numbers, which is faster in eager mode; None if tensors do.
    host_reader: Callable[[], Callable[[ft.Variable], Any] | None] = lambda: None
    # Makes the weights of a model as a call with these inputs would; on JAX, Keras has made them.
    trace_call: Callable[[ft.Model, ft.Structure], None] = lambda model, inputs: None
    # A context in which no gradient is recorded.
    no_gradients: Callable[[], contextlib.AbstractContextManager[object]] = contextlib.nullcontext

    # --- Where a call is made -----------------------------------------------------------------

    location: Callable[[], Location] = lambda: (None, (0,))
    replica_count: Callable[[], int] = lambda: 1
    # Raises where no step can be taken.
    check_context: Callable[[], None] = lambda: None
